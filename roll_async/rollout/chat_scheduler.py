"""`ChatCompletionScheduler`: groups of answers to questions, and rounds over many prompts, by the documents' name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll_async.algorithms.overlong import OverlongShaping
from roll_async.config.schema import GeneratingArguments, RLVRConfig
from roll_async.rollout.answers import AnswerRunner
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.filters.filter_budget import BudgetOptions
from roll_async.rollout.filters.group_filter import GroupFilter
from roll_async.rollout.groups import GroupOptions, GroupRunner
from roll_async.rollout.protocol import Scorer
from roll_async.rollout.rounds import RolloutResult, generate_round
from roll_async.rollout.scoring import RewardScoring, ScoringOptions
from roll_async.rollout.tools import ToolCompletionCallback
from roll_async.schema import Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions(GroupOptions):
    """The part of the config that the scheduler uses."""

    sampling: SamplingParams
    max_num_gen_batches: int = 0
    """<= 0 = no limit."""
    gen_batch_size: int | None = None
    """Groups in flight in a round; None = as many as the round wants."""
    scoring: ScoringOptions = ScoringOptions()

    @classmethod
    def of(cls, config: RLVRConfig) -> SchedulerOptions:
        """How prompts become groups, as the config has it."""
        groups = config.algorithm.filter_groups
        return cls(
            samples_per_group=config.samples_per_group,
            sampling=sampling_of(config.actor_infer.generating_args),
            filter=GroupFilter.of(config, OverlongShaping.of(config)),
            max_num_gen_batches=groups.max_num_gen_batches,
            gen_batch_size=groups.gen_batch_size,
            scoring=ScoringOptions.of(config),
            greedy_baseline=config.algorithm.adv_estimator == "remax",  # its baseline is the score of a greedy answer
            spread_samples=config.is_num_return_sequences_expand,
        )


class ChatCompletionScheduler(GroupRunner):
    """A `GroupRunner` of answers. `tools`: a callback that runs the tools which a completion asks for."""

    def __init__(
        self,
        manager: EnginePool,
        scorer: Scorer,
        options: SchedulerOptions,
        *,
        tools: ToolCompletionCallback | None = None,
    ) -> None:
        answers = AnswerRunner(manager, RewardScoring(scorer, options.scoring), tools=tools)
        super().__init__(answers, manager, options)
        self._rounds = options.max_num_gen_batches, options.gen_batch_size
        manager.scheduled_by(self)

    async def generate_sequences(
        self, prompts: Sequence[Prompt], num_groups: int, *, validation: bool = False, first_id: int = 0
    ) -> RolloutResult:
        """One round: `rollout/rounds.py: generate_round`."""
        most, width = self._rounds
        budget = BudgetOptions(
            groups_per_batch=num_groups, gen_batch_size=width or num_groups, max_num_gen_batches=most
        )
        return await generate_round(self, prompts, budget, validation=validation, first_id=first_id)


def sampling_of(args: GeneratingArguments) -> SamplingParams:
    """How one request samples, as the config has it."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
        stop_strings=tuple(args.stop_strings),
        include_stop_str_in_output=args.include_stop_str_in_output,
    )
