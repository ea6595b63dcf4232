"""A functional check after each push: all engines score the same rows and must agree with the trainer's log-probs.

A digest proves that an engine holds the bytes that were sent. It does not prove that the engine computes with them: an
adapter that was never merged, experts in another order, a tied head that kept its old copy, rope scaling that was
ignored all pass it, and the run then learns from samples of another policy.

    before_push(version):       engines answer first what they were asked about the weights before
    score_on_trainer(version):  its weights have been sent: it scores the canary while the engines swap
    score_on_engines(version):  they are asked after the swap, and answer when it is their requests' turn
    report():                   what they answered, with an alarm for each replica that differs
    check_returned(version):    the same of replicas that return between two pushes, where a mismatch ends the run
    taken(groups):              where no prompt has tokens before a world speaks, the first trained batch gives the rows

Differences are told by depth, because what goes wrong far from the beginning (rope scaling, a sliding window) is lost
in the mean of all tokens. Rows are the heads of texts, and one long row of texts one after the other, which has tokens
at every depth that the run's context has.

Engines may have hundreds of requests to run before it, so the trainer does not wait for them: it trains the next step
meanwhile. The next push waits for the answers, because they are of these weights.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, zip_longest
from math import fsum, isnan

from roll_async.config.schema import PipelineConfig, roles_in_turns
from roll_async.schema import Group, WeightVersion
from roll_async.weight_sync.protocol import UpdatedReplica, WeightSource

logger = logging.getLogger(__name__)

BANDS = {"fp32": 1e-3, "fp16": 0.03, "bf16": 0.1, "fp8": 0.1}
"""Largest mean |difference| of log-probs, in nats, that the rounding of a dtype explains: engine and trainer sum in
different orders. An engine of fp8 was measured at 0.0092 from bfloat16 (`tools/gpu_suite.py --only fp8`, a small model
on an H200); its band is ten times as much.
"""
DEPTHS = (256, 2048, 8192)
"""Depth d: the tokens of a row from the depth before it on, up to the d-th."""
_UNCHANGED = 0.01
"""Share of the band: if the trainer's log-probs changed by less, those of an engine of a coarser dtype may not change.
"""


def band_of(config: PipelineConfig) -> float:
    """`weight_sync.canary_band`, or what the dtypes of engine and trainer explain."""
    engine, trainer = config.actor_infer, config.actor_train
    if config.weight_sync.canary_band is not None:
        return config.weight_sync.canary_band
    quantization = getattr(engine.strategy_args.strategy_config, "quantization", None)
    formats = (engine.model_args.dtype, trainer.model_args.dtype, quantization)
    return max(BANDS[name] for name in formats if name is not None)


def on_policy_band(config: PipelineConfig) -> float | None:
    """`band_of` for trained tokens of the present weights. None where these need not have the distribution that they
    were sampled from: the KV cache of older weights is kept, sampling is truncated, or the weights change between the
    parts of a step.
    """
    sampling = config.actor_infer.generating_args
    truncated = sampling.top_k > 0 or sampling.top_p < 1
    in_parts = config.async_training.require_batches < config.mini_batches_per_batch
    if config.async_training.interrupt.mode == "keep" or truncated or in_parts:
        return None
    return band_of(config)


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryOptions:
    """Options of the check."""

    prompts: int
    """Number of short rows: the heads of the first prompts of the training data, or of the first trained batch."""
    band: float
    """Largest mean |difference| in nats."""
    stop: bool = False
    """An engine beyond the band ends the run; False = a warning."""
    at_once: bool = False
    """The trainer scores before it sends, and `score_on_engines` waits for the answers. The latter with `stop`, too, so
    that no sample of an engine is trained before its check.
    """
    adapter: bool = False
    """The trainer trains an adapter, which the export merges."""
    timeout_s: float = 60.0
    depths: tuple[int, ...] = DEPTHS[:1]
    """Those of DEPTHS that the context has. A short row is cut to the first, the long one goes to the last."""
    longest: int = DEPTHS[0]
    """Tokens of a row at most. An engine samples one token after what it scores, so this is one less than the context.
    """

    @classmethod
    def of(cls, config: PipelineConfig) -> CanaryOptions | None:
        """As the config has it; None = no canary."""
        push = config.weight_sync
        if not push.canary_prompts:
            return None
        context = config.longest_sequence
        return cls(
            prompts=push.canary_prompts,
            # The first always: where the context is shorter, its tokens are all of that depth.
            depths=(DEPTHS[0], *(depth for depth in DEPTHS[1:] if depth <= context)),
            longest=context - 1,
            band=band_of(config),
            stop=push.on_mismatch == "stop",
            at_once=bool(roles_in_turns(config)),  # engines that sleep in the next step do not answer in it
            adapter=bool(config.actor_train.model_args.lora_rank),
            timeout_s=config.async_training.sync_timeout,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryReport:
    """Result of the check of one version."""

    difference: Mapping[str, float] = field(default_factory=dict)
    """Replica to mean |its log-prob - the trainer's|, in nats; replicas that did not answer are left out."""
    by_depth: Mapping[int, float] = field(default_factory=dict)
    """Depth to the same of its tokens alone, of the replica furthest from the trainer."""
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
        """`rows`: see `canary_rows`; none = they come with the first batch, and nothing is compared before."""
        self._source, self._options = source, options
        self._said_why_not = False
        self._set_rows(rows)
        if not rows:
            logger.info("Weight canary: no prompts yet; its rows come with the first batch, no push before is checked")
        self._trainer: _Scores | None = None
        self._before: _Scores | None = None
        self._engines: dict[str, _Scores] = {}
        self._check: asyncio.Task[CanaryReport] | None = None
        self._scoring: asyncio.Task[None] | None = None

    def taken(self, groups: Sequence[Group]) -> None:
        """A batch that is trained now. Its texts are the rows, where there are none yet; they are never changed."""
        if self._rows:
            return
        self._set_rows(canary_rows(_texts(groups), self._options))
        if not self._rows and not self._said_why_not:
            self._said_why_not = True
            logger.warning("Weight canary: no text of the first batch has two tokens; no push is checked until one has")

    def _set_rows(self, rows: Sequence[Sequence[int]]) -> None:
        self._rows = [list(row) for row in rows]
        self._parts = _parts_by_depth(self._rows, self._options.depths)

    async def before_push(self, version: WeightVersion) -> None:
        """A push of `version` begins. Engines still hold the weights before: what they are asked about these is
        answered first. Where they share devices with the trainer, it scores now, while its weights are there.
        """
        for earlier in (self._check, self._scoring):
            if earlier is not None:
                # Not awaited itself: its error is for `report` to raise.
                await asyncio.wait({earlier})
        self._scoring = None
        if self._rows and self._options.at_once:
            await self._scored(version)

    def score_on_trainer(self, version: WeightVersion) -> None:
        """The trainer has sent `version`, and has nothing to do until the engines serve it: it scores."""
        if self._rows and self._scoring is None:
            self._scoring = asyncio.create_task(self._score(version), name=f"scores of version {version}")

    async def _scored(self, version: WeightVersion) -> None:
        self.score_on_trainer(version)
        assert self._scoring is not None
        await self._scoring

    async def _score(self, version: WeightVersion) -> None:
        values = _flat(await self._source.score(self._rows))
        # Scored again, a version must not become the one before itself.
        if self._trainer is None or self._trainer.version != version:
            self._before = self._trainer
        self._trainer = _Scores(version=version, values=values)

    async def score_on_engines(self, version: WeightVersion, replicas: Sequence[UpdatedReplica]) -> None:
        """Begin the check of replicas that serve `version`; `report` waits for it. Waits for the trainer's scores: its
        next step changes the weights.
        """
        if not self._rows:
            return
        await self._scored(version)
        self._check = asyncio.create_task(self._compare(version, tuple(replicas)), name=f"canary of version {version}")
        if self._options.stop or self._options.at_once:
            await self._check

    async def report(self) -> CanaryReport | None:
        """The result of the check that `score_on_engines` began last; None before the first, or before there are rows.
        Waits for it, and cancels it when it is cancelled.
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
        apart = {name: self._apart(values, trainer.values) for name, values in scores.items()}
        moved = None if self._before is None else _distance(trainer.values, self._before.values)
        alarms = [self._judge(name, scores, apart, moved) for name in scores]
        if moved == 0:
            alarms.append(
                f"the trainer's log-probs did not change since version {self._before.version}: its optimizer changed "  # type: ignore[union-attr]
                "no weight (learning rate 0, or no row with a gradient)"
            )
        self._engines = {name: _Scores(version=version, values=values) for name, values in scores.items()}
        by_depth = {depth: worst(mine[depth] for mine in apart.values()) for depth in self._parts if apart}
        report = CanaryReport(difference=difference, by_depth=by_depth, moved=moved, alarms=tuple(filter(None, alarms)))
        for alarm in report.alarms:
            logger.warning("Weight canary, version %d: %s", version, alarm)
        # An alarm about the trainer comes after those, and is no engine's mismatch.
        if self._options.stop and any(alarms[: len(scores)]):
            raise EngineMismatch(f"version {version}: {report.alarms[0]} (weight_sync.on_mismatch: stop)")
        return report

    async def check_returned(self, version: WeightVersion, replicas: Sequence[UpdatedReplica]) -> None:
        """With the option `stop`: compare replicas that were given the trainer's present weights between two pushes,
        `version` or later ones. What is known of the last push stays. Raises EngineMismatch.
        """
        if not self._options.stop or not replicas or not self._rows:
            return
        trainer = _flat(await self._source.score(self._rows))
        for name, values in (await self._scores_of(replicas)).items():
            apart = self._apart(values, trainer)
            if (depth := self._beyond(apart)) is None:
                continue
            raise EngineMismatch(
                f"version {version}: {name}, which returned between two pushes, {self._found(apart, depth)}. Suspect: "
                "weights of this replica (weight_sync.on_mismatch: stop)"
            )

    async def _scores_of(self, replicas: Sequence[UpdatedReplica]) -> dict[str, array]:
        """By name; replicas that do not answer are left out."""
        answers = await asyncio.gather(*(self._ask(replica) for replica in replicas))
        return {r.name: a for r, a in zip(replicas, answers, strict=True) if a is not None}

    async def _ask(self, replica: UpdatedReplica) -> array | None:
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return _flat(await replica.score(self._rows))
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            # Paused before it had scored, or without memory for the rows (RuntimeErrors); lost; late. The others are
            # compared, and whoever decides on a loss hears of it by calls of its own.
            logger.warning("Weight canary: %s did not score: %s", replica.name, str(error) or type(error).__name__)
            return None

    def _apart(self, one: array, other: array) -> dict[int, float]:
        """Mean |difference| by depth."""
        return {
            depth: fsum(abs(a - b) for part in parts for a, b in zip(one[part], other[part], strict=True))
            / sum(part.stop - part.start for part in parts)
            for depth, parts in self._parts.items()
        }

    def _beyond(self, apart: Mapping[int, float]) -> int | None:
        """The first depth whose difference is not within the band."""
        return next((depth for depth, difference in apart.items() if not difference <= self._options.band), None)

    def _found(self, apart: Mapping[int, float], depth: int) -> str:
        before = _depth_before(depth, self._options.depths)
        where = f"tokens {before} to {depth}" if before else f"the first {depth} tokens"
        return (
            f"differs from the trainer by {apart[depth]:.2g} nats on average in {where} (band {self._options.band:g})"
        )

    def _judge(
        self, name: str, scores: Mapping[str, array], apart: Mapping[str, Mapping[int, float]], moved: float | None
    ) -> str | None:
        """The alarm for one replica, with the depth and the suspected cause; None when it agrees."""
        mine, band = scores[name], self._options.band
        earlier, before = self._engines.get(name), self._before
        weights = "adapter" if self._options.adapter else "weights"
        if earlier is not None and moved is not None and moved > _UNCHANGED * band and mine == earlier.values:
            return (
                f"{name} scores exactly as at version {earlier.version}, while the trainer moved by {moved:.2g} nats. "
                f"Suspect: {weights} that arrived and are not the ones it computes with"
            )
        if (depth := self._beyond(apart[name])) is None:
            return None
        found, difference = f"{name} {self._found(apart[name], depth)}", apart[name][depth]
        if before is not None and (old := self._apart(mine, before.values)[depth]) < difference / 4:
            return f"{found}, from version {before.version} by {old:.2g}. Suspect: {weights} of an earlier version"
        if len(scores) > 1 and all(theirs[depth] <= band for other, theirs in apart.items() if other != name):
            return f"{found}; the other engines agree with it. Suspect: weights of this replica"
        if _depth_before(depth, self._options.depths):
            return f"{found}, and agrees before. Suspect: numerics of long texts (rope scaling, a sliding window)"
        if moved is None:
            return f"{found} at the first push. Suspect: numerics (dtype, rope scaling, norms) or the order of weights"
        return (
            f"{found}. Suspect: numerics (dtype, rope scaling, norms), or the order of weights (experts, fused layers)"
        )


def worst(differences: Iterable[float]) -> float:
    """The largest, than which NaN is larger still."""
    return max(differences, key=lambda nats: (isnan(nats), nats))


def canary_rows(texts: Iterable[Sequence[int]], options: CanaryOptions) -> list[list[int]]:
    """The rows to score: the heads of `prompts` texts that differ, of two tokens at least, and one long row, of texts
    one after the other. A depth has to have as many tokens as a short row, or it is left out, which is logged; a text
    that was there before adds none, because a model copies what it has read.

    Worked example, depths 256 and 2048, 16 prompts, 30 texts of 100 tokens: 16 rows of 100 tokens and one of 2048.
    """
    width, size = min(options.depths[0], options.longest), min(options.depths[-1], options.longest)
    heads: dict[tuple[int, ...], None] = {}
    seen: set[tuple[int, ...]] = set()
    long: list[int] = []
    if len(options.depths) == 1:
        size = 0
    for text in texts:
        if (whole := tuple(text)) in seen:
            continue
        seen.add(whole)
        if len(whole) > 1 and len(heads) < options.prompts:
            heads[whole[:width]] = None  # texts with the same head would be the same row
        long += whole[: size - len(long)]
        if len(heads) == options.prompts and len(long) == size:
            break
    if not heads:
        return []
    reached = 0
    for before, depth in pairwise(options.depths):
        if len(long) - before < width:
            logger.warning("Weight canary: %d tokens of text; deeper than %d nothing is compared", len(long), before)
            break
        reached = depth
    return [*map(list, heads), *([long[:reached]] if reached else [])]


def _texts(groups: Sequence[Group]) -> Iterator[array]:
    """Prompt and response of the first row of each group, then of each second row."""
    for rows in zip_longest(*(group.samples for group in groups)):
        yield from (row.prompt_token_ids + row.response_token_ids for row in rows if row is not None)


def _parts_by_depth(rows: Sequence[Sequence[int]], depths: Sequence[int]) -> dict[int, list[slice]]:
    """Where the log-probs of each depth lie in those of all rows, concatenated; depths without any are left out. A row
    has none of its first token: that of token t is its number t - 1.
    """
    parts: dict[int, list[slice]] = {}
    start = 0
    for row in rows:
        for before, depth in pairwise((0, *depths)):
            low, high = max(before - 1, 0), min(depth, len(row)) - 1
            if low < high:
                parts.setdefault(depth, []).append(slice(start + low, start + high))
        start += len(row) - 1
    return parts


def _depth_before(depth: int, depths: Sequence[int]) -> int:
    return max((other for other in depths if other < depth), default=0)


def _flat(rows: Sequence[array]) -> array:
    return array("f", chain.from_iterable(rows))


def _distance(one: array, other: array) -> float:
    return fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
