"""Turns of one trajectory within its limits, each answered once, whoever answers them.

    request --known key? the first reply--> limits --> `_sample_turn` of the sub-class --> reply

`agents/session.py` answers with the engines of a run or of `serve-policy`, `agents/processes/remote.py` with a remote
API.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial

from roll_async.agents.messages import TurnReply, TurnRequest
from roll_async.schema import Outcome

_REMEMBERED_REPLIES = 64
_REMEMBERED_CHARACTERS = 4 << 20
"""Of all remembered replies of a trajectory; the newest is remembered whatever its length."""


class TrajectoryEnded(Exception):
    """A limit ended the trajectory, or its owner did: nothing more is sampled for it."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class BadRequest(ValueError):
    """The request cannot be served as it is; the trajectory goes on."""


class TurnHandler(ABC):
    """The policy as one trajectory sees it. Requests may overlap."""

    takes_sampling = True
    """Temperature, top_p, top_k and stop strings of a request count."""

    def __init__(self, name: str, *, max_turns: int, max_seconds: float) -> None:
        self.name, self._max_turns, self._max_seconds = name, max_turns, max_seconds
        self.ended: TrajectoryEnded | None = None
        self.on_activity: Callable[[bool], None] | None = None
        """Called when a turn begins or ends, with whether one is running."""
        self._replies: dict[str, TurnReply] = {}
        self._running: dict[asyncio.Future[TurnReply], str | None] = {}
        """With the keys of their requests."""
        self._awaited: dict[str, asyncio.Future[TurnReply]] = {}
        """The newest of them by key."""
        self._failed: Counter[str] = Counter()
        """Number of turns that failed and were not asked for again, by key."""
        self._num_turns = 0
        self._started_s: float | None = None

    @abstractmethod
    async def _sample_turn(self, request: TurnRequest, started_s: float) -> TurnReply:
        """Answer one request that no limit forbids. Raises BadRequest for one that is not counted."""

    async def count_tokens(self, request: TurnRequest) -> int:
        """Tokens of the prompt that a turn would have. Raises as `turn` does."""
        raise BadRequest("count_tokens: the model's tokenizer is not here")

    @property
    def num_turns(self) -> int:
        """Number of requested turns, without those that failed."""
        return self._num_turns

    async def turn(self, request: TurnRequest, key: str | None = None, replay: bool = True) -> TurnReply:
        """One turn of the policy. With `replay`, a `key` that came before gets the same reply, whether that is there or
        on its way.

        Raises TrajectoryEnded when a limit is reached, BadRequest for a request that cannot be served, and what the
        policy raises.
        """
        running = None
        if key is not None and replay:
            if self._failed[key]:
                # A reply that is there, or on its way, is of a request that ran beside the one that comes again.
                self._failed -= Counter((key,))
            elif key in self._replies:
                return self._replies[key]
            else:
                running = self._awaited.get(key)
        elif key is not None and key not in self._running.values():
            self._failed.pop(key, None)  # a new request, beside no other: nobody asked again for those before it
        # A turn that failed has no reply to repeat: it is sampled anew.
        if running is None or running.done():
            running = asyncio.ensure_future(self._limited(request))
            self._running[running] = key
            if key is not None:
                # A retry must get the reply of this turn, not of an older one with the same key.
                self._replies.pop(key, None)
                self._awaited[key] = running
            running.add_done_callback(partial(self._ended, key))
            self._active()
        try:
            # A client that disconnects may repeat the request, and then gets this reply.
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # `end` cancelled the turn, and nobody this caller.
            if running.cancelled() and self.ended is not None:
                raise self._end_error() from None
            raise

    def _ended(self, key: str | None, turn: asyncio.Future[TurnReply]) -> None:
        self._running.pop(turn, None)
        # A newer turn may have the same key.
        if key is not None and self._awaited.get(key) is turn:
            del self._awaited[key]
        if not turn.cancelled() and key is not None:
            error = turn.exception()
            if error is None:
                self._replies[key] = turn.result()
                self._forget_old()
            elif not isinstance(error, BadRequest | TrajectoryEnded):
                self._failed[key] += 1
        self._active()

    def _forget_old(self) -> None:
        size = sum(len(reply.text) for reply in self._replies.values())
        while len(self._replies) > _REMEMBERED_REPLIES or (size > _REMEMBERED_CHARACTERS and len(self._replies) > 1):
            size -= len(self._replies.pop(next(iter(self._replies))).text)

    def _active(self) -> None:
        if self.on_activity is not None:
            self.on_activity(bool(self._running))

    def stop(self, outcome: Outcome, reason: str) -> None:
        """Refuse further turns; running ones continue."""
        if self.ended is None:
            self.ended = TrajectoryEnded(outcome, reason)

    def end(self, outcome: Outcome, reason: str) -> None:
        """Refuse further turns and cancel running ones."""
        self.stop(outcome, reason)
        # Callbacks run later in the loop, so that the dict stays as it is meanwhile.
        for running in self._running:
            running.cancel()

    async def _limited(self, request: TurnRequest) -> TurnReply:
        loop = asyncio.get_running_loop()
        if self.ended is not None:
            raise self._end_error()
        if self._started_s is None:
            self._started_s = loop.time()
        if self._num_turns >= self._max_turns:
            raise self._end_with(Outcome.TRUNCATED_TURNS, f"the limit of {self._max_turns} turns is reached")
        # Before anything is awaited: turns that overlap must not pass the limit together.
        self._num_turns += 1
        try:
            # One deadline for all turns, counted from the first.
            async with asyncio.timeout_at(self._started_s + self._max_seconds) as limit:
                return await self._sample_turn(request, loop.time())
        except TimeoutError:
            if not limit.expired():  # a time-out of something inside
                raise
            raise self._end_with(Outcome.TRUNCATED_TIME, f"the limit of {self._max_seconds:g} s is reached") from None
        except (BadRequest, RuntimeError, OSError):  # of the client and of the engines: no turn of the model
            self._num_turns -= 1
            raise

    def _end_with(self, outcome: Outcome, reason: str) -> TrajectoryEnded:
        self.stop(outcome, reason)
        return self._end_error()

    def _end_error(self) -> TrajectoryEnded:
        assert self.ended is not None
        # A new one: an exception raised twice keeps the frames of the first time.
        return TrajectoryEnded(self.ended.outcome, str(self.ended))
