"""Which replica gets the next request: the one with most free capacity, found without looking at all of them."""

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


class ReplicaChoice:
    """Replicas with a common limit of requests at once; the least busy one is chosen. Requests that share an affinity
    keep to one replica while that has room; a conversation, once begun, to its home while that lives, full or not.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._loads: LoadIndex[str] = LoadIndex()
        self._homes: dict[str, str] = {}

    def set(self, name: str, load: int) -> None:
        """A replica runs this many requests."""
        self._loads.set(name, load)

    def remove(self, name: str) -> None:
        """A replica is gone."""
        self._loads.remove(name)

    def choose(self, affinity: str | None, but: str | None) -> str | None:
        """Where the next request of this key goes; None while every replica is full. `but` only when it is the only
        one.
        """
        if affinity is not None:
            home = self.home(affinity, but)
            if home is not None and self._loads.load(home) < self._limit:
                return home
        name = self._loads.least(but=but)
        if name is None or self._loads.load(name) >= self._limit:
            return None
        if affinity is not None:
            self._homes[affinity] = name
        return name

    def settle(self, key: str, name: str) -> None:
        """This replica is the home of the key from now on."""
        self._homes[key] = name

    def is_settled(self, key: str) -> bool:
        """The key has, or had, a home."""
        return key in self._homes

    def home(self, key: str, but: str | None) -> str | None:
        """The home of a key, however busy; None when there is none, it is gone, or it is `but`."""
        home = self._homes.get(key)
        return home if home is not None and home != but and home in self._loads else None

    def forget(self, key: str) -> None:
        """No further request will come with this key."""
        self._homes.pop(key, None)
