"""Models behind the fakes: length of answers, speed of engines, faults and their times.

Everything is a function of a seed and a name, never of the order of calls, so a change of schedule does not change the
world.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import exp, log, sqrt
from statistics import NormalDist

_NORMAL = NormalDist()


def uniform(*name: object) -> float:
    """A number in (0, 1) that belongs to this name."""
    text = "/".join(map(str, name)).encode()
    return (int.from_bytes(blake2b(text, digest_size=8).digest()) + 0.5) / 2**64  # the 0.5: `inv_cdf` has no value at 0


@dataclass(frozen=True, kw_only=True)
class LengthModel:
    """Lognormal answer lengths, cut at a maximum.

    mean_tokens is the mean before the cut. Worked example: mean 100, sigma 1.3 has its median at 43 tokens and one
    answer in a hundred beyond 880.
    """

    mean_tokens: float = 100.0
    sigma: float = 0.6
    """Standard deviation of the logarithm; 0 = all equal. 0.6 is a light tail, 1.3 a heavy one."""
    max_tokens: int = 600
    min_tokens: int = 1
    prompt_share: float = 0.0
    """Part of the variance of the logarithm that all answers to one prompt share, 0..1."""

    @cached_property
    def _mu(self) -> float:
        return log(self.mean_tokens) - self.sigma**2 / 2  # the mean of a lognormal is exp(mu + sigma^2 / 2)

    def tokens(self, seed: int, prompt: str, sample: str) -> int:
        """Length of one answer."""
        z = _NORMAL.inv_cdf(uniform(seed, "length", sample))
        if self.prompt_share:
            shared = _NORMAL.inv_cdf(uniform(seed, "prompt", prompt))
            # Roots of the shares: the variance stays 1.
            z = sqrt(self.prompt_share) * shared + sqrt(1 - self.prompt_share) * z
        return min(self.max_tokens, max(self.min_tokens, round(exp(self._mu + self.sigma * z))))

    def mean_of_cut(self) -> float:
        """Mean after the cut, in closed form."""
        if not self.sigma:
            return min(self.mean_tokens, float(self.max_tokens))
        edge = (log(self.max_tokens) - self._mu) / self.sigma
        # The partial expectation of a lognormal below the cut, and the cut itself for the rest.
        return self.mean_tokens * _NORMAL.cdf(edge - self.sigma) + self.max_tokens * (1 - _NORMAL.cdf(edge))


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedModel:
    """Seconds per token of each running request: `token_s + token_s_per_request * (running - 1)`.

    The first term is reading the weights once per decoding step, the second what one more request adds to it.
    """

    token_s: float = 0.01
    token_s_per_request: float = 0.0
    prefill_token_s: float = 0.0
    """Of one prompt token, at the start and again when an interrupted request is continued elsewhere."""

    kv_tokens: int | None = None
    """Tokens that the KV cache of a replica holds; when it is full the youngest request is preempted, and computed
    again from its first token on when there is room. None = without limit.

    With a limit the prefill of one request holds up the decoding of all others, as it does where it is bound by
    compute. Tokens are counted one by one: blocks would add half a block to each request.
    """

    def seconds_per_token(self, running: int) -> float:
        """With this many requests running."""
        return self.token_s + self.token_s_per_request * max(0, running - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFaults:
    """Faults of one replica. The default replica is healthy."""

    slow_factor: float = 1.0
    """Its tokens take this many times as long."""
    silent_from_s: float | None = None
    """From then on it takes requests and runs them, and its replies are lost."""
    silent_for_s: float = float("inf")
    deaf_from_s: float | None = None
    """From then on it generates and answers, but neither acknowledges nor executes a pause, a resume or an abort."""
    frozen_from_s: float | None = None
    """From then on no call to it returns and no reply comes, as if it were stopped; it is not dead, nothing breaks."""
    hung_from_s: float | None = None
    """From then on it computes no token; its front end answers every call, executes aborts and loads weights.
    """
    half_open_from_s: float | None = None
    """From then on its connection works in one direction: calls are executed, answers and reports are lost."""
    errors_from_s: float | None = None
    """From then on every call to it raises RuntimeError."""
    way_s: float = 0.0
    """Latency of every call: random, up to this."""
    crash_at_s: float | None = None
    """Its process dies then. A restarted one is healthy."""
    duplicate_share: float = 0.0
    """Share of replies that are delivered a second time, later."""
    delay_s: float = 0.0
    """Each reply is delayed by a random time of its own up to this, so that their order changes."""
    refuse_share: float = 0.0
    """Share of requests that fail with an error of their own."""
    lost_bucket_share: float = 0.0
    """Share of weight buckets that do not arrive: the digest differs."""

    @property
    def lets_replies_through_in_order(self) -> bool:
        """Whether no reply is delayed, duplicated or lost."""
        starts = (self.silent_from_s, self.frozen_from_s, self.half_open_from_s)
        loses = any(start is not None for start in starts)
        return not (self.duplicate_share or self.delay_s or loses)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModel:
    """How samples are scored."""

    seconds: float = 0.1
    """Of one sample; each takes between half and one and a half times as long."""
    flat_share: float = 0.0
    """Share of prompts whose samples all score the same: a filter drops their groups."""
    outage_from_s: float | None = None
    outage_for_s: float = 0.0
    """During an outage every score is a ConnectionError."""
    hang_share: float = 0.0
    """Share of samples whose first scoring never answers."""
    broken_share: float = 0.0
    """Share of prompts whose scoring is a permanent outage: their groups are quarantined."""
    slow_share: float = 0.0
    slow_factor: float = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolModel:
    """A tool that turns of the policy may call."""

    share: float = 0.5
    """Of turns whose last token is a call."""
    max_turns: int = 3
    answer_tokens: float = 3.0
    """Mean length of an answer."""
    seconds: float = 0.5
    """Of a call; each takes between half and one and a half times as long."""
    fails_share: float = 0.1
    hangs_share: float = 0.0
    timeout_s: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldModel:
    """The worlds of an agentic run, and the limits of their trajectories."""

    moves: int = 3
    """Most moves of a world."""
    fewest_moves: int = 1
    """Fewest moves of a world."""
    seconds: float = 1.0
    """Mean duration of a reset and of a step."""
    sigma: float = 0.0
    """Standard deviation of the logarithm of that duration."""
    hang_share: float = 0.0
    """Of worlds: one of their steps never returns."""
    crash_share: float = 0.0
    ungraded_share: float = 0.0
    """Of worlds: they cannot be judged at their end."""
    timeout_s: float = 600.0
    """Of a step."""
    blocking: bool = False
    """Steps run in worker processes; a crash ends all worlds of its process."""
    per_worker: int = 4
    broken_share: float = 0.0
    """Of worker processes: they do not start."""
    redundancy: int = 0
    retries: int = 2
    max_worlds: int = 0
    """At the same time, 0 = without limit."""
    max_concurrent: int = 0
    """The same, of their tag."""
    max_turns: int = 6
    max_context: int = 1000
    max_seconds: float = float("inf")
    windowed: bool = False
    """Each turn is a text of its own (manager step)."""
    strips: bool = False
    """The template leaves earlier turns out: each turn begins a branch."""
    lock_step: bool = False
    """No world goes on before all have ended their step: what asynchronous worlds are compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessModel:
    """The generating side in a process of its own (`cluster/roles/rollout_process.py`)."""

    way_s: float = 0.0
    """Latency of every call and every answer: random, up to this."""
    dies_at_s: float | None = None
    """Time of its death, with queue, ledger and engines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainModel:
    """How long a step and a weight push take, and what fails."""

    step_s: float = 1.0
    """Of every step, whatever is in it."""
    token_s: float = 0.0
    """More, per trained token."""
    jitter: float = 0.0
    """Each step takes between 1 and 1 + jitter times as long."""
    transfer_s: float = 0.0
    """Of a weight push, while engines generate."""
    swap_s: float = 0.0
    """Of its commit, while they stand still."""
    num_buckets: int = 2
    save_s: float = 0.0
    fails_at_step: int | None = None
    """The trainer dies in this step."""
    hangs_at_step: int | None = None
    """The trainer never answers in this step, nor afterwards."""
    rpc_timeout_s: float = 3600.0
    """Deadline of a call to the trainer (fault.rpc_timeout)."""
