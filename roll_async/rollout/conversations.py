"""One prompt to one scored sample: turns until no tool is called, then the reward, retried while the scorer is down."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from roll_async.config.schema import PipelineConfig
from roll_async.config.user_code import at
from roll_async.observe.outside import border
from roll_async.rewards.verdict import reward_of_error
from roll_async.rollout.protocol import Scorer
from roll_async.rollout.server_manager import AsyncLLMServerManager
from roll_async.rollout.tools import ToolCompletionCallback
from roll_async.rollout.trace_tree import TraceTree
from roll_async.schema import FinishReason, GenerateRequest, Prompt, Reward, RewardStatus, Sample, SamplingParams

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0


class NoScore(RuntimeError):
    """A sample has no score. `raised`: because the code of its reward raised."""

    def __init__(self, message: str, *, raised: bool = False) -> None:
        super().__init__(message)
        self.raised = raised


class RewardOutage(NoScore):
    """The scorer did not work, also after retries. Not a wrong answer."""


class Unscorable(NoScore):
    """Scoring a sample exceeded the scorer's limits: it has no score, and scoring it again would end alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringOptions:
    """Retries and time-outs of scoring. Times in seconds of the loop."""

    reward_retries: int = 2
    """More attempts after an error of the reward itself."""
    reward_timeout_s: float = 1800.0
    """No answer of the scorer for this long, time in its queue included, counts as an outage."""
    outage_patience_s: float = 1800.0
    """How long a sample waits for a scorer that does not work; then its group fails."""
    unscored: frozenset[str] = frozenset()
    """Domains whose samples are not scored by a reward; their score is 0."""

    @classmethod
    def of(cls, config: PipelineConfig) -> ScoringOptions:
        """As the config has it."""
        fault = config.fault
        return cls(
            reward_retries=fault.sample_retries,
            reward_timeout_s=fault.stall_timeout,
            outage_patience_s=fault.stall_timeout,
            unscored=frozenset(config.loss_parts),
        )


