"""A tiny model that has seen the peers' tasks: it calls tools, sometimes, and is seldom right."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import make_agentic_assets as assets

STEPS, ROWS = 250, 8


def product(rng: random.Random) -> list[tuple[str, str]]:
    """A question, half of the time computed with the calculator."""
    a, b, c = (rng.randint(10, 99) for _ in range(3))
    question, value = ("user", f"{a}*{b}+{c}="), str(a * b + c)
    if rng.random() < 0.5:
        return [question, ("assistant", str(rng.randint(100, 9999)))]
    call = f'{assets.CALL}{a}*{b}+{c}"}}}}\n</tool_call>'
    return [question, ("assistant", call), ("tool", value), ("assistant", value)]


def command(rng: random.Random) -> list[tuple[str, str]]:
    """A task of mini-swe-agent, half of the time done at once."""
    number = rng.randint(10, 99)

    def bash(text: str) -> str:
        return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{text}"}}}}\n</tool_call>'

    chat = [("system", "Use bash."), ("user", f"Print {number}.")]
    if rng.random() < 0.5:
        chat += [("assistant", bash(f"echo {rng.randint(10, 99)}")), ("tool", "12\n")]
    return [*chat, ("assistant", bash(f"echo {number}")), ("tool", f"{number}\n"), ("assistant", bash(SUBMIT))]


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def echo(rng: random.Random) -> list[tuple[str, str]]:
    """Short messages."""
    chat = [("user", "ready!")]
    for _ in range(3):
        word = "ab" * rng.randint(1, 6)
        chat += [("assistant", word), ("user", word)]
    return chat[:-1]


def rows(tokenizer, rng: random.Random) -> list[tuple[list[int], list[int]]]:
    """A batch of all tasks."""
    found = [assets.encoded(tokenizer, product(rng), tool="calculator") for _ in range(ROWS)]
    found += [assets.encoded(tokenizer, command(rng), tool="bash") for _ in range(ROWS)]
    return found + [assets.encoded(tokenizer, echo(rng)) for _ in range(ROWS)]


def make_model(folder: Path) -> Path:
    """The folder of the model; made where it is missing, in a minute or two."""
    if not (folder / "model" / "config.json").is_file():
        assets.make_model(folder / "random")
        assets.make_tokenizer(folder / "random")
        assets.warm_start(folder / "random", folder / "model", rows, STEPS)
    return folder / "model"
