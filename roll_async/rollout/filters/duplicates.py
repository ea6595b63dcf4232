"""Samples of a group that are copies of one another, and whether chance explains them.

Short answers repeat by chance. A long one does not: a second sample equals an answer of probability p with probability
p, so a copy of an answer with p < 1e-9 shows that two random generators have the same state.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Sequence

from roll_async.schema import Group, Sample

logger = logging.getLogger(__name__)

_RECENT_GROUPS = 256
_CHANCE = math.log(1e-9)
"""Log-probability below which a copy is not explained by chance: one false alarm in 1e9 pairs."""


class DuplicateAnswers:
    """Counts over the groups that finished last, kept and filtered ones alike: a group of copies has no reward
    variance, so counting after the filter would miss it.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT_GROUPS)
        self._warned: set[bool] = set()

    @property
    def share(self) -> float:
        """Of the samples of the last 256 groups, those with an exact copy in their group, 0..1."""
        samples = sum(n for _, n in self._recent)
        return sum(copies for copies, _ in self._recent) / samples if samples else 0.0

    def add(self, group: Group) -> None:
        """A group has all its samples. Warns, once for each cause, of copies that chance does not explain."""
        alike: dict[bytes, list[Sample]] = defaultdict(list)
        for sample in group.samples:
            alike[sample.response_token_ids.tobytes()].append(sample)  # an array has no hash
        copies = [same for same in alike.values() if len(same) > 1]
        self._recent.append((sum(map(len, copies)), len(group.samples)))
        for same in copies:
            if sum(same[0].behaviour_logprobs) < _CHANCE:  # in nats; tokens of tools have 0 and do not count
                self._warn(group, same)

    def _warn(self, group: Group, same: Sequence[Sample]) -> None:
        replicas = sorted({s.replica for s in same})
        across = len(replicas) > 1
        if across in self._warned:
            return
        self._warned.add(across)
        cause = (
            "replicas draw the same samples: their random generators have one seed (EngineSettings.seed, or a library "
            "that seeds itself)"
            if across
            else "one replica gives equal requests the same answer: its library seeds each request"
        )
        logger.warning(
            "group %d: %d of %d samples are one answer of %d tokens and probability exp(%.0f), from %s. %s; groups "
            "without reward variance have no gradient",
            group.group_id, len(same), len(group.samples), len(same[0].response_token_ids),
            sum(same[0].behaviour_logprobs), ", ".join(replicas), cause,
        )  # fmt: skip
