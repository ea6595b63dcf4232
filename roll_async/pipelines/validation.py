"""Validations: held-out sets, each with its own sampling, measured with one version of the weights.

Metrics are those that papers report: n samples per prompt, avg@n, pass@k, the standard error.

n      = samples of a row * rows of a question; where questions have unequal numbers of rows, the smallest
pass@k = mean over prompts of 1 - C(n - c, k) / C(n, k), c of n samples right   (Chen et al. 2021, arXiv 2107.03374);
         a prompt enters with all samples that it has, n or not, if they are k or more
standard error = sample deviation of the prompts' means / sqrt(prompts); samples of one prompt are not independent

Replicas that run validations and nothing else (`validation.mode: replicas`):

    a step is due:  claim --> paused --> the push of the step gives them its weights, too --> run --> result
                      |                                                                        |
                      +-- False: none is there                  trainer and rollout go on -----+

They hold the weights of the step they measure until they are claimed again: a push between two validations leaves them
as they are. Requests of training never reach them. One that is lost is started again like any other replica; when none
is left the run goes on without validations.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from roll_async.buffer.errors import first_cause
from roll_async.config.schema import GeneratingArguments
from roll_async.pipelines.metrics import accuracy, complete_accuracy, mean
from roll_async.rollout.chat_scheduler import sampling_of
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.groups import GroupRunner
from roll_async.schema import Answered, FinishReason, Prompt, Reward, Sample, SamplingParams, WeightVersion

logger = logging.getLogger(__name__)

_Scored = tuple[Prompt, Sequence[Sample], Reward]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out set."""

    name: str
    """Empty = the main one."""
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    samples: int = 1
    """Per prompt."""

    @property
    def prefix(self) -> str:
        """Of its metrics."""
        return f"validation/sets/{self.name}" if self.name else "validation"


def held_out_sets(
    sampling: Mapping[str, GeneratingArguments], prompts: Mapping[str, Sequence[Prompt]]
) -> list[HeldOut]:
    """The sets with these prompts, by name, and how each is sampled (`PipelineConfig.validation_sampling`)."""
    asked = [(name, args) for name, args in sampling.items() if name in prompts]
    return [HeldOut(name, prompts[name], sampling_of(args), args.num_return_sequences) for name, args in asked]


class Validation:
    """Measures all sets at once; called with the training step whose weights the engines hold."""

    def __init__(
        self,
        sets: Sequence[HeldOut],
        source: GroupRunner,
        manager: EnginePool | None,
        version: Callable[[], WeightVersion | None],
        *,
        yields: bool = False,
        on_answers: Callable[[HeldOut, Sequence[Answered]], None] | None = None,
    ) -> None:
        """`manager`: of the source's replicas; None = it has none. `version`: what they hold. `yields`: training
        requests go before its own. `on_answers`: gets the answers of each set.
        """
        self._sets, self._source, self._manager, self._version = sets, source, manager, version
        self._yields, self._on_answers = yields, on_answers

    async def prepare(self, step: int) -> bool:
        """The engines of training get the weights in any case."""
        return True

    async def __call__(self, step: int) -> Mapping[str, float]:
        """Metrics of the samples that the version at the start sampled whole. A replica that is restarted meanwhile may
        have newer weights; what they sample is counted and left out.
        """
        version = self._version()
        self._yield(self._yields)
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._ask(held_out, step)) for held_out in self._sets]
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        finally:
            self._yield(False)  # also after an error: the order of requests is that of training again
        metrics, num_other = {"validation/version": float(version or 0)}, 0
        for held_out, answers in zip(self._sets, asked, strict=True):
            answered = answers.result()
            if self._on_answers is not None:
                self._on_answers(held_out, answered)
            kept = [(p, rows) for p, rows in answered if all(v == version for row in rows for v, _ in row.version_runs)]
            num_samples = held_out.samples
            metrics |= validation_metrics(kept, held_out.prompts, num_samples=num_samples, prefix=held_out.prefix)
            num_other += len(answered) - len(kept)
        return {**metrics, "validation/other_version": float(num_other)}

    def _yield(self, yields: bool) -> None:
        if self._manager is not None:
            self._manager.yield_validation(yields)

    async def _ask(self, held_out: HeldOut, step: int) -> list[Answered]:
        asked = [prompt for prompt in held_out.prompts for _ in range(held_out.samples)]
        name = f"validation.{step}.{held_out.name}" if held_out.name else f"validation.{step}"
        return await self._source.validate(asked, held_out.sampling, name=name)


