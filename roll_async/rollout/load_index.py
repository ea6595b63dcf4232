"""Replicas by how busy they are, so that the least busy one is found without looking at all of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LoadIndex(Generic[K]):
    """Buckets of keys by load. `least` costs amortised O(1) when loads change by one at a time.

    Among equally busy keys the one that waits longest comes first, so an idle system deals out in turn.
    """

    def __init__(self) -> None:
        self._buckets: list[dict[K, None]] = [{}]
        self._load: dict[K, int] = {}
        self._lowest = 0

    def __contains__(self, key: K) -> bool:
        return key in self._load

    def load(self, key: K) -> int:
        """Current load of a key."""
        return self._load[key]

    def set(self, key: K, load: int) -> None:
        """Add a key, or move it."""
        self.remove(key)
        while len(self._buckets) <= load:
            self._buckets.append({})
        self._buckets[load][key] = None
        self._load[key] = load
        self._lowest = min(self._lowest, load)

    def remove(self, key: K) -> None:
        """Forget a key; unknown keys are ignored."""
        old = self._load.pop(key, None)
        if old is not None:
            del self._buckets[old][key]

    def least(self, but: K | None = None) -> K | None:
        """A key of lowest load; None when there is none. `but` only when it is the only one."""
        if not self._load:
            return None
        while not self._buckets[self._lowest]:
            self._lowest += 1
        if but is None:
            return next(iter(self._buckets[self._lowest]))
        others = (key for bucket in self._buckets[self._lowest :] for key in bucket if key != but)
        return next(others, but if but in self._load else None)
