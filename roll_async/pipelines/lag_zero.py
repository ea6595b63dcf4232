"""Tokens of the present weights must have the log-probs that the trainer gives them: same weights, same text.

The canary of a push compares both sides on given ids, before anything is sampled. Here they are compared on what was
sampled and is trained, `correction/lag_0/abs_log_rho`: where the canary agrees and this does not, weights and numerics
are right, and the trainer scores another text than the engine continued.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

from roll_async.config.schema import PipelineConfig
from roll_async.weight_sync.canary import CanaryReport, EngineMismatch, band_of

logger = logging.getLogger(__name__)

DIFFERENCE = "correction/lag_0/abs_log_rho"
NUM_TOKENS, SHARE = "correction/num_tokens", "correction/lag_0/token_fraction"
LEAST_TOKENS = 256
"""With fewer tokens of lag 0 nothing is compared. The band is for a mean of many tokens, and where all other advantages
are zero, the rows that are computed may be one. Of 256 tokens one alone, whose difference is clamped to 20 nats, does
not exceed the band of bfloat16 (0.1); the canary scores as many of a prompt.
"""
_TEMPLATE = (
    "template (the trainer scores other ids than the engine was given: chat template, tool results, a cut prompt), or "
    "the sampling distribution (temperature, penalties)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LagZeroOptions:
    """When the difference is a mismatch."""

    band: float
    """Largest mean |log pi_train - log pi_engine| in nats that rounding explains."""
    stop: bool = False
    """A mismatch ends the run; False = a warning."""

    @classmethod
    def of(cls, config: PipelineConfig) -> LagZeroOptions | None:
        """None where lag 0 does not mean the same distribution: the cache of older weights is kept, sampling is
        truncated, or the weights change between the parts of a step.
        """
        sampling = config.actor_infer.generating_args
        truncated = sampling.top_k > 0 or sampling.top_p < 1
        in_parts = config.async_training.require_batches < config.mini_batches_per_batch
        if config.async_training.interrupt.mode == "keep" or truncated or in_parts:
            return None
        return cls(band=band_of(config), stop=config.weight_sync.on_mismatch == "stop")


class OnPolicyCheck:
    """Keeps what the last canary found, to tell the suspects apart."""

    def __init__(self, options: LagZeroOptions | None) -> None:
        self._options = options
        self._asked: asyncio.Future[CanaryReport | None] | None = None
        self._canary: CanaryReport | None = None

    def pushed(self, checked: Awaitable[CanaryReport | None]) -> None:
        """Engines serve the next version, and answer the canary beside the next step."""
        self._asked = asyncio.ensure_future(checked)

    async def canary(self) -> CanaryReport | None:
        """What the canary of the last push found, once. None: it has been told, or nobody asked."""
        if self._asked is None:
            return None
        self._canary = await self._asked
        self._asked = None
        return self._canary

    async def close(self) -> None:
        """Nobody waits for the answers any more."""
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.wait({self._asked})
            if not self._asked.cancelled():
                self._asked.exception()  # marks it as retrieved

    def check(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """`weights/lag_zero_alarm`, 1 for a mismatch in the batch of a step; empty when too few tokens had lag 0."""
        difference = self._difference(metrics)
        if self._options is None or difference is None:
            return {}
        alarm = difference > self._options.band
        if alarm:
            logger.warning("Log-probs, step %d: %s", step, self._found(difference))
        return {"weights/lag_zero_alarm": float(alarm)}

    def stop(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises EngineMismatch for a mismatch, as the options say."""
        difference = self._difference(metrics)
        if self._options is None or difference is None or not self._options.stop:
            return
        if difference > self._options.band:
            found = self._found(difference)
            raise EngineMismatch(f"step {step}: {found} (weight_sync.on_mismatch: stop)")

    def _difference(self, metrics: Mapping[str, float]) -> float | None:
        """Of the tokens of lag 0; None when they are fewer than LEAST_TOKENS."""
        if DIFFERENCE not in metrics or round(metrics[NUM_TOKENS] * metrics[SHARE]) < LEAST_TOKENS:
            return None
        return metrics[DIFFERENCE]

    def _found(self, difference: float) -> str:
        assert self._options is not None
        found = (
            f"tokens of the present weights differ by {difference:.2g} nats on average between engine and trainer "
            f"(band {self._options.band:g})"
        )
        if self._canary is None:
            return f"{found}, and no canary told them apart. Suspect: weights, numerics or template"
        if self._canary.alarms:
            return f"{found}, as the canary of that version did: {self._canary.alarms[0]}"
        return f"{found}; the canary agrees. Suspect: {_TEMPLATE}"
