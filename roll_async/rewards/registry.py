"""Reward functions by name, or by dotted path to a user's function or class."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from importlib import import_module

from roll_async.rewards.verdict import RewardFunction, Verdict, verdict_of

REWARDS = {
    "math_rule": "roll_async.rewards.math_rule.MathRule",
    "exact_match": "roll_async.rewards.exact_match.ExactMatch",
    "multiple_choice": "roll_async.rewards.multiple_choice.MultipleChoice",
    "qa": "roll_async.rewards.qa.QuestionAnswer",
    "ifeval": "roll_async.rewards.ifeval.InstructionFollowing",
    "ifeval_strict": "roll_async.rewards.ifeval.StrictInstructionFollowing",
    "code_sandbox": "roll_async.rewards.code_sandbox.CodeSandbox",
}
"""Judged in worker processes. `llm_judge` is a client of a server and lives in the router."""

_VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


def is_rule(name: str) -> bool:
    """Whether the reward reads text and computes, by its name or by the path of its class: its workers need neither
    files nor network nor processes, and have none.
    """
    return not needs_environment(name) and REWARDS.get(name, name) != REWARDS["code_sandbox"]


def needs_environment(name: str) -> bool:
    """Whether the reward is a user's code, which may need variables of the run's environment."""
    return not REWARDS.get(name, name).startswith("roll_async.rewards.")


def create_reward(name: str, options: Mapping[str, object] | None = None) -> RewardFunction:
    """Build the function; `options` are the keyword arguments of a class. Raises ValueError naming what could not be
    found or built.

    A function may return anything `verdict_of` understands, and may have verl's parameters (data_source, solution_str,
    ground_truth, extra_info) instead of ours.
    """
    path = REWARDS.get(name, name)
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ValueError(f"reward type {name!r} is not one of {' | '.join(REWARDS)} and no dotted path")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward type {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"reward type {name!r} is a {type(found).__name__}, neither a function nor a class")
    try:
        function = found(**(options or {})) if isinstance(found, type) else found
    except TypeError as error:
        raise ValueError(f"reward type {name!r} cannot be built: {error}") from error
    return _adapted(function)


def _adapted(function: Callable[..., object]) -> RewardFunction:
    """The function behind our parameters and our return type."""
    try:
        verl = tuple(inspect.signature(function).parameters)[:4] == _VERL_PARAMETERS
    except (TypeError, ValueError):  # a function in C without a signature
        verl = False

    def judge(text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        if not verl:
            return verdict_of(function(text, ground_truth, extra))
        info = json.loads(extra.get("extra_info", "{}"))
        return verdict_of(
            function(
                data_source=extra.get("data_source", ""), solution_str=text, ground_truth=ground_truth, extra_info=info
            )
        )

    return judge
