"""Reward functions by name, or by dotted path to a user's function or class."""

from __future__ import annotations

from importlib import import_module

from roll_async.rewards.verdict import RewardFunction

REWARDS = {
    "math_rule": "roll_async.rewards.math_rule.MathRule",
    "exact_match": "roll_async.rewards.exact_match.ExactMatch",
}


def create_reward(name: str) -> RewardFunction:
    """Build the function. Raises ValueError naming what could not be found."""
    path = REWARDS.get(name, name)
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ValueError(f"reward type {name!r} is not one of {' | '.join(REWARDS)} and no dotted path")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward type {name!r} cannot be imported: {error}") from error
    return found() if isinstance(found, type) else found
