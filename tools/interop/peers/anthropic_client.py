"""The plain `anthropic` client in a loop with one tool: its dialect, its blocks, its stream."""

import json
import os

from anthropic import Anthropic
from calculator import TOOL, answer, question, result


def main():
    """One question; prints the result."""
    task, calls = json.loads(os.environ["ROLL_ASYNC_TASK"]), 0
    expression, function = question(task["seed"]), TOOL["function"]
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    client, messages = Anthropic(), [{"role": "user", "content": f"{expression}="}]
    while True:
        asked = {"model": os.environ["OPENAI_MODEL"], "max_tokens": 64, "messages": messages, "tools": [tool]}
        with client.messages.stream(**asked) as stream:
            reply = stream.get_final_message()
        used = [block for block in reply.content if block.type == "tool_use"]
        if not used or calls >= 2:
            break
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}
        )
        results = []
        for block in used:
            calls += 1
            content = answer(block.input.get("expression"))
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": content})
        messages.append({"role": "user", "content": results})
    said = "".join(block.text for block in reply.content if block.type == "text")
    print(json.dumps(result(expression, said, calls)))


if __name__ == "__main__":
    main()
