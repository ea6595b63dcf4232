"""A verifiers environment, written as its users write them: a task with a reward, a taskset, a harness with one tool.

The harness runs its loop in this process, which verifiers allows as long as every call goes through its interception
server; that relays to the gateway.
"""

import itertools
import json

import verifiers.v1 as vf
from calculator import TOOL, answer, question, result
from openai import AsyncOpenAI

__all__ = ["CalculatorHarness", "CalculatorTaskset"]


class CalculatorData(vf.TaskData):
    """The expression of the prompt."""

    expression: str


class CalculatorTask(vf.Task[CalculatorData, vf.State, vf.TaskConfig]):
    """Judged by its last reply and its calls."""

    @vf.reward
    async def score_answer(self, task, trace) -> float:
        """As the other peers are judged."""
        return result(task.expression, trace.last_reply, len(trace.tool_messages))["reward"]


class CalculatorTaskset(vf.Taskset[CalculatorTask, vf.TasksetConfig]):
    """A task for every seed."""

    INFINITE = True

    def load(self):
        """In the order of seeds."""
        return map(self.task, itertools.count())

    def task(self, seed):
        """The task of one seed."""
        expression = question(seed)
        return CalculatorTask(CalculatorData(prompt=f"{expression}=", expression=expression), self.config.task)


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    """The plain `openai` client in a loop."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """One question."""
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(3):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
                said = reply.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    break
                for call in said.tool_calls:
                    content = answer(json.loads(call.function.arguments).get("expression"))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
