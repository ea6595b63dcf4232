"""An agent that knows nothing of training: the plain `openai` client and one tool. `base_url` and key are all that a
run changes.
"""

import json
from dataclasses import dataclass
from random import Random

from openai import AsyncOpenAI

from roll_async.agents.protocol import AgentResult
from roll_async.envs.worlds.arithmetic import compute, shown

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """`env_config` of this agent."""

    max_calls: int = 2


class CalculatorAgent:
    """One question; the reward is 1 for the right number."""

    Options = Options

    def __init__(self, options):
        self._options = options

    async def run(self, task, endpoint):
        """Ask, run the calculator where it is called, judge the last answer."""
        rng = Random(task.seed)
        a, b, c = (rng.randint(10, 99) for _ in range(3))
        expression = rng.choice((f"{a}*{b}", f"{a}*{b}+{c}", f"{a}+{b}*{c}", f"{a}*{b}-{c}"))
        messages, calls = [{"role": "user", "content": f"{expression}="}], 0
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            while True:
                reply = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[TOOL])
                said = reply.choices[0].message
                if not said.tool_calls or calls >= self._options.max_calls:
                    break
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls:
                    calls += 1
                    result = _calculate(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        right = (said.content or "").strip() == str(compute(expression)[0])
        return AgentResult(reward=float(right), solved=right, metrics={"calls": float(calls)})


def _calculate(arguments):
    try:
        return shown(compute(str(json.loads(arguments).get("expression")))[0])
    except ValueError as error:
        return f"error: {error}"
