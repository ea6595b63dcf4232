"""What vLLM's scheduler tells of its requests and of its KV cache.

With the core in this process its scheduler is read directly; statistics would cost something at every step. A core in a
process of its own sends its statistics with every step's outputs once a logger is there to take them. These are names
inside of vLLM, as of 0.32; a release without them tells nothing, and the number of requests is limited by
`max_concurrent_per_server` alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from roll_async.inference.protocol import KVCache

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLoad:
    """What the scheduler knew after its last step."""

    running: int
    kv: KVCache


class VllmLoadReader(Protocol):
    def read(self) -> SchedulerLoad | None:
        """None while nothing is known."""
        ...


class SchedulerReader:
    """Reads the scheduler of a core in this process, whose thread goes on meanwhile: numbers of neighbouring steps may
    be mixed.
    """

    def __init__(self, scheduler: Scheduler, block_tokens: int) -> None:
        self._scheduler, self._block_tokens = scheduler, block_tokens
        self._preemptions, self._works = 0, True
        try:
            self._count_preemptions()
            self._count_prefix_hits()
        except (AttributeError, TypeError) as error:
            self._give_up(error)

    def _count_preemptions(self) -> None:
        """vLLM counts them in its statistics only."""
        preempt = self._scheduler._preempt_request

        def counted(*args: object, **options: object) -> object:
            self._preemptions += 1
            return preempt(*args, **options)  # type: ignore[arg-type]

        self._scheduler._preempt_request = counted  # type: ignore[method-assign,assignment]

    def _count_prefix_hits(self) -> None:
        from vllm.v1.metrics.stats import PrefixCacheStats

        manager = self._scheduler.kv_cache_manager
        manager.log_stats, manager.prefix_cache_stats = True, PrefixCacheStats()

    def _give_up(self, error: Exception) -> None:
        self._works = False
        logger.warning("this vLLM does not tell of its KV cache: %s", error)

    def read(self) -> SchedulerLoad | None:
        if not self._works:
            return None
        try:
            scheduler, manager = self._scheduler, self._scheduler.kv_cache_manager
            pool, hits = manager.block_pool, manager.prefix_cache_stats
            assert hits is not None
            return SchedulerLoad(
                running=len(scheduler.running),
                kv=KVCache(
                    total_tokens=(pool.num_gpu_blocks - 1) * self._block_tokens,  # one block stands for none
                    free_tokens=pool.get_num_free_blocks() * self._block_tokens,
                    preemptions=self._preemptions,
                    prefix_asked_tokens=hits.queries,
                    prefix_hit_tokens=hits.hits,
                ),
            )
        except (AttributeError, TypeError) as error:
            self._give_up(error)
            return None


class StatisticsReader:
    """Takes the statistics that a core in a process of its own sends: vLLM's `StatLoggerBase`, by its methods. It tells
    of a preemption with the next output of the request, that is, once the request runs again.
    """

    def __init__(self) -> None:
        self._total_tokens = 0
        self._last: SchedulerLoad | None = None
        self._preemptions = self._asked = self._hits = 0

    def __call__(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatisticsReader:
        """vLLM makes its loggers by calling a class; this one is made already."""
        return self

    def started(self, llm: AsyncLLM, total_tokens: int) -> None:
        """The core has started: its cache has this size and is empty. Its statistics begin with its first step, when
        requests have been sent already. vLLM adds a logger for Prometheus, which costs time at every step and is not
        asked for.
        """
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        self._total_tokens, manager = total_tokens, llm.logger_manager
        if manager is not None:
            manager.stat_loggers = [one for one in manager.stat_loggers if not isinstance(one, PrometheusStatLogger)]
            self._last = SchedulerLoad(running=0, kv=KVCache(total_tokens=total_tokens, free_tokens=total_tokens))

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """After every step."""
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is None:
            return
        self._asked += scheduler_stats.prefix_cache_stats.queries
        self._hits += scheduler_stats.prefix_cache_stats.hits
        self._last = SchedulerLoad(
            running=scheduler_stats.num_running_reqs,
            kv=KVCache(
                total_tokens=self._total_tokens,
                free_tokens=round((1 - scheduler_stats.kv_cache_usage) * self._total_tokens),
                preemptions=self._preemptions,
                prefix_asked_tokens=self._asked,
                prefix_hit_tokens=self._hits,
            ),
        )

    def read(self) -> SchedulerLoad | None:
        return self._last

    def log_engine_initialized(self) -> None:
        """Nothing to print."""

    def log(self) -> None:
        """Nothing to print."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Of no interest here."""

    def record_admission_rejection(self, reason: str) -> None:
        """Of no interest here."""
