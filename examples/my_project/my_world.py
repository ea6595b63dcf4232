from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Options:
    largest: int = 9


class GuessNumber:
    """Guess a number; the world says higher or lower."""

    Options = Options

    def __init__(self, options):
        self._options = options

    def reset(self, *, seed=None, options=None):
        self._number = Random(seed).randint(1, self._options.largest)
        return f"Guess a number from 1 to {self._options.largest}.", {"instructions": "Answer with a number alone."}

    def step(self, action):
        guess = int(action) if action.strip().isdigit() else 0
        right = guess == self._number
        return (
            "right" if right else "higher" if guess < self._number else "lower",
            float(right),
            right,
            False,
            {"solved": right},
        )

    def close(self):
        pass


class Dice:
    """A tool: one roll."""

    Options = Options
    schemas = (
        {
            "type": "function",
            "function": {
                "name": "roll",
                "description": "Roll a die.",
                "parameters": {"type": "object", "properties": {}},
            },
        },
    )

    def __init__(self, options):
        self._options = options

    async def call(self, name, arguments):
        return str(Random().randint(1, self._options.largest))


class OneQuestion:
    """An agent: it asks the policy with any client, and judges the answer itself."""

    Options = Options

    def __init__(self, options):
        self._options = options

    async def run(self, task, endpoint):
        from openai import AsyncOpenAI

        from roll_async.agents.protocol import AgentResult

        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            messages = [{"role": "user", "content": f"Say {task.seed % self._options.largest}."}]
            reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
        return AgentResult(reward=float(str(task.seed % self._options.largest) in reply.choices[0].message.content))
