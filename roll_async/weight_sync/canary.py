"""A functional check after each push: all engines score the same prompts and must agree with the trainer's log-probs.

A digest proves that an engine holds the bytes that were sent. It does not prove that the engine computes with them: an
adapter that was never merged, experts in another order, a tied head that kept its old copy, rope scaling that was
ignored all pass it, and the run then learns from samples of another policy.

    begin(version): a push begins: engines answer first what they were asked about the weights before
    sent(version):  the trainer, whose weights have been sent, scores the canary while the engines swap
    start(version): engines are asked after the swap; they answer when it is their requests' turn
    found():        what they answered -> CanaryReport, with an alarm for each replica that differs
    check_returned: the same of replicas that return between two pushes, where a mismatch ends the run

Engines may have hundreds of requests to run before it, so the trainer does not wait for them: it trains the next step
meanwhile. The next push waits for the answers, because they are of these weights.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import fsum

from roll_async.config.schema import PipelineConfig, roles_on_engine_devices
from roll_async.schema import WeightVersion
from roll_async.weight_sync.protocol import UpdatedReplica, WeightSource

logger = logging.getLogger(__name__)

BANDS = {"fp32": 1e-3, "fp16": 0.03, "bf16": 0.1}
"""Largest mean |difference| of log-probs, in nats, that the rounding of a dtype explains: engine and trainer sum in
different orders.
"""
QUANTIZED_BAND = 0.5
_UNCHANGED = 0.01
"""Share of the band: if the trainer's log-probs changed by less, those of an engine of a coarser dtype may not change.
"""


def band_of(config: PipelineConfig) -> float:
    """`weight_sync.canary_band`, or what the dtypes of engine and trainer explain."""
    engine, trainer = config.actor_infer, config.actor_train
    if config.weight_sync.canary_band is not None:
        return config.weight_sync.canary_band
    if getattr(engine.strategy_args.strategy_config, "quantization", None) is not None:
        return QUANTIZED_BAND
    return max(BANDS[dtype] for dtype in (engine.model_args.dtype, trainer.model_args.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryOptions:
    """Options of the check."""

    prompts: int
    """Number of prompts: the first ones of the training data."""
    band: float
    """Largest mean |difference| in nats."""
    stop: bool = False
    """An engine beyond the band ends the run; False = a warning."""
    at_once: bool = False
    """The trainer scores before it sends, and `start` waits for the answers. The latter with `stop`, too, so that no
    sample of an engine is trained before its check.
    """
    adapter: bool = False
    """The trainer trains an adapter, which the export merges."""
    timeout_s: float = 60.0
    max_tokens: int = 256
    """Tokens of a prompt that are scored; the rest is left out."""

    @classmethod
    def of(cls, config: PipelineConfig) -> CanaryOptions | None:
        """As the config has it; None = no canary."""
        push = config.weight_sync
        if not push.canary_prompts:
            return None
        return cls(
            prompts=push.canary_prompts,
            band=band_of(config),
            stop=push.on_mismatch == "stop",
            at_once=bool(roles_on_engine_devices(config)),  # engines that sleep in the next step do not answer in it
            adapter=bool(config.actor_train.model_args.lora_rank),
            timeout_s=config.async_training.sync_timeout,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryReport:
    """Result of the check of one version."""

    difference: Mapping[str, float] = field(default_factory=dict)
    """Replica to mean |its log-prob - the trainer's|, in nats; replicas that did not answer are left out."""
    moved: float | None = None
    """Mean |change| of the trainer's own log-probs since the previous version; None at the first."""
    alarms: tuple[str, ...] = ()


