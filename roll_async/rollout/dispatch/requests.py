"""One request on its way through replicas: attempts, pieces, and how the pieces become one completion."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from roll_async.rollout.attempts import Attempt
from roll_async.schema import Completion, GenerateRequest, join_records, merge_runs

if TYPE_CHECKING:
    from roll_async.rollout.dispatch.replica_link import ReplicaLink


class GenerationFailed(RuntimeError):
    """A request failed on every replica that it was sent to."""


class Interrupted(Exception):
    """The request was discarded by a weight push (interrupt.mode abort); its prompt is generated again."""


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request that has not ended. It has one attempt at a time, in the queue or on a replica."""

    request: GenerateRequest
    result: asyncio.Future[Completion]
    affinity: str | None
    validation: bool
    """Of a validation, whose priority is not that of training."""
    order: int = 0
    """Order of arrival: of two requests of a priority the lower number is dispatched first, retries included."""
    conversation: str | None = None
    """Key of its conversation, all of whose requests go to the replica of the first."""
    later_turn: bool = False
    """Not the first request of its conversation."""
    asked_s: float = 0.0
    """When it was made."""
    pieces: list[Completion] = field(default_factory=list)
    num_attempts: int = 0
    attempt: Attempt = field(init=False)
    """The present one; gone when the caller has the result."""
    failures: int = 0
    failed_on: set[ReplicaLink] = field(default_factory=set)
    """Replicas that failed it. A replica that was restarted under the same name is not among them."""
    abort_wanted: bool = False

    def __post_init__(self) -> None:
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """The last attempt is over; the next one is queued."""
        self.num_attempts += 1
        self.attempt = Attempt(self, f"{self.request.request_id}#{self.num_attempts}")

    @property
    def num_generated(self) -> int:
        """Tokens of all pieces."""
        if not self.pieces:
            return 0
        return sum(len(p.token_ids) for p in self.pieces)

    def message(self, wire_id: str) -> GenerateRequest:
        """The request of an attempt: the prompt and the tokens so far, with what is left of the budget."""
        request = self.request
        prompt, sampling, recorded = request.prompt_token_ids, request.sampling, request.recorded_positions
        if self.pieces:
            left = sampling.max_new_tokens - self.num_generated
            sampling = replace(sampling, max_new_tokens=left)
        for piece in self.pieces:
            prompt = prompt + piece.token_ids
            if piece.experts is not None:  # of these positions: the record of the next attempt begins after them
                recorded += piece.experts.num_positions
        # Written out, as in `merged`: `replace` would take a tenth of all the time that a request costs here.
        return GenerateRequest(
            request_id=wire_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            recorded_positions=recorded,
            images=request.images,
        )

    def keep(self, piece: Completion | None) -> None:
        """Store what an attempt generated before it was stopped or lost."""
        if piece is not None and piece.token_ids:
            self.pieces.append(piece)

    def merged(self, last: Completion, replica: str = "") -> Completion:
        """All pieces and the last one, from `replica`, as one completion of the original request."""
        tokens, logprobs, runs = last.token_ids, last.logprobs, last.version_runs
        seconds, experts = last.generation_s, last.experts
        if self.pieces:
            parts = [*self.pieces, last]
            tokens, logprobs = array("i"), array("f")
            for part in parts:
                tokens += part.token_ids
                logprobs += part.logprobs
            runs = merge_runs([run for part in parts for run in part.version_runs])
            seconds = sum(part.generation_s for part in parts)
            experts = join_records(part.experts for part in parts)
        return Completion(
            request_id=self.request.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            version_runs=runs,
            finish_reason=last.finish_reason,
            generation_s=seconds,
            experts=experts,
            replica=replica,
        )