class ReplicaValidation(Validation):
    """On replicas of its own."""

    def __init__(
        self,
        sets: Sequence[HeldOut],
        source: GroupRunner,
        manager: EnginePool,
        *,
        pause_timeout_s: float,
    ) -> None:
        """`manager`: of its replicas. `pause_timeout_s`: how long an idle one may take to pause before it
        is lost; the trainer waits so long at most.
        """
        super().__init__(sets, source, manager, lambda: self._claimed_for)
        self._engines, self._pause_timeout_s = manager, pause_timeout_s
        self._claimed_for: WeightVersion | None = None
        """The version that they measure."""

    async def prepare(self, step: WeightVersion) -> bool:
        """Claim them: pause all, so that the next push, or `resync_returned`, gives them the weights of this step.
        False: there is none, and none is being started again.
        """
        try:
            await self._engines.interrupt("resume", self._pause_timeout_s)
        except ConnectionError as error:  # the last one is lost: one that is started again may still join the push
            logger.error("validation: %s", error)
        self._claimed_for, claimed = step, self._engines.clients
        for client in claimed:
            self._engines.returning.hold(client)
        return bool(claimed) or self._engines.expects_return

    async def _resume(self) -> None:
        try:
            await self._engines.resume()
        except ConnectionError as error:
            logger.error("validation: %s", error)

    async def __call__(self, step: int) -> Mapping[str, float]:
        """Nothing when the last of them is lost, which ends no run, or when one was lost for so long that newer weights
        came: what was answered before is the short answers.
        """
        began_s = asyncio.get_running_loop().time()
        metrics = await self._while_one_lives(self._resume_and_measure(step))
        took_s = asyncio.get_running_loop().time() - began_s
        if metrics and (num_other := metrics["validation/other_version"]):
            logger.error(
                "the validation of step %d has no result: a replica of it died, and %d answers are of newer weights",
                step, num_other,
            )  # fmt: skip
            return {}
        return {**metrics, "validation/seconds": took_s} if metrics else {}

    async def _resume_and_measure(self, step: int) -> Mapping[str, float]:
        await self._resume()
        return await super().__call__(step)

    async def _while_one_lives(self, measure: Awaitable[Mapping[str, float]]) -> Mapping[str, float]:
        failed = asyncio.ensure_future(self._engines.wait_failed())
        measuring = asyncio.ensure_future(measure)
        try:
            await asyncio.wait({measuring, failed}, return_when=asyncio.FIRST_COMPLETED)
            if not measuring.done():
                await failed  # raises
            return await measuring
        except ConnectionError as error:
            logger.error("the validation of step %s has no result: %s", self._claimed_for, error)
            return {}
        finally:
            for task in (measuring, failed):
                task.cancel()
            await asyncio.wait({measuring, failed})
            for task in (measuring, failed):
                if not task.cancelled():
                    task.exception()  # marks it as retrieved


def validation_metrics(
    answered: Sequence[Answered], asked: Sequence[Prompt], *, num_samples: int, prefix: str = "validation"
) -> dict[str, float]:
    """`PREFIX/NAME` over all samples, and with more than one domain `PREFIX/domains/DOMAIN/NAME`. A mean over nothing
    is not published. Each of `asked` was asked `num_samples` times; `unscored` counts the samples without a score.
    """
    scored = [(prompt, rows, reward) for prompt, rows in answered if (reward := rows[0].reward) is not None]
    metrics = {f"{prefix}/unscored": float(len(asked) * num_samples - len(scored))}
    domains = sorted({prompt.domain for prompt, _, _ in scored})
    parts = {prefix: (scored, asked)}
    for d in domains if len(domains) > 1 else ():
        parts[f"{prefix}/domains/{d}"] = [x for x in scored if x[0].domain == d], [p for p in asked if p.domain == d]
    for place, (part, prompts) in parts.items():
        metrics[f"{place}/samples"] = float(len(part))
        if part:
            num_drawn = num_samples * min(Counter(map(_question, prompts)).values())
            metrics |= {f"{place}/{name}": value for name, value in _of_part(part, num_drawn).items()}
    return metrics


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k samples drawn without repetition is right.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    # `comb` is 0 where fewer than k are wrong: the chance is 1.
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _question(prompt: Prompt) -> tuple[object, ...]:
    """The same question in several rows (AIME 2024 as published for DAPO) is one question with more samples."""
    # The task of a world has no tokens: its row is its seed.
    return prompt.domain, prompt.token_ids.tobytes() or prompt.row_id, prompt.images


def _of_part(part: Sequence[_Scored], num_drawn: int) -> dict[str, float]:
    """`num_drawn`: samples asked of the question with the fewest; n of avg@n."""
    verdicts: dict[tuple[object, ...], list[float]] = {}
    for prompt, _, reward in part:
        verdicts.setdefault(_question(prompt), []).append(accuracy(reward))
    means = [mean(of_prompt) for of_prompt in verdicts.values()]
    metrics = {
        "prompts": float(len(means)),
        "reward": mean([r.score for _, _, r in part]),
        "accuracy": mean([accuracy(r) for _, _, r in part]),
        "accuracy_complete": mean([complete_accuracy(r, rows) for _, rows, r in part]),
        # Sampled tokens alone, without what tools and worlds say.
        "length_mean": mean([sum(sum(row.loss_mask) for row in rows) for _, rows, _ in part]),
        "truncated": mean([float(rows[-1].finish_reason is FinishReason.LENGTH) for _, rows, _ in part]),
    }
    if len(means) > 1:
        center = mean(means)
        metrics["standard_error"] = math.sqrt(sum((m - center) ** 2 for m in means) / (len(means) - 1) / len(means))
    if num_drawn > 1:
        metrics[f"avg@{num_drawn}"] = mean(means)
        for k in sorted({2**i for i in range(num_drawn.bit_length())} | {num_drawn}):
            drawn = [pass_at_k(len(v), sum(x > 0 for x in v), k) for v in verdicts.values() if len(v) >= k]
            if drawn:
                metrics[f"pass@{k}"] = mean(drawn)
    for name in sorted({name for _, _, r in part for name in r.metrics} - {"acc"}):  # it is the accuracy above
        metrics[f"metrics/{name}"] = mean([r.metrics[name] for _, _, r in part if name in r.metrics])
    return metrics
