"""What a reward says of one answer, and the shape of the function that says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Protocol

from roll_async.config.user_code import place_of, traceback_of
from roll_async.observe.outside import LARGEST, message_of
from roll_async.schema import Reward, RewardStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One answer judged."""

    score: float
    acc: float
    """1 = right, 0 = wrong."""
    format: float = 1.0
    """1 = the answer was where it should be."""
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, usable by `filter_groups.metric` and published as `reward/metrics/NAME`."""


def no_answer(answer_format: str) -> Verdict:
    """Nothing to compare: wrong, and not in the form that was asked for."""
    form = "any form" if answer_format == "auto" else f"the form {answer_format}"
    return Verdict(score=0.0, acc=0.0, format=0.0, reason=f"no answer in {form}")


def reward_of_error(error: BaseException) -> Reward:
    """No score, because a scorer raised."""
    reason, place = f"{type(error).__name__}: {message_of(error)}", place_of(error)
    return Reward(score=0.0, status=RewardStatus.ERROR, reason=reason, place=place, traceback=traceback_of(error))


class RewardFunction(Protocol):
    """Runs in a reward worker process. Never evaluates the text as code outside a sandbox.

    Raise ConnectionError for an outage (the sample is asked again later); any other exception means that this sample
    cannot be judged.
    """

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict: ...


def verdict_of(result: object) -> Verdict:
    """What a user's function returned, as a Verdict: one already, a number, or a mapping with `score`.

    A number is the score, and `acc` is 1 iff it is > 0. A mapping may also give `acc`, `format` and `reason`; its other
    numbers become metrics, its other texts are dropped. Scalars of numpy and torch are numbers. Raises TypeError or
    ValueError for anything else, and for a number that is not finite, or above 1e15: in float32 its square would be
    infinite, and the advantages of its group NaN.

        {"score": 0.5, "acc": True, "f1": 0.7}  ->  Verdict(score=0.5, acc=1.0, metrics={"f1": 0.7})
    """
    result = _plain(result)
    if isinstance(result, Real):
        score = _number("score", result)
        return Verdict(score=score, acc=float(score > 0))
    if isinstance(result, Mapping):
        return _of_mapping(result)
    if not isinstance(result, Verdict):
        kind = type(result)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise TypeError(f"a reward returns a Verdict, a number or a mapping with 'score', not {name}")
    return replace(
        result,
        **{name: _number(name, getattr(result, name)) for name in ("score", "acc", "format")},
        metrics={name: _number(name, value) for name, value in result.metrics.items()},
    )


def _of_mapping(result: Mapping[object, object]) -> Verdict:
    if "score" not in result:
        raise ValueError(f"a reward's mapping needs 'score'; it has {', '.join(map(str, result)) or 'nothing'}")
    score = _number("score", result["score"])
    found = {str(k): _plain(v) for k, v in result.items()}
    numbers = {k: _number(k, v) for k, v in found.items() if isinstance(v, Real) or k in ("acc", "format")}
    return Verdict(
        score=score,
        acc=numbers.pop("acc", float(score > 0)),
        format=numbers.pop("format", 1.0),
        reason=str(result.get("reason", "")),
        metrics={k: v for k, v in numbers.items() if k != "score"},
    )


def _plain(value: object) -> object:
    """Numpy's and torch's scalars as Python's; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value  # type: ignore[attr-defined]


def _number(name: str, value: object) -> float:
    value = _plain(value)
    if not isinstance(value, Real) or not abs(value) <= LARGEST:  # written so that NaN fails, too
        raise ValueError(f"{name} must be a finite number, at most {LARGEST:g} in size, got {repr(value)[:50]}")
    return float(value)
