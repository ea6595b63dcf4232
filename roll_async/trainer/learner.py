"""One training step: whole groups in, optimizer steps and metrics out.

    groups -> TrainBatch -> proximal | reference | teachers' log-probs | values -> rewards -> advantages -> masks and
    correction -> critic | policy update

A bar: side by side, by roles with devices of their own (`roles.py`).

Batch-wide statistics (whitening, normalisation, token selections) are computed here, once, on the whole batch; what is
row-wise happens in the ranks, micro-batch by micro-batch. Shape letters: B rows, T positions.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from roll_async.algorithms import rewards as reward_math
from roll_async.algorithms.correction import correct, correction_metrics
from roll_async.algorithms.kl import kl_estimate, kl_in_reward, update_kl_coefficient
from roll_async.algorithms.masked import masked_mean, whiten
from roll_async.algorithms.rewards import RunningMoments
from roll_async.config.schema import OF_TEACHERS, PipelineConfig
from roll_async.config.schema_algorithm import AlgorithmConfig
from roll_async.observe.sample_dump import EVERY_GROUP, chosen_groups
from roll_async.schema import ExpertRows, Group, TrainBatch
from roll_async.trainer import credit
from roll_async.trainer.collate import collate
from roll_async.trainer.distillation import chosen_rows, merged_logprobs, taught_by, teacher_metrics
from roll_async.trainer.protocol import PolicyRows, StepReport, TokenRows, ValueRows, mini_batch_ranges
from roll_async.trainer.roles import Job, LearnerParts
from roll_async.trainer.selection import select_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerOptions:
    """The config's section `algorithm`, and what a step needs of the rest of the config."""

    algorithm: AlgorithmConfig
    """Of proximal_logprobs auto is decided. reuse: only for steps of one optimizer step, else recompute."""
    domains: tuple[str, ...]
    response_length: int
    """Of the longest response, in tokens."""
    mini_batch_rows: int = 1
    loss_parts: Mapping[str, str] = field(default_factory=dict)
    """By domain, where its rows feed another part of the loss than the policy's."""
    teachers: tuple[str, ...] = ()
    """What the rows of the policy's part are distilled from, by name."""
    mask_older_than: int | None = None
    """Versions; tokens over it leave the loss (staleness policy token_mask). None = off."""
    router_replay: bool = False
    """The actor's routers take the experts the engines took."""
    kept_groups: int = 0
    """Groups of a step whose samples are kept, with the entropies of their tokens."""
    seed: int = 42

    @property
    def estimator_options(self) -> Mapping[str, object]:
        """`algorithm.adv_options` as keywords."""
        return asdict(self.algorithm.adv_options)

    @property
    def reported_numbers(self) -> tuple[str, ...]:
        """Numbers of the rewards, besides the score, that the estimator reads."""
        names = self.estimator_options.get("rewards", ()) if self.algorithm.adv_estimator == "gdpo" else ()
        assert isinstance(names, Sequence)
        return tuple(name for name in names if name != "score")

    @classmethod
    def of(cls, config: PipelineConfig) -> LearnerOptions:
        """As the config has it."""
        staleness = config.async_training.staleness
        if config.algorithm.proximal_logprobs == "auto" and config.proximal_needed_early is not None:
            logger.info("proximal log-probs take a forward pass of their own: %s", config.proximal_needed_early)
        return cls(
            algorithm=replace(config.algorithm, proximal_logprobs=config.source_of_proximal),
            mini_batch_rows=config.mini_batch_size,
            domains=config.domains,
            loss_parts=config.loss_parts,
            teachers=config.teacher_names,
            response_length=config.longest_response,
            router_replay=config.actor_train.router_replay,
            kept_groups=EVERY_GROUP if config.tracking.rollout_dump_dir else config.tracking.samples_per_step,
            mask_older_than=staleness.max_versions if staleness.policy == "token_mask" else None,
            seed=config.seed,
        )


