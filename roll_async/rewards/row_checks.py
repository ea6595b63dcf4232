"""What a reward can say of a row before anything is generated: a row it could never judge is refused when it is loaded,
with its place, and not scored 0 a thousand times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roll_async.config.schema_rollout import RewardConfig
from roll_async.rewards.ifeval import parse_constraints
from roll_async.rewards.multiple_choice import reference_letters
from roll_async.rewards.sandbox.cases import COLUMNS, parse_cases

RowCheck = Callable[[str, Mapping[str, str]], object]
"""(ground_truth, other columns); raises ValueError with what is wrong with them."""

REFERENCE_COLUMNS = (*COLUMNS, "instruction_id_list")
"""Columns that hold what a reward compares with: a row with one of them needs no `ground_truth`."""


def _demand_answer(ground_truth: str, extra: Mapping[str, str]) -> None:
    if not ground_truth.strip():
        raise ValueError("a supervised row needs the answer to train on as its ground truth")


_CHECKS: dict[str, RowCheck] = {
    "code_sandbox": parse_cases,
    "ifeval": parse_constraints,
    "ifeval_strict": parse_constraints,
    "multiple_choice": reference_letters,
    "supervised": _demand_answer,
}


def row_checks(rewards: Mapping[str, RewardConfig]) -> dict[str, RowCheck]:
    """The checks of the domains that have one."""
    return {domain: check for domain, config in rewards.items() if (check := row_check(config.type)) is not None}


def row_check(reward_type: str) -> RowCheck | None:
    """The check of this type of reward; rewards that compare text take any row."""
    return _CHECKS.get(reward_type)
