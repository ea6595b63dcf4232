"""What SGLang tells of its requests and of its KV cache, as of 0.5.23.

Its scheduler leaves a snapshot in shared memory after every step. Retractions and tokens found in the prefix cache are
not in it: they come with the outputs of each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_async.inference.protocol import KVCache


class SglangLoadReader:
    """`manager`: SGLang's TokenizerManager; `total_tokens`: size of the KV cache."""

    def __init__(self, manager: Any, total_tokens: int) -> None:
        self._snapshots, self._total_tokens = manager.load_snapshot_reader, total_tokens
        self._retractions = self._asked = self._hits = 0

    def add(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Count what the output of a request tells beyond the one before it: `meta_info` of both. That of an aborted
        request tells nothing.
        """
        self._retractions += _growth("num_retractions", before, now)
        self._asked += _growth("prompt_tokens", before, now)
        self._hits += _growth("cached_tokens", before, now)

    def read(self, num_requests: int) -> tuple[int, KVCache]:
        """Of `num_requests` those that run, and the cache: none and an empty one before the first snapshot."""
        told = self._snapshots.read(0)
        running, used = (0, 0) if told is None else (told.num_running_reqs, told.num_used_tokens)
        # Without requests no step tells that the last ones were aborted.
        used = min(used, self._total_tokens) if num_requests else 0
        return min(running, num_requests), KVCache(
            total_tokens=self._total_tokens,
            free_tokens=self._total_tokens - used,
            preemptions=self._retractions,
            prefix_asked_tokens=self._asked,
            prefix_hit_tokens=self._hits,
        )


def _growth(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    return max(0, now.get(key, 0) - before.get(key, 0))  # the output of an aborted request lacks the key