@dataclass(kw_only=True, slots=True)
class LearnerState:
    """What must survive a restart besides the ranks' own checkpoint."""

    moments: dict[str, RunningMoments] = field(default_factory=dict)
    token_kl_coef: float = 0.0
    role_averages: dict[str, float] = field(default_factory=dict)
    """Moving average of the scores of each role (rae)."""

    def to_json(self) -> dict[str, object]:
        """Plain JSON values."""
        moments = {name: [m.count, m.mean, m.m2] for name, m in self.moments.items()}
        return {"moments": moments, "token_kl_coef": self.token_kl_coef, "role_averages": self.role_averages}

    @classmethod
    def from_json(cls, state: Mapping[str, object]) -> LearnerState:
        """Inverse of `to_json`."""
        stored = state["moments"]
        assert isinstance(stored, Mapping)
        moments = {str(name): RunningMoments(count=c, mean=mean, m2=m2) for name, (c, mean, m2) in stored.items()}
        averages = state.get("role_averages", {})
        assert isinstance(averages, Mapping)
        return cls(moments=moments, token_kl_coef=float(state["token_kl_coef"]), role_averages=dict(averages))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Signal:
    """Everything computed batch-wide before the update."""

    advantages: Tensor  # [B,T]
    returns: Tensor  # [B,T]
    mask: Tensor  # [B,T] trained tokens
    metrics: dict[str, float]


