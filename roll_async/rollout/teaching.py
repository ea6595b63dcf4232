"""Distillation teachers behind addresses: each answer is scored as soon as it is complete, and its log-probs travel
with it through queue and ledger to the trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from roll_async.config.schema import PipelineConfig
from roll_async.inference.endpoint import ChatEndpoint
from roll_async.prompts.teachers import teacher_of
from roll_async.rollout.group_source import SourceCounts
from roll_async.rollout.groups import Ended, EndReason, Trajectory, TrajectoryRequest, TrajectoryRunner
from roll_async.schema import Sample

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 30.0


class TaughtRunner:
    """`rollout/groups.py: TrajectoryRunner` over another one, whose trajectories it has scored. Like an outage of a
    reward, that of a teacher is waited out for `fault.stall_timeout`, and then fails the group.
    """

    def __init__(self, runner: TrajectoryRunner, config: PipelineConfig, servers: Mapping[str, ChatEndpoint]) -> None:
        """`servers`: by name; teachers that are in the config alone have ranks of the trainer."""
        self._runner, self._servers, self._names = runner, servers, config.teacher_names
        self._untaught, self._patience_s = frozenset(config.loss_parts), config.fault.stall_timeout
        self._outages = 0

    @property
    def cancels_on_abort(self) -> bool:
        """As the other one."""
        return self._runner.cancels_on_abort

    async def run(self, request: TrajectoryRequest) -> Trajectory | Ended:
        """The trajectory of the other one, its rows with the log-probs of their teacher if that has an address."""
        end, prompt, sampling = await self._runner.run(request), request.prompt, request.sampling
        is_greedy = sampling is not None and sampling.temperature == 0  # the baseline of remax
        if isinstance(end, Ended) or request.validation or is_greedy or prompt.domain in self._untaught:
            return end
        name = teacher_of(prompt.domain, prompt.extra, self._names)
        if name not in self._servers:
            return end
        try:
            return replace(end, rows=tuple([await self._taught(name, row) for row in end.rows]))
        except (ConnectionError, ValueError) as error:
            return Ended(reason=EndReason.FAILED, text=str(error))

    async def _taught(self, name: str, row: Sample) -> Sample:
        """The row with its log-probs. Raises ConnectionError for an outage, ValueError for a row that is refused."""
        loop, where = asyncio.get_running_loop(), f"teacher {name} of sample {row.sample_id}"
        patience_ends, pause_s = loop.time() + self._patience_s, _FIRST_RETRY_S
        while True:
            try:
                async with asyncio.timeout_at(patience_ends):
                    _, logprobs = await self._servers[name].echo([*row.prompt_token_ids, *row.response_token_ids])
                # The first log-prob is of the second token.
                return replace(row, teacher_logprobs=logprobs[len(row.prompt_token_ids) - 1 :])
            except (TimeoutError, ConnectionError) as error:
                self._outages += 1
                reason = str(error) or "no answer"
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if loop.time() + pause_s > patience_ends:  # the next attempt would come too late
                raise ConnectionError(f"{where}: {reason}, for {self._patience_s:g} s (fault.stall_timeout)")
            logger.warning("%s: %s; asking again in %g s", where, reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_RETRY_S, 2 * pause_s)

    def counts(self, num_retries: int) -> SourceCounts:
        """Counters since the start, with the attempts that found a teacher's server not working."""
        counts = self._runner.counts(num_retries)
        return replace(counts, metrics={**counts.metrics, "distill/outages": float(self._outages)})
