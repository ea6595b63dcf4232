"""Client of the math verify service (`examples/async_dapo/math_verify_service.py`): verdicts over HTTP.

    score_response --> POST {api_url}/score --> {"status": "ok", "score": 1.0, ...}

Whatever keeps the service from judging (not there, busy, broken, the token refused) is tried again with backoff and
then reported as OUTAGE, which the rollout waits out. It never becomes a score.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from roll_async.config.schema_rollout import ServiceConfig
from roll_async.config.secrets import shown_override
from roll_async.observe.outside import LARGEST
from roll_async.rewards.serving.http_calls import Backoff, Trouble, open_session
from roll_async.schema import Prompt, Reward, RewardStatus

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

_BACKOFF = Backoff(first_s=0.25, longest_s=10.0)
_REFUSED = frozenset({400, 411, 413, 414, 422, 431})
"""The service cannot take this sample: too large, or not what its schema says. Another attempt brings the same."""
_PROBE = (r"\boxed{\frac{1}{2}}", "0.5")  # equal only to what parses LaTeX
_STATES = {"ok": RewardStatus.OK, "timeout": RewardStatus.TIMEOUT, "error": RewardStatus.ERROR}


class ServiceClient:
    """`rewards/serving/router.py: DomainScorer` over HTTP; any number of samples at once."""

    def __init__(self, config: ServiceConfig, *, timeout_s: float = 30.0, answer_format: str = "auto") -> None:
        """`timeout_s`: of one request, what it waits in the service included."""
        self._config, self._timeout_s, self._answer_format = config, timeout_s, answer_format
        self._url = f"{config.api_url.rstrip('/')}/score"
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._http: aiohttp.ClientSession | None = None
        self.outages = 0

    async def start(self) -> None:
        """Connect and have one known answer judged. Raises ValueError when the service is not there, refuses the token
        or judges wrongly: a run must not start on it.
        """
        self._http = open_session(key="service.token_env", variable=self._config.token_env, timeout_s=self._timeout_s)
        reward = await self._score(*_PROBE, {})
        if reward.status is not RewardStatus.OK or reward.score != 1.0:
            problem = reward.reason if reward.status is not RewardStatus.OK else f"it gives 1/2 = 0.5 {reward.score:g}"
            raise ValueError(
                f"no math verify service at {self._config.api_url}: {problem}; start it with "
                "python examples/async_dapo/math_verify_service.py"
            )

    async def close(self) -> None:
        """End what is under way."""
        if self._http is not None:
            await self._http.close()

    async def score_response(self, prompt: Prompt, text: str) -> Reward:
        """The service's verdict; OUTAGE when it does not work after the retries; ERROR when it refuses the sample."""
        form = self._answer_format
        asked = {} if form == "auto" else {"answer_format": form}
        return await self._score(text, prompt.ground_truth, {**asked, **prompt.extra})

    async def _score(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Reward:
        body = json.dumps({"text": text, "ground_truth": ground_truth, "extra": dict(extra)}).encode()

        async def attempt() -> Reward | Trouble:
            async with self._slots:
                return await self._post(body)

        reply = await _BACKOFF.answer(attempt, self._config.max_retries)
        if isinstance(reply, Reward):
            return reply
        self.outages += 1
        url = shown_override(self._config.api_url)
        return Reward(score=0.0, status=RewardStatus.OUTAGE, reason=f"{url}: {reply[-1].reason}")

    async def _post(self, body: bytes) -> Reward | Trouble:
        import aiohttp

        assert self._http is not None, "start first"
        try:
            async with self._http.post(self._url, data=body, headers={"Content-Type": "application/json"}) as response:
                status, text = response.status, await response.text(errors="replace")
                pause_s = _BACKOFF.asked_for_s(response.headers.get("Retry-After", ""))
        except TimeoutError:
            return Trouble(reason=f"no answer within {self._timeout_s:g} s")
        except aiohttp.ClientError as error:
            return Trouble(reason=f"{type(error).__name__} {error}".strip())
        if status == 200:
            return _reward(text)
        if status in _REFUSED:
            return Reward(score=0.0, status=RewardStatus.ERROR, reason=f"the service refuses it: {status} {text[:200]}")
        if pause_s is not None:
            # Not before the time that was asked for, and not all callers at once.
            pause_s *= random.uniform(1.0, 1.5)
        return Trouble(reason=f"status {status} {text[:200]}", pause_s=pause_s)


def _reward(text: str) -> Reward | Trouble:
    """The reply as a reward. Whatever is not exactly a verdict is trouble: a proxy's page must not become a score."""
    try:
        reply = json.loads(text)
        status = _STATES[reply["status"]]
        numbers = (
            {name: _number(reply[name]) for name in ("score", "acc", "format")} if status is RewardStatus.OK else {}
        )
        scoring_s, reason = _number(reply["scoring_s"]), str(reply["reason"])
    except (ValueError, KeyError, TypeError) as error:
        return Trouble(reason=f"no verdict in {text[:100]!r} ({type(error).__name__}: {error})")
    score = numbers.pop("score", 0.0)
    return Reward(score=score, status=status, metrics=numbers, reason=reason, scoring_s=scoring_s)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError(f"expected a finite number, at most {LARGEST:g} in size, got {repr(value)[:50]}")
    return float(value)