class Learner:
    """Runs training steps on groups of ranks. One step at a time."""

    def __init__(self, parts: LearnerParts, options: LearnerOptions) -> None:
        self._parts = parts
        self._options, self._algorithm = options, options.algorithm
        self.state = LearnerState(token_kl_coef=self._algorithm.token_kl_coef)
        self._told_of_rate = False

    def export_state(self) -> dict[str, object]:
        """What a checkpoint must hold, as plain JSON values."""
        return self.state.to_json()

    def restore_state(self, state: Mapping[str, object]) -> None:
        """Go on with what `export_state` gave."""
        self.state = LearnerState.from_json(state)
        if self._algorithm.target_kl is None or not self.state.token_kl_coef:  # not adapted, or from 0, which stays 0
            self.state.token_kl_coef = self._algorithm.token_kl_coef

    async def learn(self, groups: Sequence[Group], step: int) -> StepReport:
        """Train on whole groups. `step` counts from 1; staleness as in `config/staleness.py`."""
        loop, options, parts = asyncio.get_running_loop(), self._options, self._parts
        began = loop.time()
        # In a thread, here and below: this event loop also serves the rest of the run.
        batch = await asyncio.to_thread(
            collate,
            groups,
            step=step,
            domains=options.domains,
            numbers=options.reported_numbers,
            unscored=set(options.loss_parts),
            teachers=options.teachers,
        )
        rows = TokenRows(tokens=batch.tokens, lengths=batch.lengths, mask=batch.mask, images=batch.images)
        started = loop.time()
        (proximal, reference, teacher, values, squares), score_wait_s = await self._scores(batch, rows)
        scored = loop.time()
        # Without a scoring pass the engine's log-probs are the nearest there are to the current weights.
        known = proximal if proximal is not None else batch.behaviour_logprobs
        # Rows that feed another part of the loss stay out of the statistics of advantages.
        compared = self._part(batch, "policy") if options.loss_parts else None
        evidence = credit.EstimatorInputs(row_mask=compared, values=values, logprobs=known, squares=squares)
        signal = await asyncio.to_thread(self._signal, batch, known, reference, teacher, evidence)
        policy_rows, correction = await asyncio.to_thread(self._policy_rows, batch, proximal, reference, signal)
        policy_rows, entropies = replace(policy_rows, kept=self._kept(groups)), None
        prepared = loop.time()
        metrics = {**signal.metrics, **correction}
        update_values = None
        if parts.critic is not None:
            assert values is not None
            value_rows = ValueRows(
                tokens=batch.tokens,
                lengths=batch.lengths,
                # Other rows have no score, which would count as a return of 0.
                mask=batch.mask & self._part(batch, "policy")[:, None],
                old_values=values,
                returns=signal.returns,
                images=batch.images,
            )
            update_values = partial(parts.critic.update_values, value_rows, step)
        actor_learns = parts.critic is None or step > self._algorithm.critic_warmup
        if actor_learns:
            # Not the option alone: `_proximal` makes a pass of its own where a batch has several mini-batches.
            reused = proximal is None and self._algorithm.proximal_logprobs == "reuse"
            metrics["trainer/proximal_reused"] = float(reused)

        async def update_policy() -> Mapping[str, float]:
            nonlocal entropies
            found, entropies = await parts.actor.update_policy(policy_rows, step)
            return found

        updates: Sequence[Job[Mapping[str, float]]] = [
            ("critic", update_values),
            ("actor_train", update_policy if actor_learns else None),
        ]
        updated, update_wait_s = await parts.work(updates)
        for found in updated:
            metrics |= found or {}  # None: the role had nothing to do
        metrics["trainer/learning_rate_alarm"] = self._alarm_of_rates(metrics, step)
        self._adapt_kl(metrics, batch)
        return StepReport(
            metrics=metrics,
            logprobs_s=scored - started,
            train_s=loop.time() - scored,
            collation_s=started - began + prepared - scored,
            roles_s=score_wait_s + update_wait_s,
            num_samples=len(batch.lengths),
            num_tokens=int(batch.lengths.sum()),
            advantages=await asyncio.to_thread(_of_responses, batch, signal.advantages),
            trainer_logprobs=()
            if proximal is None or proximal is batch.behaviour_logprobs
            else await asyncio.to_thread(_of_responses, batch, proximal),
            entropies=() if entropies is None else await asyncio.to_thread(_of_responses, batch, entropies),
        )

    def _kept(self, groups: Sequence[Group]) -> Tensor | None:
        """[B] bool, rows of the groups that `sample_rows` will take; None where it takes none."""
        if not self._options.kept_groups:
            return None
        kept = chosen_groups({group.group_id: group.mean_score for group in groups}, self._options.kept_groups)
        return torch.tensor([group.group_id in kept for group in groups for _ in group.samples])

    async def _scores(self, batch: TrainBatch, rows: TokenRows) -> tuple[list[Tensor | None], float]:
        """([B,T] proximal, reference and teachers' log-probs, values, squares, or None each; the actor's wait in s)."""
        parts = self._parts
        # Of an address a row has its log-probs already.
        taught = {role: taught_by(batch, role.removeprefix(OF_TEACHERS)) for role in parts.teachers}
        taught = {role: own for role, own in taught.items() if bool(own.any())}
        squares = None
        if self._options.algorithm.adv_estimator == "optimal_token_baseline":
            squares = partial(parts.actor.compute_squares, replace(rows, experts=self._replayed(batch)))
        jobs: Sequence[Job[Tensor | None]] = [
            ("actor_train", partial(self._proximal, batch, rows)),
            ("reference", partial(parts.reference.compute_logprobs, rows) if parts.reference else None),
            *((r, partial(parts.teachers[r].compute_logprobs, chosen_rows(rows, own))) for r, own in taught.items()),
            ("critic", partial(parts.critic.compute_values, rows) if parts.critic else None),
            ("actor_train", squares),
        ]
        (proximal, reference, *of_teachers, values, squares), wait_s = await parts.work(jobs)
        teacher = merged_logprobs(batch, zip(taught.values(), of_teachers, strict=True))
        return [proximal, reference, teacher, values, squares], wait_s

    async def _proximal(self, batch: TrainBatch, rows: TokenRows) -> Tensor | None:
        """[B,T] log-probs of the weights at the start of the step; None when each micro-batch makes its own."""
        source = self._algorithm.proximal_logprobs
        # After the first optimizer step a forward pass no longer sees the weights of the start.
        if source == "reuse" and len(mini_batch_ranges(len(batch.lengths), self._options.mini_batch_rows)) > 1:
            source = "recompute"
        match source:
            case "recompute":
                return await self._parts.actor.compute_logprobs(replace(rows, experts=self._replayed(batch)))
            case "behaviour":
                return batch.behaviour_logprobs
            case "interpolate" | "reuse":
                return None
            case other:
                raise ValueError(f"proximal_logprobs {other!r}: expected recompute, reuse, interpolate or behaviour")

    def _replayed(self, batch: TrainBatch) -> ExpertRows | None:
        """The engines' choice of experts, where the actor is to take it too."""
        if not self._options.router_replay:
            return None
        if batch.experts is None:
            raise RuntimeError(
                "router_replay is on, but no sample of the batch has a record of its experts; if the ledger is that of "
                "a run without it, remove the ledger"
            )
        return batch.experts

    def _signal(
        self,
        batch: TrainBatch,
        known: Tensor,
        reference: Tensor | None,
        teacher: Tensor | None,
        evidence: credit.EstimatorInputs,
    ) -> _Signal:
        """Scores to advantages, and the mask of trained tokens. `known` [B,T]: best known log-probs of the current
        weights.
        """
        options = self._options
        scores, baselines, metrics = self._shaped_scores(batch)
        batch = replace(batch, baseline_scores=baselines)
        # Before staleness and sample masks: tokens that they take out still count in the statistics.
        policy = batch.mask & self._part(batch, "policy")[:, None]
        # None: the estimator takes the score of the trajectory.
        token_rewards = None if batch.turns is None else credit.token_rewards(batch, scores)
        if self._algorithm.token_kl_coef > 0:
            assert reference is not None, "config refuses token_kl_coef without a reference"
            token_rewards = kl_in_reward(
                token_rewards_BT=credit.token_rewards(batch, scores),
                logprobs_BT=known,
                ref_logprobs_BT=reference,
                mask_BT=batch.mask,
                coefficient=self.state.token_kl_coef,
                estimator=self._algorithm.kl_estimator,
            )
            observed = kl_estimate(logprobs_BT=known, ref_logprobs_BT=reference, mask_BT=policy, estimator="k1")
            if policy.any():
                metrics["kl/reference"] = float(masked_mean(values_BT=observed, mask_BT=policy))
        if self._algorithm.adv_estimator == "gdpo":
            evidence = replace(evidence, reward_parts=self._reward_parts(batch, scores))
        elif self._algorithm.adv_estimator == "rae":
            evidence = replace(evidence, role_baselines=self._role_baselines(batch, scores))
        advantages, returns = credit.advantages(
            batch,
            self._algorithm.adv_estimator,
            options.estimator_options,
            scores=scores,
            rewards=token_rewards,
            evidence=evidence,
        )
        if self._algorithm.whiten_advantages:
            advantages = whiten(values_BT=advantages, mask_BT=policy)
        # After whitening, so that the limit bounds what the loss gets; distillation has its own coefficient.
        if (limit := self._algorithm.advantage_clip) is not None:
            advantages = advantages.clamp(-limit, limit)
        if teacher is not None:
            distance = kl_estimate(logprobs_BT=known, ref_logprobs_BT=teacher, mask_BT=policy, estimator="k1")
            advantages = advantages - self._algorithm.distill_coef * distance.detach()
            metrics |= teacher_metrics(batch, distance, policy, options.teachers)
        mask = self._loss_mask(batch) & policy
        metrics["staleness/masked_fraction"] = 1.0 - float(mask.sum()) / max(1, int(policy.sum()))
        # torch's std of a single number is NaN.
        metrics["advantages/std"] = float(advantages[policy].std()) if int(policy.sum()) > 1 else 0.0
        # Estimators may have worked in float64; `PolicyRows` and `ValueRows` are float32.
        return _Signal(advantages=advantages.float(), returns=returns.float(), mask=mask, metrics=metrics)

    def _part(self, batch: TrainBatch, name: str) -> Tensor:
        """[B] bool: rows that feed this part of the loss."""
        own = torch.tensor([self._options.loss_parts.get(domain, "policy") == name for domain in batch.domains])
        return own[batch.domain_index]

    def _part_masks(self, batch: TrainBatch, policy: Tensor) -> dict[str, Tensor]:
        """[B,T] by field of PolicyRows. `policy`: the trained tokens of the policy part."""
        if not self._options.loss_parts:
            return {"mask": policy}
        others = {name: batch.mask & self._part(batch, name)[:, None] for name in ("cross_entropy", "reference_kl")}
        trained = policy | others["cross_entropy"] | others["reference_kl"]
        parts = self._options.loss_parts.values()
        return {
            "mask": trained,
            "policy_mask": policy,
            **{f"{name}_mask": mask for name, mask in others.items() if name in parts},
        }

    def _reward_parts(self, batch: TrainBatch, scores: Tensor) -> Tensor:
        """[B,K] the rewards of gdpo, in their order."""
        names = self._options.estimator_options["rewards"]
        assert isinstance(names, Sequence)
        return torch.stack([scores if name == "score" else batch.reported[name] for name in names], -1)

    def _role_baselines(self, batch: TrainBatch, scores: Tensor) -> Tensor:
        """[B] baselines of rae; the averages go on, trajectory by trajectory."""
        decay, averages = self._options.estimator_options["decay"], self.state.role_averages
        assert isinstance(decay, float)
        # With the roles of earlier steps: a batch need not hold all of them, and their averages must stay.
        names = sorted({*averages, *batch.roles})
        lead = credit.first_rows(batch)
        baselines, after = reward_math.role_baselines(
            scores_B=scores[lead],
            role_index_B=torch.tensor([names.index(role) for role in batch.roles])[lead],
            averages_R=torch.tensor([averages.get(name, 0.0) for name in names], dtype=torch.float64),
            decay=decay,
        )
        self.state.role_averages = dict(zip(names, after.tolist(), strict=True))
        return credit.of_each_row(batch, baselines)

    def _shaped_scores(self, batch: TrainBatch) -> tuple[Tensor, Tensor | None, dict[str, float]]:
        """[B] scores after shift and scale, overlong shaping on that scale, normalisation, clipping; and the scores of
        the greedy answers (None without) on the same scale: what is subtracted must be of the kind it is subtracted
        from. Their lengths are not known, so they carry no overlong penalty.
        """
        options = self._options
        metrics: dict[str, float] = {}

        def scaled(values: Tensor) -> Tensor:
            return reward_math.shift_scale_rewards(
                scores_B=values, shift=self._algorithm.reward_shift, scale=self._algorithm.reward_scale
            )

        scores = scaled(batch.scores)
        baselines = None if batch.baseline_scores is None else scaled(batch.baseline_scores)
        overlong = self._algorithm.overlong_buffer
        if overlong.enable:
            penalty = reward_math.overlong_penalty(
                lengths_B=batch.response_lengths,
                max_length=options.response_length,
                buffer_length=overlong.len,
                factor=overlong.penalty_factor,
            )
            scores = scores + penalty
            metrics["reward/overlong_penalty"] = float(penalty.mean())
            metrics["reward/overlong_share"] = float((penalty < 0).float().mean())
        if self._algorithm.norm_mean_type != "none" or self._algorithm.norm_std_type != "none":
            scores, baselines = self._normalised(batch, scores, baselines)
        if (limit := self._algorithm.reward_clip) is not None:
            scores = scores.clamp(-limit, limit)
            baselines = None if baselines is None else baselines.clamp(-limit, limit)
        return scores, baselines, metrics

    def _normalised(self, batch: TrainBatch, scores: Tensor, baselines: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[B] normalised per domain, because domains have their own scale of difficulty; a trajectory counts once,
        however many rows it has. Baselines are put on the scale of the scores.
        """
        result = torch.zeros_like(scores)
        shifted = None if baselines is None else torch.zeros_like(baselines)
        lead = credit.first_rows(batch)
        counted = torch.zeros_like(scores, dtype=torch.bool)
        # The other rows of a trajectory get the result of their first row at the end.
        counted[lead] = True
        for index, domain in enumerate(batch.domains):
            rows = (batch.domain_index == index) & counted
            if not bool(rows.any()):
                continue
            merged = self.state.moments.get(domain, RunningMoments()).merged(scores_B=scores, row_mask_B=rows)
            self.state.moments[domain] = merged
            normalise = partial(
                reward_math.normalise_rewards,
                scores_B=scores,
                group_index_B=batch.group_index,
                mean=self._algorithm.norm_mean_type,
                std=self._algorithm.norm_std_type,
                running=merged,
                row_mask_B=rows,
            )
            result += normalise()
            if shifted is not None:
                shifted += normalise(values_B=baselines)
        found = credit.of_each_row(batch, result[lead])
        return found, None if shifted is None else credit.of_each_row(batch, shifted[lead])

    def _loss_mask(self, batch: TrainBatch) -> Tensor:
        """[B,T] tokens that are trained: sampled ones minus what the sample masks and the staleness bound take out."""
        options, mask = self._options, batch.mask
        if self._algorithm.max_len_mask:
            mask = mask & ~batch.cut[:, None]
        if self._algorithm.difficulty_low is not None or self._algorithm.difficulty_high is not None:
            lead = credit.first_rows(batch)
            keep = reward_math.difficulty_keep(
                scores_B=batch.scores[lead],
                group_index_B=batch.group_index[lead],
                low=-torch.inf if self._algorithm.difficulty_low is None else self._algorithm.difficulty_low,
                high=torch.inf if self._algorithm.difficulty_high is None else self._algorithm.difficulty_high,
            )
            mask = mask & credit.of_each_row(batch, keep)[:, None]
        if options.mask_older_than is not None:
            mask = reward_math.staleness_keep(
                version_lag_BT=_version_lag(batch), mask_BT=mask, max_lag=options.mask_older_than, level="token"
            )
        return mask

    def _policy_rows(
        self, batch: TrainBatch, proximal: Tensor | None, reference: Tensor | None, signal: _Signal
    ) -> tuple[PolicyRows, dict[str, float]]:
        """The rows the ranks train on, and the metrics of the train-engine mismatch."""
        options, weights, metrics = self._options, None, {}
        segments = credit.segments(batch)
        lag = torch.where(signal.mask, _version_lag(batch), 0)
        if proximal is not None:
            correction = correct(
                train_logprobs_BT=proximal,
                rollout_logprobs_BT=batch.behaviour_logprobs,
                mask_BT=signal.mask,
                options=self._algorithm.correction,
                segment_ids_BT=segments,
                version_lag_BT=lag,
            )
            metrics = correction_metrics(sums=correction.sums)
            weights = correction.weights.float()
        selection = select_tokens(
            self._algorithm.pg_variant,
            self._algorithm.pg_options,
            batch=batch,
            proximal=batch.behaviour_logprobs if proximal is None else proximal,
            advantages=signal.advantages,
            mask=signal.mask,
            seed=options.seed,
        )
        rows = PolicyRows(
            tokens=batch.tokens,
            lengths=batch.lengths,
            **self._part_masks(batch, signal.mask),
            advantages=signal.advantages,
            behaviour_logprobs=batch.behaviour_logprobs,
            proximal_logprobs=proximal,
            correction_weights=weights,
            scores=batch.scores,
            version_lag=lag,
            # Without a KL loss they would travel to every rank for nothing.
            ref_logprobs=reference if self._algorithm.kl_loss_coef > 0 else None,
            segment_ids=segments,
            selection=selection,
            experts=self._replayed(batch),
            images=batch.images,
        )
        return rows, metrics

    def _alarm_of_rates(self, metrics: Mapping[str, float], step: int) -> float:
        """1 where a role trained with a rate of 0, which no schedule reaches before the run has ended; said once."""
        idle = [part for part in ("trainer", "critic") if metrics.get(f"{part}/learning_rate") == 0]
        if idle and not self._told_of_rate:
            logger.warning("step %d: the learning rate of the %s is 0, nothing is learned any more", step, idle[0])
            self._told_of_rate = True
        return float(bool(idle))

    def _adapt_kl(self, metrics: Mapping[str, float], batch: TrainBatch) -> None:
        if self._options.algorithm.target_kl is not None and "kl/reference" in metrics:
            self.state.token_kl_coef = update_kl_coefficient(
                coefficient=self.state.token_kl_coef,
                observed_kl=metrics["kl/reference"],
                num_samples=int(self._part(batch, "policy").sum()),
                target=self._options.algorithm.target_kl,
                horizon=self._options.algorithm.kl_horizon,
            )


def _of_responses(batch: TrainBatch, values: Tensor) -> tuple[array, ...]:
    """Of each row the [R] values over its response, from [B,T]."""
    ends = zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)
    return tuple(
        array("f", row[start:end].float().numpy().tobytes()) for row, (start, end) in zip(values, ends, strict=True)
    )


def _version_lag(batch: TrainBatch) -> Tensor:
    """[B,T] staleness of each sampled token in versions, as `config/staleness.py` counts it."""
    return torch.where(batch.mask, batch.step - 1 - batch.versions, 0)
