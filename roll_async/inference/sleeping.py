"""When a replica may sleep, wake, take weights in and generate: the rules that every backend shares.

    AWAKE --sleep(level)--> ASLEEP --wake(weights)--> WEIGHTS_AWAKE --wake(kv_cache)--> AWAKE
                                   \\---------- wake(weights, kv_cache) ----------------/

Waking in two steps keeps the peak low when trainer and engine share a device: new weights are pushed while the KV cache
still has no memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum


class SleepState(str, Enum):
    """Which memory of its devices a replica holds."""

    AWAKE = "awake"  # weights and KV cache
    ASLEEP = "asleep"  # neither
    WEIGHTS_AWAKE = "weights awake"  # weights alone: updates are taken in, nothing is generated


SLEEP_LEVELS = (1, 2)
WEIGHTS, KV_CACHE = "weights", "kv_cache"
WAKE_TAGS = (WEIGHTS, KV_CACHE)


_EXPANDABLE = "expandable_segments:True"


def drop_expandable_segments() -> None:
    """Before an engine that will sleep imports torch: the allocators that give memory back exclude them."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # the second is newer torch's name of it
        if name in os.environ:
            kept = [part for part in os.environ[name].split(",") if part and part != _EXPANDABLE]
            os.environ[name] = ",".join(kept)


def levels_up_to(deepest: int) -> tuple[int, ...]:
    """Of a replica that is prepared for `EngineSettings.sleep_level`."""
    return tuple(level for level in SLEEP_LEVELS if level <= deepest)


class SleepRules:
    """The state of one replica: call `may_sleep` before memory is released, `fell_asleep` after it."""

    def __init__(self, levels: Sequence[int]) -> None:
        """`levels`: those of `Engine.sleep`; empty = the replica never gives its memory back."""
        self._levels = tuple(levels)
        self.state = SleepState.AWAKE
        self.level = 0
        """Of the sleep under way; 0 when awake."""

    def may_sleep(self, level: int, *, paused: bool, num_running: int) -> bool:
        """False when the replica sleeps like that already. Raises ValueError for a level it does not have, RuntimeError
        when it still generates or is half awake.
        """
        if level not in self._levels:
            known = f"its levels are {', '.join(map(str, self._levels))}" if self._levels else "it was started without"
            raise ValueError(f"sleep({level}): this replica can not, {known}; set EngineSettings.sleep_level")
        if self.state is SleepState.ASLEEP and self.level == level:
            return False
        if self.state is not SleepState.AWAKE:
            raise RuntimeError(f"sleep({level}) of a replica that is {self.state.value}; wake it first")
        if not paused or num_running:
            raise RuntimeError(f"sleep({level}) with {num_running} requests running; pause the engine (abort) first")
        return True

    def fell_asleep(self, level: int) -> None:
        """The memory is given back."""
        self.state, self.level = SleepState.ASLEEP, level

    def to_wake(self, tags: Sequence[str]) -> tuple[str, ...]:
        """What is to be woken, weights first; what is awake is left out. Raises ValueError for an unknown tag,
        RuntimeError for a KV cache without weights.
        """
        unknown = sorted(set(tags) - set(WAKE_TAGS))
        if unknown or not tags:
            raise ValueError(f"wake({list(tags)}): expected some of {', '.join(WAKE_TAGS)}")
        asleep = {SleepState.AWAKE: (), SleepState.ASLEEP: WAKE_TAGS, SleepState.WEIGHTS_AWAKE: (KV_CACHE,)}[self.state]
        wanted = tuple(tag for tag in asleep if tag in tags)
        if wanted == (KV_CACHE,) and self.state is SleepState.ASLEEP:
            raise RuntimeError("wake(kv_cache) of a replica whose weights are asleep; wake weights first")
        return wanted

    def woke(self, tags: Sequence[str]) -> None:
        """`tags` have their memory again, in the order of `to_wake`."""
        for tag in tags:
            self.state = SleepState.WEIGHTS_AWAKE if tag == WEIGHTS else SleepState.AWAKE
        if self.state is SleepState.AWAKE:
            self.level = 0

    def need_weights(self, what: str) -> None:
        """Raises RuntimeError when the weights are asleep."""
        if self.state is SleepState.ASLEEP:
            raise RuntimeError(f"{what}: the replica is asleep; wake its weights first")

    def need_awake(self, what: str) -> None:
        """Raises RuntimeError unless weights and KV cache are there."""
        if self.state is not SleepState.AWAKE:
            raise RuntimeError(f"{what}: the replica is {self.state.value}; wake it first")