class Conversations:
    """Runs conversations on the replicas of a manager. All turns of a conversation go to one replica while it lives."""

    def __init__(
        self,
        manager: AsyncLLMServerManager,
        scorer: Scorer,
        options: ScoringOptions,
        *,
        tools: ToolCompletionCallback | None = None,
    ) -> None:
        self._manager, self._scorer, self._options, self.tools = manager, scorer, options, tools
        self._requests: dict[str, str] = {}  # requests that have not ended, by sample
        self._unwanted: set[str] = set()
        self.scored: set[str] = set()
        """Domains of which a sample has had a score."""
        self._told: set[str] = set()
        """Lines of rewards that have raised."""
        self.reward_outages = self.reward_timeouts = self.reward_errors = 0
        """Attempts to score that gave no score, by cause."""

    async def sample(
        self,
        prompt: Prompt,
        name: str,
        sampling: SamplingParams,
        affinity: str | None = None,
        *,
        foreground: bool = False,
        on_generated: Callable[[], None] | None = None,
    ) -> Sample:
        """A finished, scored sample; an aborted one (FinishReason.ABORT) has no score. `on_generated` is called when
        all but the score is there. Raises RewardOutage, Unscorable, OutsideError (a callback of tools failed), and what
        `AsyncLLMServerManager.generate` raises.
        """
        try:
            tree = await self._converse(prompt, name, sampling, affinity, foreground)
        finally:
            self._requests.pop(name, None)
            self._unwanted.discard(name)
            if self.tools is not None:
                self._manager.forget_affinity(name)
        sample = tree.answer(name)
        if self.tools is not None:
            with border():
                sample = self.tools.postprocess(tree, name)
                if not isinstance(sample, Sample):
                    raise TypeError(f"postprocess gave {type(sample).__name__}, not a Sample")
        if sample.finish_reason is FinishReason.ABORT:
            return sample
        if on_generated is not None:
            on_generated()
        return replace(sample, reward=await self._score(prompt, sample))

    async def abort(self, names: Iterable[str]) -> None:
        """End these conversations: collect their request ids, wait for the servers' acknowledgement. Their `sample`
        calls then return; one that runs tools ends with them.
        """
        open_requests = {name: self._requests[name] for name in names if name in self._requests}
        self._unwanted |= open_requests.keys()
        await self._manager.abort(open_requests.values())

    async def _converse(
        self, prompt: Prompt, name: str, sampling: SamplingParams, affinity: str | None, foreground: bool
    ) -> TraceTree:
        loop, tree = asyncio.get_running_loop(), TraceTree()
        began_s = loop.time()
        end = tree.add_request(None, prompt.token_ids, role="user", started_s=began_s)
        while True:
            number, path = len(tree.turns), tree.token_ids(end)
            # The budget is one for the whole answer, results of tools included: a turn has what is left of it.
            left = sampling.max_new_tokens - (len(path) - len(prompt.token_ids))
            self._requests[name] = f"{name}+{number}" if number else name
            request = GenerateRequest(
                request_id=self._requests[name],
                prompt_token_ids=path,
                sampling=replace(sampling, max_new_tokens=left),
                recorded_positions=tree.recorded_positions(end),
            )
            completion = await self._manager.generate(
                request,
                affinity=affinity,
                conversation=name if self.tools is not None else None,
                foreground=foreground,
            )
            end = tree.add_turn(end, completion, started_s=began_s)
            if self.tools is None:
                return tree
            with border():
                found = await self.tools(prompt, tree, completion)
                results = None if found is None else array("i", found)
            if results is None:
                return tree
            if name in self._unwanted or len(completion.token_ids) + len(results) >= left:
                tree.end(FinishReason.ABORT if name in self._unwanted else FinishReason.LENGTH)
                return tree
            began_s = loop.time()
            end = tree.add_request(end, results, role="tool", started_s=began_s)

    async def _score(self, prompt: Prompt, sample: Sample) -> Reward:
        """The reward. An outage is retried with backoff for `outage_patience_s`, an error of the reward itself
        `reward_retries` times; both then fail the group. A time-out is final and filters the group.
        """
        loop, options = asyncio.get_running_loop(), self._options
        if prompt.domain in options.unscored:
            return Reward(score=0.0)
        patience_ends = loop.time() + options.outage_patience_s
        pause_s, errors = _FIRST_RETRY_S, 0
        where = f"reward of sample {sample.sample_id} (domain {prompt.domain})"
        while True:
            reward = await self._ask_scorer(prompt, sample)
            if reward.traceback:
                self._tell_once(where, reward)
            match reward.status:
                case RewardStatus.OK:
                    self.scored.add(prompt.domain)
                    return reward
                case RewardStatus.TIMEOUT:
                    self.reward_timeouts += 1
                    raise Unscorable(f"{where}: {reward.reason}", raised=bool(reward.traceback))
                case RewardStatus.ERROR:
                    self.reward_errors += 1
                    errors += 1
                    if errors > options.reward_retries:
                        raise RewardOutage(f"{where}: {reward.reason}", raised=True)
                case RewardStatus.OUTAGE:
                    self.reward_outages += 1
                    if loop.time() + pause_s > patience_ends:
                        raise RewardOutage(f"{where}: {reward.reason}, for {options.outage_patience_s:g} s")
                    logger.warning("%s: %s; asking again in %g s", where, reward.reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_RETRY_S, 2 * pause_s)

    def _tell_once(self, where: str, reward: Reward) -> None:
        """Tell the user which line of the reward raised, the first time that it does."""
        if reward.place not in self._told:
            self._told.add(reward.place)
            logger.warning("%s: %s%s; the traceback is in run.log", where, reward.reason, at(reward.place))
            logger.info("%s\n%s", where, reward.traceback)

    async def _ask_scorer(self, prompt: Prompt, sample: Sample) -> Reward:
        """One attempt. A scorer that died or does not answer is an outage; one that cannot read a file has raised."""
        timeout_s = self._options.reward_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._scorer.score(prompt, sample)
        except TimeoutError:
            return Reward(score=0.0, status=RewardStatus.OUTAGE, reason=f"no answer within {timeout_s:g} s")
        except ConnectionError as error:
            return Reward(score=0.0, status=RewardStatus.OUTAGE, reason=str(error))
        except OSError as error:
            return reward_of_error(error)
