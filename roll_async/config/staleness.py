"""The arithmetic of the staleness contract: admission, deadline, look-ahead. Pure functions of integers.

Indexing. Training steps count from 1; weight version v holds the weights after step v; version 0 is the initial
model. Step t starts from version t - 1, the freshest there can be, so the staleness of a token of version v trained
at step t is `t - 1 - v`, and a group admitted at version v must be trained by step `v + M + 1`, M = max_versions.

Why the look-ahead rule is enough. Call a set of groups schedulable after step t iff for every s > t the groups of the
set due by step s number at most (s - t) * G, the groups that steps t + 1 ... s train.

1. Taking keeps it: that is the rule itself (`is_schedulable` of what is left behind).
2. Admission keeps it. A slot given out while the engines hold v is due by D = v + M + 1, no group is due later, and the
   admission rule leaves at most ceil((v + (1 + r) * k) * G) - t * G groups. With M + 1 >= (1 + r) * k that is at most
   (v + M + 1 - t) * G = (D - t) * G, an integer, so the rounding costs nothing. Deadlines before D do not see the new
   group.
3. Release removes groups, and the trainer waits while no batch can be taken.

So from a schedulable set the G oldest groups can always be taken once they are finished: the groups due by s without
the G oldest are at most (s - t) * G - G = (s - (t + 1)) * G, or none are left. The trainer therefore never waits for
a group that cannot come, and no group is ever over the bound. "Overdue groups first" without the look-ahead lets
younger groups be taken until more than G fall due at one step; the step after it, some of them are over the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from math import ceil


class StalenessPolicy(str, Enum):
    """What happens to a group whose tokens are older than max_versions."""

    WAIT = "wait"  # cannot happen: the trainer waits for older groups before it would
    DROP = "drop"  # the group is discarded and its prompt requeued
    TOKEN_MASK = "token_mask"  # its old tokens leave the loss


@lru_cache(maxsize=16)
def exact_ratio(ratio: float) -> Fraction:
    """The decimal number that the user wrote: 0.1 is 1/10, not the nearest binary float, with which one group too many
    would be admitted.
    """
    return Fraction(repr(float(ratio)))


def staleness_bound(*, ratio: float, sync_every: int) -> int:
    """Largest staleness in versions that admission order can produce: ceil((1 + r) * k) - 1."""
    return ceil((1 + exact_ratio(ratio)) * sync_every) - 1


KNOWN_TO_LEARN = 8
"""Staleness up to which training is known to work; a default never exceeds it."""


def default_max_versions(*, ratio: float, sync_every: int, groups_per_batch: int, oversample_groups: int) -> int:
    """The bound of a run that sets none: the staleness that admission produces, over-sampled groups included, so that
    later steps can train these and need not abort them: ceil((1 + r) * k + o / G) - 1. Not raised beyond 8.

    Worked example: r = 1, k = 1, batches of 32 groups, 96 in flight: ceil(2 + 64 / 32) - 1 = 3.
    """
    plain = staleness_bound(ratio=ratio, sync_every=sync_every)
    if not ratio or not oversample_groups:
        return plain
    raised = ceil((1 + exact_ratio(ratio)) * sync_every + Fraction(oversample_groups, groups_per_batch)) - 1
    return max(plain, min(KNOWN_TO_LEARN, raised))


def admission_limit(*, version: int, ratio: float, sync_every: int, groups_per_batch: int) -> int:
    """Groups that may be admitted in total while every engine holds `version`: ceil((p + 1 + r) * W), p = version / k,
    W = k * G.

    p is a fraction after a resume from a step that is not a multiple of k; the limit is then tighter than at the next
    push.
    """
    window = sync_every * groups_per_batch
    return ceil((Fraction(version, sync_every) + 1 + exact_ratio(ratio)) * window)


def staleness(*, step: int, version: int) -> int:
    """Versions between the weights a token was sampled with and the freshest weights step `step` can start from."""
    return step - 1 - version


def due_step(*, admitted_version: int, max_versions: int) -> int:
    """Last training step at which a group admitted at this version is within the bound."""
    return admitted_version + max_versions + 1


def largest_excess(
    *,
    groups_by_version: Mapping[int, int],
    next_step: int,
    groups_per_batch: int,
    max_versions: int,
    taken: int = 0,
) -> tuple[int, int] | None:
    """The first deadline that cannot be met if `next_step` is the first step to train these groups.

    `taken`: groups that `next_step` has already (a batch taken in parts). Returns (number of groups too many, newest
    version due by that deadline), None when every deadline can be met.
    """
    total = 0
    # By deadline: an older version is due earlier.
    for version in sorted(groups_by_version):
        total += groups_by_version[version]
        # Steps up to the deadline, `next_step` among them.
        steps = due_step(admitted_version=version, max_versions=max_versions) - next_step + 1
        room = max(0, steps * groups_per_batch - taken)
        if total > room:
            return total - room, version
    return None


def is_schedulable(
    *,
    left_by_version: Mapping[int, int],
    step: int,
    groups_per_batch: int,
    max_versions: int,
    taken: int | None = None,
) -> bool:
    """True iff every group left can be trained in time: due by s at most (s - step) * G + G - taken, for every s >=
    step.

    `left_by_version`: groups left behind, in flight or finished, by the version they were admitted at. `taken`: groups
    of step `step` taken so far; None = all G of them.
    """
    excess = largest_excess(
        groups_by_version=left_by_version,
        next_step=step,
        groups_per_batch=groups_per_batch,
        max_versions=max_versions,
        taken=groups_per_batch if taken is None else taken,
    )
    return excess is None