class EngineMismatch(RuntimeError):
    """An engine computes other log-probs than the trainer (weight_sync.on_mismatch: stop)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """Log-probs of all rows, concatenated, under one version."""

    version: WeightVersion
    values: array


class Canary:
    """Keeps the scores of the previous version, to tell an engine that kept its old weights from one that computes
    wrongly.
    """

    def __init__(self, rows: Sequence[Sequence[int]], source: WeightSource, options: CanaryOptions) -> None:
        self._rows, self._source, self._options = [list(row) for row in rows], source, options
        self._trainer: _Scores | None = None
        self._before: _Scores | None = None
        self._engines: dict[str, _Scores] = {}
        self._check: asyncio.Task[CanaryReport] | None = None
        self._scoring: asyncio.Task[None] | None = None

    async def begin(self, version: WeightVersion) -> None:
        """A push of `version` begins. Engines still hold the weights before: what they are asked about these is
        answered first. Where they share devices with the trainer, it scores now, while its weights are there.
        """
        for earlier in (self._check, self._scoring):
            if earlier is not None:
                await asyncio.wait({earlier})
        self._scoring = None
        if self._options.at_once:
            await self._scored(version)

    def sent(self, version: WeightVersion) -> None:
        """The trainer has sent `version`, and has nothing to do until the engines serve it: it scores."""
        if self._scoring is None:
            self._scoring = asyncio.create_task(self._score(version), name=f"scores of version {version}")

    async def _scored(self, version: WeightVersion) -> None:
        self.sent(version)
        assert self._scoring is not None
        await self._scoring

    async def _score(self, version: WeightVersion) -> None:
        values = _flat(await self._source.score(self._rows))
        if self._trainer is None or self._trainer.version != version:
            self._before = self._trainer
        self._trainer = _Scores(version=version, values=values)

    async def start(self, version: WeightVersion, replicas: Sequence[UpdatedReplica]) -> None:
        """Begin the check of replicas that serve `version`; `found` has its result. Waits for the trainer's scores: its
        next step changes the weights.
        """
        await self._scored(version)
        self._check = asyncio.create_task(self._compare(version, tuple(replicas)), name=f"canary of version {version}")
        if self._options.stop or self._options.at_once:
            await self._check

    async def found(self) -> CanaryReport | None:
        """The result of the check that `start` began last; None before the first. Waits for it, and cancels it when it
        is cancelled.
        """
        return None if self._check is None else await self._check

    async def _compare(self, version: WeightVersion, replicas: Sequence[UpdatedReplica]) -> CanaryReport:
        """Compare replicas that serve `version`. A replica that does not answer is warned of only: the server manager
        detects dead replicas. Raises EngineMismatch with the option `stop`.
        """
        trainer = self._trainer
        assert trainer is not None and trainer.version == version, "compared with scores of another version"
        scores = await self._scores_of(replicas)
        difference = {name: _distance(values, trainer.values) for name, values in scores.items()}
        moved = None if self._before is None else _distance(trainer.values, self._before.values)
        alarms = [self._judge(name, scores, difference, moved) for name in scores]
        if moved == 0:
            alarms.append(
                f"the trainer's log-probs did not change since version {self._before.version}: its optimizer changed "  # type: ignore[union-attr]
                "no weight (learning rate 0, or no row with a gradient)"
            )
        self._engines = {name: _Scores(version=version, values=values) for name, values in scores.items()}
        report = CanaryReport(difference=difference, moved=moved, alarms=tuple(filter(None, alarms)))
        for alarm in report.alarms:
            logger.warning("Weight canary, version %d: %s", version, alarm)
        if self._options.stop and any(alarms[: len(scores)]):
            raise EngineMismatch(f"version {version}: {report.alarms[0]} (weight_sync.on_mismatch: stop)")
        return report

    async def check_returned(self, version: WeightVersion, replicas: Sequence[UpdatedReplica]) -> None:
        """With the option `stop`: compare replicas that were given the trainer's present weights between two pushes,
        `version` or later ones. What is known of the last push stays. Raises EngineMismatch.
        """
        if not self._options.stop or not replicas:
            return
        trainer = _flat(await self._source.score(self._rows))
        for name, values in (await self._scores_of(replicas)).items():
            if (difference := _distance(values, trainer)) <= self._options.band:
                continue
            raise EngineMismatch(
                f"version {version}: {name}, which returned between two pushes, differs from the trainer by "
                f"{difference:.2g} nats on average (band {self._options.band:g}). Suspect: weights of this replica "
                "(weight_sync.on_mismatch: stop)"
            )

    async def _scores_of(self, replicas: Sequence[UpdatedReplica]) -> dict[str, array]:
        """By name; replicas that do not answer are left out."""
        answers = await asyncio.gather(*(self._ask(replica) for replica in replicas))
        return {r.name: a for r, a in zip(replicas, answers, strict=True) if a is not None}

    async def _ask(self, replica: UpdatedReplica) -> array | None:
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return _flat(await replica.score(self._rows))
        except (RuntimeError, OSError, ValueError) as error:
            logger.warning("Weight canary: %s did not score: %s", replica.name, str(error) or type(error).__name__)
            return None

    def _judge(
        self, name: str, scores: Mapping[str, array], difference: Mapping[str, float], moved: float | None
    ) -> str | None:
        """The alarm for one replica, with the suspected cause; None when it agrees."""
        mine, band = scores[name], self._options.band
        earlier, before = self._engines.get(name), self._before
        weights = "adapter" if self._options.adapter else "weights"
        if earlier is not None and moved is not None and moved > _UNCHANGED * band and mine == earlier.values:
            return (
                f"{name} scores exactly as at version {earlier.version}, while the trainer moved by {moved:.2g} nats. "
                f"Suspect: {weights} that arrived and are not the ones it computes with"
            )
        if difference[name] <= band:
            return None
        found = f"{name} differs from the trainer by {difference[name]:.2g} nats on average (band {band:g})"
        if before is not None and (old := _distance(mine, before.values)) < difference[name] / 4:
            return f"{found}, from version {before.version} by {old:.2g}. Suspect: {weights} of an earlier version"
        if len(scores) > 1 and all(d <= band for other, d in difference.items() if other != name):
            return f"{found}; the other engines agree with it. Suspect: weights of this replica"
        if moved is None:
            return f"{found} at the first push. Suspect: numerics (dtype, rope scaling, norms) or the order of weights"
        return (
            f"{found}. Suspect: numerics (dtype, rope scaling, norms), or the order of weights (experts, fused layers)"
        )


def canary_rows(prompts: Sequence[Sequence[int]], options: CanaryOptions) -> list[list[int]]:
    """The rows to score: the prompts of at least two tokens, truncated to `max_tokens`."""
    return [list(p[: options.max_tokens]) for p in prompts if len(p) > 1]


def _flat(rows: Sequence[array]) -> array:
    return array("f", chain.from_iterable(rows))


def _distance(one: array, other: array) -> float:
    return fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
