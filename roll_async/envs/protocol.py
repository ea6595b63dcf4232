"""What a world is: `gymnasium.Env` with text in and text out.

    reset(seed=...) -> (text, info)
    step(action)    -> (text, reward, terminated, truncated, info)

Keys of `info` that this package reads, all optional: `state`, what gigpo compares (default: the text); `solved`,
whether the task is done (default: a positive sum of rewards at the end); `instructions`, the system message (reset);
`tools`, JSON schemas of functions that the world itself offers (reset): a call of one of them comes to `step` as the
JSON text `{"name": ..., "arguments": {...}}`; `tool_names` and `tool_arguments`, which of the tag's tools this task
may call and arguments that go to them with every call, as `tools` and `tools_kwargs` of a prompt's row (reset);
`suffix`, what a template shows by that name; `frame`, lines of a picture for the trajectory strip.

Text may be bytes (UTF-8), a dict or a list (as JSON); None is an error. What JSON does not know in `info` becomes its
text; None is {}. A reward is a finite number up to 1e15.

A world may be async (`async def reset`, `async def step`), or say `quick = True`: its steps take microseconds and run
in the event loop. Every other world runs in a worker process (`pool.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from roll_async.observe.outside import number, plain, text_of

Info = Mapping[str, object]

_GIVES = {"reset": ("text", "info"), "step": ("text", "reward", "terminated", "truncated", "info")}


class World(Protocol):
    """A synchronous world; every `gymnasium.Env` with text spaces is one."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]: ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]: ...

    def close(self) -> None: ...


class WorldFailed(RuntimeError):
    """The world crashed, hung, or raised: the outcome of the trajectory says nothing about the policy."""


class GraderFailed(RuntimeError):
    """Raised by a world whose trajectory has ended and cannot be judged now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The result of a step of a world."""

    text: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Info = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated

    @property
    def state(self) -> str:
        """The state that gigpo compares."""
        return str(self.info.get("state", self.text))


def answer_of(op: str, result: object) -> dict:
    """What `reset` or `step` gave, as fields of an Observation that JSON can hold. Raises TypeError or ValueError for
    what it cannot be, GraderFailed for a reward that is no number.
    """
    names = _GIVES[op]
    if not isinstance(result, tuple | list) or len(result) != len(names):
        count = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise TypeError(f"{op} must give ({', '.join(names)}), it gave {count}")
    found = dict(zip(names, result, strict=True))
    info = {} if found["info"] is None else found["info"]
    if not isinstance(info, Mapping):
        raise TypeError(f"info must be a dict, it is {type(info).__name__}")
    given = plain(info)
    assert isinstance(given, dict)
    if "solved" in given:
        given["solved"] = bool(info["solved"])  # before a value that is no JSON, such as numpy's, is a text
    answer: dict[str, object] = {"text": text_of(found["text"]), "info": given}
    if op == "step":
        try:
            answer["reward"] = number(found["reward"], "the reward")
        except ValueError as error:
            raise GraderFailed(str(error)) from error
        # numpy's bool is no JSON.
        answer |= {name: bool(found[name]) for name in ("terminated", "truncated")}
    return answer


class LiveWorld(Protocol):
    """One world of one trajectory, wherever it runs. Raises WorldFailed, GraderFailed."""

    async def reset(self, seed: int) -> Observation: ...

    async def step(self, action: str) -> Observation: ...

    async def close(self) -> None: ...
