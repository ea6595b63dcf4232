"""Reward functions by name, or by dotted path to a user's function or class."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from roll_async.config.schema_rollout import REWARDS as NAMES
from roll_async.config.user_code import defined_at, find, told
from roll_async.rewards.verdict import Verdict, verdict_of

REWARDS = {name: path for name, path in NAMES.items() if path is not None}
"""Judged in worker processes."""

_VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_PAUSES_S = (0.2, 1.0)
"""Before a reward is built again whose files could not be read: a folder in the network may be away for a moment."""


def is_rule(name: str) -> bool:
    """Whether the reward reads text and computes, by its name or by the path of its class: its workers need neither
    files nor network nor processes, and have none.
    """
    return not needs_environment(name) and REWARDS.get(name, name) != REWARDS["code_sandbox"]


def needs_environment(name: str) -> bool:
    """Whether the reward is a user's code, which may need variables of the run's environment."""
    return not REWARDS.get(name, name).startswith("roll_async.rewards.")


def is_own(name: str) -> bool:
    """Whether the reward is a user's code: a dotted path out of the package."""
    return name not in NAMES and needs_environment(name)


@dataclass(frozen=True)
class Judge:
    """A function behind our parameters and our return type: `RewardFunction`."""

    function: Callable[..., object]

    @cached_property
    def place(self) -> str:
        """Where it is defined."""
        return defined_at(self.function)

    @cached_property
    def _is_verl(self) -> bool:
        try:
            return tuple(inspect.signature(self.function).parameters)[:4] == _VERL_PARAMETERS
        except (TypeError, ValueError):  # a function in C without a signature
            return False

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        if not self._is_verl:
            return verdict_of(self.function(text, ground_truth, extra))
        info = json.loads(extra.get("extra_info", "{}"))
        if isinstance(info, dict) and "thought" in extra:
            info["thought"] = extra["thought"]  # of the response; the row's own columns are those of the data set
        source = extra.get("data_source", "")
        return verdict_of(
            self.function(data_source=source, solution_str=text, ground_truth=ground_truth, extra_info=info)
        )


def create_reward(name: str, options: Mapping[str, object] | None = None) -> Judge:
    """Build the function; `options` are the keyword arguments of a class. Raises ValueError naming what could not be
    found or built, and where it raised. What reads a file when it is built is built again when that fails.

    A function may return anything `verdict_of` understands, and may have verl's parameters (data_source, solution_str,
    ground_truth, extra_info) instead of ours.
    """
    path = REWARDS.get(name, name)
    if "." not in path:
        raise ValueError(f"reward type {name!r} is not one of {' | '.join(REWARDS)} and no dotted path")
    pauses_s = list(_PAUSES_S)
    while True:
        doing = "imported"
        try:
            found = find(path)
            doing = "built"
            function = found(**(options or {})) if isinstance(found, type) else found
            break
        except Exception as error:  # a user's module or class may raise anything
            if isinstance(error, OSError) and pauses_s:
                time.sleep(pauses_s.pop(0))
                continue
            raise ValueError(f"reward type {name!r} cannot be {doing}: {told(error)}") from error
    if not callable(function):
        raise ValueError(f"reward type {name!r} is a {type(function).__name__}, neither a function nor a class")
    return Judge(function)
