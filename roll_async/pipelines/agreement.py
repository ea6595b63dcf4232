"""Whether engines and trainer are the same policy: the canary of every push, and the trained tokens of lag 0.

    canary     after a push both score given ids; the next step trains meanwhile, and its record has the result
    on policy  tokens of the present weights in a batch: engine and trainer must have given them the same log-probs

The canary (`weight_sync/canary.py`) compares both sides before anything is sampled. The second check compares them on
what was sampled and is trained, `correction/lag_0/abs_log_rho`: where the canary agrees and this does not, weights and
numerics are right, and the trainer scores another text than the engine continued.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping

from roll_async.pipelines.metrics import canary_metrics
from roll_async.weight_sync.canary import CanaryReport, EngineMismatch

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


class PolicyAgreement:
    """Both checks, in the order of a step: `canary`, `check`, `stop_on_mismatch`, then the push and `pushed`. What the
    last canary found tells the suspects of the second check apart.
    """

    def __init__(self, band: float | None, *, stops: bool) -> None:
        """`band`: see `on_policy_band`; None = tokens of lag 0 are not compared. `stops`: a mismatch of theirs ends the
        run, else it is a warning.
        """
        self._band, self._stops = band, stops
        self._asked: asyncio.Future[CanaryReport | None] | None = None
        self._canary: CanaryReport | None = None

    def pushed(self, checked: Awaitable[CanaryReport | None]) -> None:
        """Engines serve the next version, and answer the canary beside the next step."""
        self._asked = asyncio.ensure_future(checked)

    async def canary(self) -> dict[str, float]:
        """Metrics of the canary of the last push, once; waits for the engines' answers. Empty when they were published,
        or nobody was asked.
        """
        if self._asked is None:
            return {}
        self._canary = await self._asked
        self._asked = None  # not before: `close` ends a question whose wait was cancelled
        return canary_metrics(self._canary)

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
        if self._band is None or difference is None:
            return {}
        alarm = not difference <= self._band  # NaN is no agreement
        if alarm:
            logger.warning("Log-probs, step %d: %s", step, self._found(difference))
        return {"weights/lag_zero_alarm": float(alarm)}

    def stop_on_mismatch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises EngineMismatch for a mismatch, where it stops."""
        difference = self._difference(metrics)
        if self._band is None or difference is None or not self._stops:
            return
        if not difference <= self._band:
            found = self._found(difference)
            raise EngineMismatch(f"step {step}: {found} (weight_sync.on_mismatch: stop)")

    def _difference(self, metrics: Mapping[str, float]) -> float | None:
        """Of the tokens of lag 0; None when they are fewer than LEAST_TOKENS."""
        # Rounded: the product of a count and a fraction may be just below the number of tokens.
        if DIFFERENCE not in metrics or round(metrics[NUM_TOKENS] * metrics[SHARE]) < LEAST_TOKENS:
            return None
        return metrics[DIFFERENCE]

    def _found(self, difference: float) -> str:
        found = (
            f"tokens of the present weights differ by {difference:.2g} nats on average between engine and trainer "
            f"(band {self._band:g})"
        )
        if self._canary is None:
            return f"{found}, and no canary told them apart. Suspect: weights, numerics or template"
        if self._canary.alarms:
            return f"{found}, as the canary of that version did: {self._canary.alarms[0]}"
        return f"{found}; the canary agrees. Suspect: {_TEMPLATE}"
