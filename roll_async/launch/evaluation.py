"""The measurement of a validation without a run: of a model folder on engines, or of an address.

    folder   engines and reward host on Ray  --> ChatCompletionScheduler --\\
             engines on Ray, worlds          --> WorldRunner --------------+--> pipelines/validation --> sets, samples
    address  chats over HTTP, reward workers --> EndpointRunner ----------/
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from roll_async.buffer.errors import after_start
from roll_async.config.schema import AgenticConfig, PipelineConfig, RLVRConfig, WorkerConfig
from roll_async.config.schema_rollout import MAIN_SET
from roll_async.inference.endpoint import ChatEndpoint, EndpointOptions, Refused
from roll_async.inference.settings import unshown_stops
from roll_async.launch.roles import loading_weights, start_without_training
from roll_async.launch.rollout import data_options, held_out_of
from roll_async.observe.thoughts import marks_of
from roll_async.pipelines.validation import HeldOut, Validation, held_out_sets
from roll_async.prompts.end_marks import EndMarks
from roll_async.prompts.rows import BadRows, content_digest, final_number, read_rows
from roll_async.prompts.tokenizer import batch_decoder, load_tokenizer
from roll_async.prompts.turns import Turn
from roll_async.rewards.serving.router import RewardRouter
from roll_async.rollout.group_source import SourceCounts
from roll_async.rollout.groups import Ended, EndReason, GroupOptions, GroupRunner, Trajectory, TrajectoryRequest
from roll_async.schema import Answered, Prompt, RewardStatus, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

C = TypeVar("C", bound=PipelineConfig)

_OF_A_RUN = ("version", "other_version")
"""Metrics of a run, dropped in an evaluation: its weights have no version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What was measured."""

    sets: Mapping[str, Mapping[str, float]]
    """Set to its metrics, named as in docs_roll/metrics.md without `validation/`."""
    samples: Sequence[Mapping[str, object]]
    """One record per row of an answer, with its texts."""

    @property
    def unanswered(self) -> list[str]:
        """Sets of which no answer has a score."""
        return [name for name, metrics in self.sets.items() if not metrics["samples"]]


def for_evaluation(config: C, model: str | None) -> C:
    """The config of a measurement: one validation, on all engines, and no other model or data than its own. `model`: a
    folder or hub name; None = `pretrain`, whose tokenizer is all that an address needs. Raises ValueError for an rlvr
    config without `validation`.
    """
    model = model or config.pretrain
    changes: dict[str, object] = {"pretrain": model, "reward_pretrain": model, "eval_steps": 1}
    held_out = None
    if isinstance(config, RLVRConfig):
        if config.validation is None:
            example = "validation={data_args: {file_name: held_out.jsonl}}"
            message = f"it says which prompts are asked and how, and the config has none; add {example}"
            raise ValueError(f"validation: {message}")
        # pause: other modes need a training to run beside, or replicas of their own.
        held_out, changes["validation"] = config.validation.data_args, replace(config.validation, mode="pause")
    elif isinstance(config, AgenticConfig):
        changes["val_env_manager"] = replace(config.val_env_manager, mode="pause")
    roles: dict[str, WorkerConfig] = {}
    for name, role in config.roles():
        arguments = replace(role.model_args, model_name_or_path=model)
        data = role.data_args if held_out is None or role.data_args is None else held_out
        roles[name] = replace(loading_weights(role), model_args=arguments, data_args=data)
    changes["weight_sync"] = replace(config.weight_sync, adapters="merged")  # nobody pushes adapters to these engines
    return replace(config.with_roles(roles), **changes)


async def evaluate_folder(config: PipelineConfig, stack: AsyncExitStack) -> Evaluation:
    """Measure the model of `config.actor_infer`. Raises what `launch/roles.py: start_without_training` does."""
    held_out = held_out_sets(config.validation_sampling, await asyncio.to_thread(held_out_of, config))
    groups, manager = await start_without_training(config, stack)
    report = Report(config)
    measure = Validation(held_out, groups, manager, lambda: 0, on_answers=report.add)
    with after_start():
        return report.evaluation(await measure(0))


async def evaluate_address(config: RLVRConfig, options: EndpointOptions, stack: AsyncExitStack) -> Evaluation:
    """Measure what is behind an address. Raises ValueError for what the user can fix, ConnectionError when nothing
    answers.
    """
    endpoint = ChatEndpoint(options)
    stack.push_async_callback(endpoint.close)
    await endpoint.start()
    held_out = held_out_sets(config.validation_sampling, await asyncio.to_thread(held_out_of, config))
    tokenizer = await asyncio.to_thread(load_tokenizer, config.pretrain)
    scored = {name: r for name, r in config.rewards.items() if name not in config.loss_parts}
    router = RewardRouter(scored, marks_of(tokenizer))
    await router.start()
    stack.push_async_callback(router.close)
    report = Report(config)
    answers = GroupRunner(
        EndpointRunner(config, endpoint, router, tokenizer), None, GroupOptions(samples_per_group=1, sampling=None)
    )
    measure = Validation(held_out, answers, None, lambda: 0, on_answers=report.add)
    return report.evaluation(await measure(0))


class EndpointRunner:
    """`rollout/groups.py: TrajectoryRunner` over an address. The tokens of an answer are those of its text."""

    cancels_on_abort = False

    def __init__(
        self, config: RLVRConfig, endpoint: ChatEndpoint, router: RewardRouter, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._endpoint, self._router, self._tokenizer = endpoint, router, tokenizer
        self._chats: dict[tuple[str, str], tuple[Sequence[Turn], Mapping[str, object]]] = {}
        """By row and its content, of which a maths rule has the final number alone: ids need not differ."""
        assert config.validation is not None
        for key, data in config.validation.data.values():
            options = data_options(config, data)
            for row in read_rows(options.files, options.columns, BadRows()):
                if row.images:
                    raise ValueError(f"{row.where}: an image, and an address is asked in text; measure a model folder")
                for truth in {row.ground_truth, final_number(row.ground_truth)}:
                    content = row.row_id, content_digest(row.messages, truth, row.extra)
                    _, variables = self._chats.setdefault(content, (row.messages, data.template_kwargs))
                    if variables != data.template_kwargs:
                        message = f"row {row.row_id} is in another set with others, and an address is asked in one way"
                        raise ValueError(f"{key}.template_kwargs: {message}; measure the sets one by one")

    async def run(self, request: TrajectoryRequest) -> Trajectory | Ended:
        """One scored answer; what the server refuses and what has no score gives none. Raises ConnectionError when the
        server is gone.
        """
        loop, prompt, sampling = asyncio.get_running_loop(), request.prompt, request.sampling
        assert sampling is not None, "a validation says how it samples"
        began_s, row = loop.time(), f"row {prompt.row_id}"
        messages, variables = self._chats[prompt.row_id, prompt.content]
        try:
            text, finish = await self._endpoint.chat(messages, sampling, variables)
        except Refused as error:
            return Ended(reason=EndReason.FAILED, text=f"{row}: {error}")
        generation_s = loop.time() - began_s
        try:
            reward = await self._router.score(prompt, text)
        except ConnectionError as error:
            return Ended(reason=EndReason.FAILED, text=f"{row}: {error}")
        if reward.status is not RewardStatus.OK:
            return Ended(reason=EndReason.FAILED, text=f"{row}: no score: {reward.reason}")
        tokens = array("i", self._tokenizer.encode(text, add_special_tokens=False))  # it goes on after a prompt
        answer = Sample(
            sample_id=request.name,
            prompt_token_ids=prompt.token_ids,
            response_token_ids=tokens,
            loss_mask=b"\x01" * len(tokens),
            behaviour_logprobs=array("f", bytes(4 * len(tokens))),  # the server tells none, and nothing is trained
            version_runs=((0, len(tokens)),) if tokens else (),
            finish_reason=finish,
            generation_s=generation_s,
            reward=reward,
        )
        return Trajectory(rows=(answer,))

    def counts(self, num_retries: int) -> SourceCounts:
        """The report has all that there is to count."""
        return SourceCounts()


class Report:
    """Collects the samples of all sets."""

    def __init__(self, config: PipelineConfig) -> None:
        self._tokenizer = load_tokenizer(config.pretrain)
        self._answers = batch_decoder(self._tokenizer, EndMarks.of(self._tokenizer).ids, unshown_stops(config))
        self._samples: list[Mapping[str, object]] = []

    def add(self, held_out: HeldOut, answered: Sequence[Answered]) -> None:
        """The answers of a set."""
        self._samples += [self._record(held_out, prompt, sample) for prompt, samples in answered for sample in samples]

    def _record(self, held_out: HeldOut, prompt: Prompt, sample: Sample) -> Mapping[str, object]:
        reward, is_trajectory = sample.reward, sample.outcome is not None

        def text(ids: array) -> str:
            # The marks of a template tell who says what in a trajectory; around a single answer they say nothing.
            return str(self._tokenizer.decode(list(ids))) if is_trajectory else self._answers([list(ids)])[0]

        row: dict[str, object] = {
            "set": held_out.name or MAIN_SET,
            "row_id": prompt.row_id,
            "domain": prompt.domain,
            "prompt": text(sample.prompt_token_ids) if is_trajectory else prompt.text,
            "ground_truth": prompt.ground_truth,
            "response": text(sample.response_token_ids),
            "score": None if reward is None else reward.score,
            "metrics": {} if reward is None else dict(reward.metrics),
            "finish_reason": sample.finish_reason.value,
            "tokens": sum(sample.loss_mask),
        }
        if sample.outcome is not None:
            turns = [asdict(turn) for turn in sample.turns]
            row |= {"trajectory": sample.trajectory, "outcome": sample.outcome.value, "turns": turns}
        return row

    def evaluation(self, metrics: Mapping[str, float]) -> Evaluation:
        """With the metrics of all sets."""
        sets: dict[str, dict[str, float]] = {}
        for key, value in metrics.items():
            name, rest = MAIN_SET, key.removeprefix("validation/")
            if rest.startswith("sets/"):
                _, name, rest = rest.split("/", 2)
            if rest not in _OF_A_RUN:
                sets.setdefault(name, {})[rest] = value
        return Evaluation(sets=sets, samples=self._samples)
