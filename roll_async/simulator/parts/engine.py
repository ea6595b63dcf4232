"""A fake engine: `inference/engine.py: Engine` without a model.

Requests that run share the decoder. `_work` is how many tokens each of them has been given since the start; a request
that joined at work w and needs n tokens ends when the work reaches w + n, so an event costs O(log running) and nothing
happens per token.

The token at position p of the whole text says p, so what was lost, doubled or cut when a request was continued
elsewhere shows in its ids; its log-prob says with which weights it was really sampled, for which answer and where
(`text.py`).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roll_async.inference.protocol import EngineCapabilities, EngineLoad, KVCache, PauseMode
from roll_async.schema import Completion, FinishReason, GenerateRequest, WeightVersion, cut_runs, merge_runs
from roll_async.simulator.parts.models import EngineFaults, SpeedModel, uniform
from roll_async.simulator.parts.text import ScriptedTurn, decode, logprobs_of
from roll_async.weight_sync.bucket import Bucket, UpdatePlan

_ROUNDING = 1e-6
"""Tokens: work is a sum of products of floats."""


def bucket_names(version: WeightVersion, count: int) -> list[str]:
    """Where the buckets of an update are: version, index and how many there are."""
    return [f"{version}/{i}/{count}" for i in range(count)]


def digest_of(version: WeightVersion, buckets: Sequence[str]) -> str:
    """Of a whole update."""
    return f"{version}:" + ",".join(buckets)


class Samples(Protocol):
    """What an engine would sample."""

    def turn(self, name: str, prompt: Sequence[int], stops: Sequence[str]) -> ScriptedTurn: ...


@dataclass(eq=False, slots=True)
class _SimulatedRequest:
    request: GenerateRequest
    turn: ScriptedTurn
    result: asyncio.Future[Completion]
    num_tokens: int
    """This attempt will generate, to its natural end."""
    reason: FinishReason
    submitted_s: float
    joined_work: float = 0.0
    """The work at which its first token of this attempt began, or would have without preemptions."""
    order: int = 0
    runs: list[tuple[WeightVersion, int]] = field(default_factory=list)
    """Label and tokens up to the last change of weights."""
    real_runs: list[tuple[WeightVersion, int]] = field(default_factory=list)
    counted: int = 0

    @property
    def ends_at_work(self) -> float:
        return self.joined_work + self.num_tokens

    @property
    def kv_at_no_work(self) -> float:
        """Tokens that it holds in the KV cache, less the work done so far."""
        return len(self.request.prompt_token_ids) - self.joined_work

    def __lt__(self, other: _SimulatedRequest) -> bool:  # heapq compares requests that end at the same work
        return self.order < other.order


class SimEngine:
    """One replica on the virtual clock. Whose answers are how long is decided by the request's name."""

    def __init__(
        self, name: str, seed: int, texts: Samples, speed: SpeedModel, *, slots: int, faults: EngineFaults
    ) -> None:
        self.name = name
        self._seed, self._texts, self._speed, self._slots, self._faults = seed, texts, speed, slots, faults
        self.tells_progress = True
        """False: no progress reports. A world in which nothing dies does not need them, and runs faster."""
        self.version: WeightVersion | None = None
        self.content: WeightVersion | None = None
        """Weights it really holds; -1 when they are a mixture."""
        self._arrived: tuple[WeightVersion, list[str]] | None = None
        self._running: dict[str, _SimulatedRequest] = {}
        self._waiting: dict[str, _SimulatedRequest] = {}
        self._ends: list[tuple[float, _SimulatedRequest]] = []
        self._work = self._work_at_s = 0.0
        self._order = 0
        self._kv_at_no_work = 0.0
        """Tokens that the running requests hold in the KV cache, less the work done so far for each."""
        self._prefill_s = 0.0
        """Seconds that prompts must be read for before the decoder goes on, where the KV cache has a limit."""
        self.preemptions = 0
        self._timer: asyncio.TimerHandle | None = None
        self.paused = True
        self.busy_s = 0.0
        """Integral of running requests over time."""
        self.generated_tokens = 0
        self._dead: str | None = None
        self._pushes = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(keep_in_place=True)

    def busy_until_now_s(self) -> float:
        """Integral of running requests over time, in request-seconds."""
        self._advance()
        return self.busy_s

    @property
    def request_ids(self) -> list[str]:
        """What it has: running requests, then waiting ones."""
        return [*self._running, *self._waiting]

    @property
    def num_running(self) -> int:
        """Requests that get tokens, or would if the engine were not paused."""
        return len(self._running)

    async def start(self) -> None:
        """Nothing to load; it generates after the first commit."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """One request to its end or abort."""
        self._check_alive()
        if uniform(self._seed, "refuse", self.name, request.request_id) < self._faults.refuse_share:
            raise ValueError(f"{self.name} refuses {request.request_id}")
        loop = asyncio.get_running_loop()
        base, _, _ = request.request_id.partition("#")
        prompt, limit = request.prompt_token_ids, request.sampling.max_new_tokens
        turn = self._texts.turn(base, prompt, request.sampling.stop_strings)
        wanted, reason = turn.end - len(prompt), FinishReason.STOP
        # A stop string that began in the prompt is not seen: an engine looks at what it samples itself.
        unseen = turn.stops and turn.stop_begins < len(prompt)
        if unseen or wanted > limit:
            wanted, reason = limit, FinishReason.LENGTH
        running = _SimulatedRequest(request, turn, loop.create_future(), max(1, wanted), reason, loop.time())
        self._waiting[request.request_id] = running
        self._advance()
        self._fill()
        return await running.result

    def progress(self, request_id: str, start: int) -> Completion | None:
        """The token that ends a request comes with its end."""
        running = self._running.get(request_id) if self.tells_progress else None
        if running is None:
            return None
        self._advance()
        self._count(running)
        end = min(running.counted, running.num_tokens - 1)
        return self._part(running, start, end, FinishReason.ABORT) if end > start else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `text.py`."""
        return decode(token_ids)

    def tokens_so_far(self) -> list[tuple[GenerateRequest, int]]:
        """Requests that run, and the tokens this engine has sampled for each."""
        self._advance()
        for running in self._running.values():
            self._count(running)
        return [(running.request, running.counted) for running in self._running.values()]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these; unknown ids are ignored."""
        self._check_alive()
        self._advance()
        for request_id in request_ids:
            self._cut(request_id)
        self._fill()

    def _cut(self, request_id: str) -> None:
        running = self._waiting.pop(request_id, None)
        if running is None and request_id in self._running:
            running = self._leave(request_id)
        if running is not None:
            self._finish(running, FinishReason.ABORT)

    def _leave(self, request_id: str) -> _SimulatedRequest:
        running = self._running.pop(request_id)
        self._kv_at_no_work -= running.kv_at_no_work
        return running

    async def pause(self, mode: PauseMode) -> None:
        """No token is sampled from now on."""
        self._check_alive()
        self._advance()
        self.paused = True
        if mode is PauseMode.ABORT:
            for request_id in [*self._running, *self._waiting]:  # a copy: `_cut` takes them out
                self._cut(request_id)
        self._set_timer()

    async def resume(self) -> None:
        self._check_alive()
        if self.version is None:
            raise RuntimeError(f"{self.name} has no weights to resume with")
        self._advance()
        self.paused = False
        self._fill()

    async def begin_update(self, plan: UpdatePlan) -> None:
        self._check_alive()
        self._pushes += 1
        self._arrived = (plan.version, [])

    async def load_bucket(self, bucket: Bucket) -> None:
        self._check_alive()
        assert self._arrived is not None, "load_bucket before begin_update"
        # With the number of the push: another attempt loses other buckets.
        if uniform(self._seed, "bucket", self.name, self._pushes, bucket.index) >= self._faults.lost_bucket_share:
            self._arrived[1].append(bucket.blocks[0].location)

    async def finish_update(self) -> str:
        self._check_alive()
        assert self._arrived is not None, "finish_update before begin_update"
        return digest_of(*self._arrived)

    async def commit(self, version: WeightVersion) -> None:
        """Swap: tokens sampled from now on carry the version. What was lost on the way makes the weights a mixture."""
        self._check_alive()
        if not self.paused or self._arrived is None or self._arrived[0] != version:
            raise RuntimeError(f"{self.name}: commit of {version} while paused={self.paused}, holds {self._arrived}")
        self._advance()
        for running in self._running.values():
            self._count(running)  # before the swap: the old weights have sampled these
        arrived = self._arrived[1]
        whole = bool(arrived) and arrived == bucket_names(version, int(arrived[0].rpartition("/")[2]))
        self.content = version if whole else -1
        self.version, self._arrived = version, None

    def load(self) -> EngineLoad:
        """Running and waiting requests; a full engine has no free cache."""
        running, waiting, total = len(self._running), len(self._waiting), self._speed.kv_tokens
        if total is None:
            free = max(0, self._slots - running) / self._slots
            return EngineLoad(running=running, waiting=waiting, free_kv_fraction=free)
        self._advance()
        kv = KVCache(
            total_tokens=total, free_tokens=max(0, total - round(self._kv_used())), preemptions=self.preemptions
        )
        return EngineLoad(running=running, waiting=waiting, free_kv_fraction=kv.free_tokens / total, kv=kv)

    async def close(self) -> None:
        self.die("closed")

    def die(self, reason: str) -> None:
        """As if its process were killed: every call and every running request fails."""
        self._dead = reason
        self._advance()
        for running in [*self._running.values(), *self._waiting.values()]:
            if not running.result.done():
                running.result.set_exception(ConnectionError(f"{self.name}: {reason}"))
        self._running, self._waiting, self._ends = {}, {}, []
        self._kv_at_no_work = 0.0
        self._set_timer()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise ConnectionError(f"{self.name}: {self._dead}")

    # The decoder

    def _token_s(self) -> float:
        return self._faults.slow_factor * self._speed.seconds_per_token(len(self._running))

    def _advance(self) -> None:
        """Give the running requests the tokens of the time that has passed."""
        now = asyncio.get_running_loop().time()
        hung_s = self._faults.hung_from_s
        passed = (now if hung_s is None else min(now, hung_s)) - self._work_at_s
        self._work_at_s = now
        if not self.paused and self._running and passed > 0:
            self.busy_s += passed * len(self._running)
            read_s = min(passed, self._prefill_s)  # reading prompts holds up the decoder
            self._prefill_s -= read_s
            self._work += (passed - read_s) / self._token_s()

    def _fill(self) -> None:
        """Waiting requests take free places, oldest first. While it is paused they wait."""
        self._preempt()
        while not self.paused and self._waiting and len(self._running) < self._slots:
            running = next(iter(self._waiting.values()))  # the oldest: a dict keeps its order
            num_tokens = len(running.request.prompt_token_ids) + running.counted
            if not self._has_kv(num_tokens):
                break
            del self._waiting[running.request.request_id]
            if self._speed.kv_tokens is None:
                prefill = num_tokens * self._speed.prefill_token_s / self._speed.token_s  # in tokens of work
            else:
                prefill = 0.0
                self._prefill_s += num_tokens * self._speed.prefill_token_s * self._faults.slow_factor
            running.joined_work = self._work + prefill - running.counted
            running.order = self._order = self._order + 1
            self._running[running.request.request_id] = running
            self._kv_at_no_work += running.kv_at_no_work
            heapq.heappush(self._ends, (running.ends_at_work, running))
        self._set_timer()

    # Its KV cache

    def _kv_used(self) -> float:
        """Tokens that running requests hold."""
        return self._kv_at_no_work + len(self._running) * self._work

    def _has_kv(self, num_tokens: int) -> bool:
        """A request of so many tokens fits beside those that run, and each of them has room for a token more."""
        total, running = self._speed.kv_tokens, len(self._running)
        return total is None or not running or self._kv_used() + num_tokens + running + 1 <= total

    def _preempt(self) -> None:
        """The youngest give up their KV cache until each of the others has room for its next token."""
        total = self._speed.kv_tokens
        # The last one stays: one request runs, however long it is.
        while total is not None and len(self._running) > 1 and self._kv_used() + len(self._running) > total + _ROUNDING:
            running = self._leave(next(reversed(self._running)))  # the youngest: a dict keeps its order
            self._count(running)
            running.order = 0  # it gets no token until it runs again
            self.preemptions += 1
            self._waiting = {running.request.request_id: running, **self._waiting}  # in front: it is the next to run

    def _work_to_full_kv(self) -> float:
        """Tokens that each running request may have before one is preempted."""
        total, running = self._speed.kv_tokens, len(self._running)
        if total is None or running < 2:
            return float("inf")
        # A little beyond, so that `_preempt` finds it full.
        return (total - self._kv_used()) / running - 1 + 2 * _ROUNDING

    def _set_timer(self) -> None:
        """One timer: when the next running request ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and not self._is_end(*self._ends[0]):
            heapq.heappop(self._ends)
        hung_s = self._faults.hung_from_s
        hung = hung_s is not None and asyncio.get_running_loop().time() >= hung_s
        if self._ends and not self.paused and not hung:
            left = max(0.0, min(self._ends[0][0] - self._work, self._work_to_full_kv()))
            left_s = self._prefill_s + left * self._token_s()
            self._timer = asyncio.get_running_loop().call_later(left_s, self._end_due)

    def _is_end(self, work: float, running: _SimulatedRequest) -> bool:
        """Whether the request runs and ends then: it may have ended before, or was preempted since."""
        return self._running.get(running.request.request_id) is running and work == running.ends_at_work

    def _end_due(self) -> None:
        self._timer = None
        self._advance()
        while self._ends and self._ends[0][0] <= self._work + _ROUNDING:
            work, running = heapq.heappop(self._ends)
            if self._is_end(work, running):
                self._finish(self._leave(running.request.request_id), running.reason)
        self._fill()

    def _count(self, running: _SimulatedRequest) -> None:
        """Book the tokens since the last change of weights under the present ones."""
        assert self.version is not None and self.content is not None
        done = min(running.num_tokens, max(0, int(self._work - running.joined_work + _ROUNDING)))
        new = done - running.counted
        if new > 0:
            running.runs.append((self.version, new))
            running.real_runs.append((self.content, new))
            running.counted = done

    def _finish(self, running: _SimulatedRequest, reason: FinishReason) -> None:
        if running.order:  # 0: it has not run since its last count
            self._count(running)
            # Aborted after its last token, it has ended by itself.
            if reason is FinishReason.ABORT and running.counted == running.num_tokens:
                reason = running.reason
        self.generated_tokens += running.counted
        if running.result.done():
            return
        running.result.set_result(self._part(running, 0, running.counted, reason))

    def _part(self, running: _SimulatedRequest, start: int, end: int, reason: FinishReason) -> Completion:
        """Its tokens from `start` to `end`."""
        name, first = running.request.request_id, len(running.request.prompt_token_ids)
        # Without attempt and turn: log-probs name the answer.
        sample = name.partition("#")[0].partition("+")[0]
        return Completion(
            request_id=name,
            token_ids=running.turn.tokens(first + start, first + end),
            logprobs=logprobs_of(sample, first + start, cut_runs(tuple(running.real_runs), start, end)),
            version_runs=merge_runs(cut_runs(tuple(running.runs), start, end)),
            finish_reason=reason,
            generation_s=asyncio.get_running_loop().time() - running.submitted_s,
        )
