"""The plain `openai` client in a loop with one tool. Address and key come from the variables that it knows itself."""

import json
import os

from calculator import TOOL, answer, question, result
from openai import OpenAI


def main():
    """One question; prints the result."""
    task, calls = json.loads(os.environ["ROLL_ASYNC_TASK"]), 0
    expression = question(task["seed"])
    client, messages = OpenAI(), [{"role": "user", "content": f"{expression}="}]
    while True:
        reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[TOOL])
        said = reply.choices[0].message
        if not said.tool_calls or calls >= 2:
            break
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            calls += 1
            content = answer(json.loads(call.function.arguments).get("expression"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    print(json.dumps(result(expression, said.content, calls)))


if __name__ == "__main__":
    main()
