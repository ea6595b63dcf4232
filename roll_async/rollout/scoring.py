"""The reward of an answer, asked for until the scorer says something about it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from roll_async.config.schema import PipelineConfig
from roll_async.config.user_code import at
from roll_async.rewards.verdict import reward_of_error
from roll_async.rollout.groups import Ended, EndReason
from roll_async.rollout.protocol import Scorer
from roll_async.schema import Prompt, Reward, RewardStatus, Sample

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0


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


class RewardScoring:
    """Scores answers. Their tokens are fixed before the first attempt: an answer sampled again because its reward
    failed would be selected by whether it can be scored.
    """

    def __init__(self, scorer: Scorer, options: ScoringOptions) -> None:
        self._scorer, self._options = scorer, options
        self._scored: set[str] = set()
        """Domains of which a sample has had a score."""
        self._told: set[str] = set()
        """Lines of rewards that have raised."""
        self.outages = self.timeouts = self.errors = 0
        """Attempts to score that gave no score, by cause."""

    def is_scored(self, prompt: Prompt) -> bool:
        """Whether a reward scores the answers of this domain; 0 stands for those of the others."""
        return prompt.domain not in self._options.unscored

    async def score(self, prompt: Prompt, sample: Sample) -> Reward | Ended:
        """The reward. An outage is retried with backoff for `outage_patience_s`, an error of the reward itself
        `reward_retries` times; both then fail the group. A time-out is final and filters the group.
        """
        loop, options = asyncio.get_running_loop(), self._options
        if not self.is_scored(prompt):
            return Reward(score=0.0)
        patience_ends = loop.time() + options.outage_patience_s
        pause_s, errors = _FIRST_RETRY_S, 0
        where = f"reward of sample {sample.sample_id} (domain {prompt.domain})"
        while True:
            reward = await self._ask_scorer(prompt, sample)
            text = f"{where}: {reward.reason}"
            if reward.traceback:
                self._tell_once(where, reward)
            match reward.status:
                case RewardStatus.OK:
                    self._scored.add(prompt.domain)
                    return reward
                case RewardStatus.TIMEOUT:
                    self.timeouts += 1
                    return self._ended(EndReason.UNSCORABLE, text, prompt, raised=bool(reward.traceback))
                case RewardStatus.ERROR:
                    self.errors += 1
                    errors += 1
                    if errors > options.reward_retries:
                        return self._ended(EndReason.FAILED, text, prompt, raised=True)
                case RewardStatus.OUTAGE:
                    self.outages += 1
                    if loop.time() + pause_s > patience_ends:  # the next attempt would come too late
                        text = f"{text}, for {options.outage_patience_s:g} s"
                        return self._ended(EndReason.FAILED, text, prompt, raised=False)
                    logger.warning("%s; asking again in %g s", text, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_RETRY_S, 2 * pause_s)

    def _ended(self, reason: EndReason, text: str, prompt: Prompt, *, raised: bool) -> Ended:
        never = raised and prompt.domain not in self._scored
        return Ended(reason=reason, text=text, raised=raised, never_scored=never)

    def _tell_once(self, where: str, reward: Reward) -> None:
        """Tell the user which line of the reward raised, the first time that it does."""
        if reward.place not in self._told:
            self._told.add(reward.place)
            logger.warning("%s: %s%s; the traceback is in run.log", where, reward.reason, at(reward.place))
            logger.info("%s\n%s", where, reward.traceback)  # INFO: in run.log, not on the console

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
        except OSError as error:  # after the two above, which are OSErrors, too
            return reward_of_error(error)
