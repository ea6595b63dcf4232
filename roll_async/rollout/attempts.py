"""One attempt of a request on one replica, from the queue to its end: the only owner of where it is and why it ended.

    QUEUED --> OUTBOX --> ON_WIRE --> RUNNING --> ANSWERED | ABORTED | LOST

Every change of state goes through `Attempt.to`, which checks it against the table. A report about an attempt that has
ended is late: it is counted and changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from roll_async.inference.protocol import Progress
from roll_async.schema import Completion, FinishReason, WeightVersion, merge_runs

if TYPE_CHECKING:
    from roll_async.rollout.dispatch.replica_link import ReplicaLink
    from roll_async.rollout.dispatch.requests import PendingRequest


class AttemptState(Enum):
    """Where an attempt is."""

    # Of the object, as `==` is: that of Enum is a call of Python per look into the table below, ten for a request.
    __hash__ = object.__hash__

    QUEUED = "queued"  # no replica has it
    OUTBOX = "outbox"  # a replica is chosen; its submit call has not begun
    ON_WIRE = "on the wire"  # the submit call is under way: the replica may or may not have it
    RUNNING = "running"  # the replica has acknowledged it
    ANSWERED = "answered"  # ended by itself: a completion, or a failure that the replica reported
    ABORTED = "aborted"  # ended on request, with the tokens so far
    LOST = "lost"  # given up: its replica died, was unresponsive, or did not end it in time


TRANSITIONS: Mapping[AttemptState, frozenset[AttemptState]] = {
    AttemptState.QUEUED: frozenset(  # answered: an earlier attempt has used up the token budget
        {AttemptState.OUTBOX, AttemptState.ANSWERED, AttemptState.ABORTED, AttemptState.LOST}
    ),
    AttemptState.OUTBOX: frozenset({AttemptState.ON_WIRE, AttemptState.ABORTED, AttemptState.LOST}),
    AttemptState.ON_WIRE: frozenset(  # an answer may overtake the acknowledgement
        {AttemptState.RUNNING, AttemptState.ANSWERED, AttemptState.ABORTED, AttemptState.LOST}
    ),
    AttemptState.RUNNING: frozenset({AttemptState.ANSWERED, AttemptState.ABORTED, AttemptState.LOST}),
    AttemptState.ANSWERED: frozenset(),
    AttemptState.ABORTED: frozenset(),
    AttemptState.LOST: frozenset(),
}


class Stop(Enum):
    """Why an attempt was asked to end. It decides what an ABORT means for the request and for the replica."""

    CALLER = "caller"  # the caller has aborted the request
    ASIDE = "aside"  # weights or validation come first: the request goes on later
    TIMEOUT = "timeout"  # it took longer than generation_timeout: a failure of its replica


@dataclass(slots=True)
class Received:
    """What an attempt has reported before its end: one piece that grows."""

    token_ids: array = field(default_factory=lambda: array("i"))
    logprobs: array = field(default_factory=lambda: array("f"))
    runs: list[tuple[WeightVersion, int]] = field(default_factory=list)
    generation_s: float = 0.0

    def add(self, progress: Progress) -> bool:
        """The next tokens. A report that does not begin where the last one ended is of no use (False): one was lost, or
        this one came twice.
        """
        if progress.start != len(self.token_ids):
            return False
        self.token_ids += progress.piece.token_ids
        self.logprobs += progress.piece.logprobs
        self.runs += progress.piece.version_runs
        self.generation_s = progress.piece.generation_s
        return bool(progress.piece.token_ids)  # a report without tokens clears no suspicion of its replica


@dataclass(eq=False, slots=True)
class Attempt:
    """One attempt. Each has an id of its own, so a late reply of an earlier attempt is never taken for it."""

    request: PendingRequest
    wire_id: str
    state: AttemptState = AttemptState.QUEUED
    link: ReplicaLink | None = None
    """Its replica, from OUTBOX on."""
    dispatched_s: float = 0.0
    acknowledged_s: float = 0.0
    """Since when it is RUNNING; loop time."""
    stop: Stop | None = None
    unknown: int = 0
    """Heartbeats in a row in which its replica did not list it among the requests that it holds."""
    received: Received | None = None

    def to(self, state: AttemptState) -> None:
        """The only way to change the state."""
        assert state in TRANSITIONS[self.state], f"{self.wire_id}: {self.state.value} cannot become {state.value}"
        self.state = state

    @property
    def ended(self) -> bool:
        """Nothing more is expected of it."""
        return not TRANSITIONS[self.state]

    @property
    def num_received(self) -> int:
        """Tokens that it reported before its end."""
        return 0 if self.received is None else len(self.received.token_ids)

    def receive(self, progress: Progress) -> bool:
        """Tokens of an attempt that goes on. True: they are new."""
        if self.received is None:
            self.received = Received()
        return self.received.add(progress)

    def received_piece(self) -> Completion | None:
        """The tokens it reported, for an attempt whose final reply will not come; None without tokens."""
        found = self.received
        if found is None or not found.token_ids:
            return None
        return Completion(
            request_id=self.wire_id,
            token_ids=found.token_ids,
            logprobs=found.logprobs,
            version_runs=merge_runs(found.runs),
            finish_reason=FinishReason.ABORT,
            generation_s=found.generation_s,
        )
