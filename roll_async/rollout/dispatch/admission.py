"""How many requests a replica may run: as many as its KV cache will hold to their ends, by the lengths seen so far.

    forecast    for every running request the tokens that it holds now and may hold later: answers end as those before
                ended (`LengthSurvival`), and until then each holds one token more per step
    room        new requests are admitted while the expected peak of the sum stays below `target` of the cache
    feedback    for every generation of answers `target` falls by a factor after many preemptions, and rises by a step
                after few while requests wait (additive increase, multiplicative decrease)
    caps        never more than `max_concurrent_per_server` requests, and never less than one

A replica whose engine does not tell of its KV cache has the cap alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, log2

from roll_async.inference.protocol import KVCache
from roll_async.rollout.attempts import Attempt
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.dispatch.replica_link import ReplicaLink
from roll_async.rollout.dispatch.requests import PendingRequest
from roll_async.rollout.dispatch.waiting import WaitingRequests

_PER_OCTAVE = 8
"""Buckets of lengths per factor of 2: each is 9 % wide."""
_REMEMBERED = 128.0
"""Answers after which the weight of an older one has fallen to 1/e: lengths change during training."""
_PRIOR_WEIGHT = 2.0
"""Answers that the prior is worth: exponential lengths, of which one in three reaches the longest allowed."""
_STEPS = 24
"""Points of time, between now and the longest end, at which the forecast is looked at."""
_HORIZON = 0.6
"""Mean answers that the forecast looks ahead. Looking on to the longest one would keep the cache half empty for a peak
that a cheap preemption of the youngest avoids as well.
"""
FIRST_TARGET, LOWEST_TARGET, HIGHEST_TARGET = 0.88, 0.7, 0.92
_RISE, _FALL = 0.005, 0.95
_TOLERATED = 0.5
"""Preemptions per answer that cost less than the free cache that avoids them: the youngest has few tokens to read."""
_RECENT = 32
"""Requests that the mean length of prompts is over."""
INTERVAL_S = 1.0
"""Between two forecasts of a replica."""


class LengthSurvival:
    """Survival function of answer lengths, from ended answers and those that still run (Kaplan and Meier, Journal of
    the American Statistical Association 53, 1958). Without the running ones it would know the short answers only.
    """

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        """Weight of answers that ended in each bucket."""
        self._now = 1.0
        """Weight of the next one: it grows, which is cheaper than to let all others shrink."""

    def add(self, num_tokens: int) -> None:
        """An answer has ended at this length."""
        bucket = _bucket(num_tokens)
        self._ends[bucket] = self._ends.get(bucket, 0.0) + self._now
        self._now *= 1 + 1 / _REMEMBERED  # by a factor of e in _REMEMBERED answers
        if self._now > 1e9:  # else it would grow until it is infinite
            self._ends = {k: weight / self._now for k, weight in self._ends.items()}
            self._now = 1.0

    def survival(self, running: Iterable[int], longest: int) -> list[float]:
        """Share of answers longer than the first token of each bucket, up to the one of `longest`, where all end.
        `running`: lengths of answers that go on.
        """
        last = _bucket(longest)
        risk = [0.0] * (last + 2)  # first those that leave in each bucket, then those that reach it
        ends = [0.0] * (last + 2)
        for bucket, weight in self._ends.items():
            ends[min(bucket, last)] += weight / self._now  # longer ones of before end where answers must end now
            risk[min(bucket, last)] += weight / self._now
        for num_tokens in running:
            risk[min(_bucket(num_tokens), last)] += 1.0
        for bucket in range(last, -1, -1):
            risk[bucket] += risk[bucket + 1]
        alive, shares = 1.0, []
        for bucket in range(last + 1):
            shares.append(alive)
            width = _first(bucket + 1) - _first(bucket)
            prior = 1 - exp(-width / max(1, longest))  # lengths with the mean `longest`: 1 / e of them reach it
            alive *= 1 - (ends[bucket] + _PRIOR_WEIGHT * prior) / (risk[bucket] + _PRIOR_WEIGHT)
        shares.append(0.0)
        return shares


@dataclass(slots=True)
class RunningRequest:
    """What the forecast knows of a request on a replica."""

    prompt_tokens: int
    answer_tokens: int
    """So far, over all of its attempts."""
    max_tokens: int
    """Of the whole answer."""


class ReplicaAdmission:
    """The limit of one replica."""

    def __init__(self, cap: int, book: LengthSurvival) -> None:
        self._cap, self._book = cap, book
        self.target = FIRST_TARGET
        """Share of the KV cache that the expected peak may reach."""
        self.limit = float(cap)
        self.known = False
        """A forecast was made."""
        self._preemptions: int | None = None
        self._num_ended = 0
        """Answers that ended there since the target was adapted."""
        self.due_s = float("-inf")
        """When the next forecast is due."""
        self._critical = 0.0
        """Tokens from now at which the forecast is highest, compared with what a new request adds to it."""
        self._share = 1.0
        """Of a prompt, what is not in the cache once for many requests."""
        self._prompt = 0.0
        """Tokens that the average new request begins with, of its own."""

    @property
    def slots(self) -> int:
        """Requests that may run there now."""
        return max(1, min(self._cap, int(self.limit))) if self.known else 1

    def sent(self, prompt_tokens: int, num_generated: int = 0) -> None:
        """A request goes there, with what its earlier attempts have generated. One that begins with more tokens of its
        own than most takes the room of several.
        """
        if self._prompt:
            # The - 1 below: a request of average size takes its own slot and changes nothing.
            own = self._share * prompt_tokens + num_generated
            self.limit -= (own + self._critical) / (self._prompt + self._critical) - 1

    def ended(self) -> None:
        """An answer has ended there."""
        self._num_ended += 1

    def forecast(
        self,
        kv: KVCache,
        running: list[RunningRequest],
        *,
        prompt_tokens: float,
        longest: int,
        all_run: bool,
        waits: bool,
        now_s: float,
    ) -> None:
        """Set the limit from what the replica reports. `prompt_tokens`: of the requests that come next, on average;
        `longest`: that an answer may be. `all_run`: none of its requests waits in the engine or is on its way there.
        `waits`: requests wait for room.
        """
        self.due_s = now_s + INTERVAL_S
        self._adapt(kv.preemptions, len(running), waits)
        known = sum(r.prompt_tokens + r.answer_tokens for r in running)
        # Cache in use that no report has told of yet, divided evenly among the requests.
        extra = max(0.0, (kv.used_tokens - known) / max(1, len(running)))
        if running:
            prompts = sum(r.prompt_tokens for r in running)
            least = min(1.0, max(0.0, 1 - (known - kv.used_tokens) / max(1, prompts)))
            # One that waits holds nothing, which looks like a prompt that is shared: the share may only rise then.
            self._share = least if all_run else max(self._share, least)
        answers = [min(r.max_tokens - 1, r.answer_tokens + int(extra)) for r in running]  # - 1: it still runs
        alive = self._book.survival(answers, longest)
        # Requests of one length bucket are forecast together: how many, their tokens now, their length.
        groups: dict[int, list[float]] = {}
        for request, answer in zip(running, answers, strict=True):
            group = groups.setdefault(_bucket(answer), [0.0, 0.0, 0.0])
            group[0] += 1
            group[1] += self._share * request.prompt_tokens + answer
            group[2] += answer
        parts = [(n, tokens, length / n, _share(alive, length / n)) for n, tokens, length in groups.values()]
        total, prompt = self.target * kv.total_tokens, max(1.0, self._share * prompt_tokens)
        room, critical = float("inf"), 0.0
        # The area under the survival function.
        mean = sum(a * (_first(b + 1) - _first(b)) for b, a in enumerate(alive[:-1]))
        for later in _later(longest):
            if later > _HORIZON * mean:
                break
            # Divided by `now`: the survival of answers that have reached their present length.
            held = sum((t + n * later) * _share(alive, length + later) / now for n, t, length, now in parts if now)
            new = (prompt + later) * _share(alive, later)
            if new > 0 and (total - held) / new < room:  # the tightest point of time decides
                room, critical = (total - held) / new, later
        self.limit, self._critical, self._prompt = len(running) + room, critical, prompt
        self.known = True

    def _adapt(self, preemptions: int, num_running: int, waits: bool) -> None:
        """Once for as many answers as run at a time: what was decided before shows only then. Nothing runs during a
        weight push, after which the same answers go on.
        """
        before = self._preemptions
        if before is None or preemptions < before:  # at first, and after a restart
            self._preemptions, self._num_ended = preemptions, 0
        elif num_running and self._num_ended >= num_running:
            if preemptions - before > _TOLERATED * self._num_ended:
                self.target = max(LOWEST_TARGET, self.target * _FALL)
            elif waits:
                self.target = min(HIGHEST_TARGET, self.target + _RISE)
            self._preemptions, self._num_ended = preemptions, 0


class FixedLimit:
    """`max_concurrent_per_server` requests per replica, whatever they hold. The hooks of a limit that learns do nothing
    here.
    """

    strict = False
    """Later turns of conversations keep to it, too. Else they wait in the engine, whose cache has their prefix."""

    def __init__(self, options: ManagerOptions) -> None:
        self._cap = options.max_concurrent_per_server

    def slots(self, link: ReplicaLink) -> int:
        """Requests that the replica may run, those of other clients among them."""
        return self._cap

    def sent(self, link: ReplicaLink, pending: PendingRequest) -> None:
        """A request is sent to the replica."""

    def ended(self, link: ReplicaLink, num_tokens: int) -> None:
        """An answer has ended there at this length."""

    def reported(self, link: ReplicaLink, waiting: WaitingRequests) -> None:
        """The replica has reported its load."""

    def begun(self, waiting: WaitingRequests) -> list[ReplicaLink]:
        """Set the first limit of replicas that have none, now that it is known what comes. Returns them."""
        return []

    def remove(self, link: ReplicaLink) -> None:
        """The replica is lost or leaves."""


class KvLimit(FixedLimit):
    """As many as the KV cache of the replica has room for, and never more than the fixed limit."""

    strict = True

    def __init__(self, options: ManagerOptions) -> None:
        super().__init__(options)
        self._book = LengthSurvival()
        self._replicas: dict[ReplicaLink, ReplicaAdmission] = {}
        self._prompt: float | None = None
        self._unknown: list[ReplicaLink] = []
        """Replicas that have told of their KV cache, and have no forecast yet: no request has come."""

    def slots(self, link: ReplicaLink) -> int:
        if link.load is not None and link.load.kv is None:  # its engine tells nothing of its cache
            return self._cap
        found = self._replicas.get(link)
        return 1 if found is None else found.slots  # None: it has not reported its load yet

    def sent(self, link: ReplicaLink, pending: PendingRequest) -> None:
        tokens = _prompt_of(pending)
        self._prompt = tokens if self._prompt is None else self._prompt + (tokens - self._prompt) / _RECENT
        if (found := self._replicas.get(link)) is not None:
            found.sent(len(pending.request.prompt_token_ids), pending.num_generated)

    def ended(self, link: ReplicaLink, num_tokens: int) -> None:
        self._book.add(num_tokens)
        if (found := self._replicas.get(link)) is not None:
            found.ended()

    def reported(self, link: ReplicaLink, waiting: WaitingRequests) -> None:
        if (load := link.load) is None or load.kv is None:
            return
        found = self._replicas.get(link)
        if found is None:
            found = self._replicas[link] = ReplicaAdmission(self._cap, self._book)
            self._unknown.append(link)
        now_s = asyncio.get_running_loop().time()
        following = waiting.first
        if now_s < found.due_s or (following is None and not link.in_flight):
            return
        running = [_running(attempt) for attempt in link.in_flight.values()]
        if following is not None and self._prompt is None:
            self._prompt = _prompt_of(following)
        limits = [following.request.sampling.max_new_tokens] if following is not None else []
        found.forecast(
            load.kv,
            running,
            prompt_tokens=self._prompt or 1.0,
            longest=max([*limits, *(r.max_tokens for r in running)]),
            all_run=not load.waiting and load.running >= len(running),
            waits=following is not None,
            now_s=now_s,
        )
        if link in self._unknown:
            self._unknown.remove(link)

    def begun(self, waiting: WaitingRequests) -> list[ReplicaLink]:
        found = list(self._unknown) if waiting.first is not None else []
        for link in found:
            self.reported(link, waiting)
        return found

    def remove(self, link: ReplicaLink) -> None:
        self._replicas.pop(link, None)
        if link in self._unknown:
            self._unknown.remove(link)


LIMITS: Mapping[str, type[FixedLimit]] = {"fixed": FixedLimit, "kv": KvLimit}
"""By `async_training.admission`."""


def _prompt_of(pending: PendingRequest) -> int:
    """Tokens that the request begins with, those of its earlier attempts among them."""
    return len(pending.request.prompt_token_ids) + pending.num_generated


def _running(attempt: Attempt) -> RunningRequest:
    pending = attempt.request
    return RunningRequest(
        prompt_tokens=len(pending.request.prompt_token_ids),
        answer_tokens=pending.num_generated + attempt.num_received,
        max_tokens=pending.request.sampling.max_new_tokens,
    )


def _bucket(num_tokens: float) -> int:
    return int(_PER_OCTAVE * log2(num_tokens + 1))


def _first(bucket: int) -> float:
    return 2 ** (bucket / _PER_OCTAVE) - 1


def _share(alive: list[float], num_tokens: float) -> float:
    """Share of answers longer than this, linear within a bucket."""
    place = _PER_OCTAVE * log2(num_tokens + 1)
    bucket = int(place)
    if bucket + 1 >= len(alive):
        return 0.0
    first, width = _first(bucket), _first(bucket + 1) - _first(bucket)
    return alive[bucket] + (num_tokens - first) / width * (alive[bucket + 1] - alive[bucket])


def _later(longest: int) -> list[float]:
    """Points of time, in tokens from now, denser near now."""
    return [0.0, *(longest * 2 ** (-step / 3) for step in range(_STEPS, 0, -1))]
