"""One request on its way through replicas: attempts, pieces, and how the pieces become one completion."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field, replace

from roll_async.inference.protocol import Progress
from roll_async.schema import Completion, FinishReason, GenerateRequest, WeightVersion, join_records, merge_runs


class GenerationFailed(RuntimeError):
    """A request failed on every replica it was given to."""


class Interrupted(Exception):
    """The request was discarded by a weight push (interrupt.mode abort); its prompt is to be generated anew."""


@dataclass(slots=True)
class Received:
    """What the present attempt has reported before its end: one piece that grows."""

    token_ids: array = field(default_factory=lambda: array("i"))
    logprobs: array = field(default_factory=lambda: array("f"))
    runs: list[tuple[WeightVersion, int]] = field(default_factory=list)
    generation_s: float = 0.0

    def add(self, progress: Progress) -> None:
        """The next tokens. A report that does not begin where the last one ended is of no use: one was lost, or this
        one came twice.
        """
        if progress.start != len(self.token_ids):
            return
        self.token_ids += progress.piece.token_ids
        self.logprobs += progress.piece.logprobs
        self.runs += progress.piece.version_runs
        self.generation_s = progress.piece.generation_s


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request that has not ended. Every attempt has an id of its own, so a late reply of an earlier one is never
    taken for it.
    """

    request: GenerateRequest
    result: asyncio.Future[Completion]
    affinity: str | None
    foreground: bool
    conversation: str | None = None
    """Its requests belong to the replica that had the first of them."""
    later_turn: bool = False
    """Not the first request of its conversation."""
    pieces: list[Completion] = field(default_factory=list)
    received: Received | None = None
    """Of the present attempt; its own end brings these tokens again, and then they are not needed."""
    attempt: int = 0
    wire_id: str = ""
    """Id of the present attempt; none before the first."""
    failures: int = 0
    failed_on: str | None = None
    """Replica of the last failure: a silent one is always the least busy, and would get every retry."""
    server: str | None = None
    dispatched_s: float = 0.0
    abort_wanted: bool = False

    @property
    def num_generated(self) -> int:
        """Tokens of all pieces."""
        if not self.pieces:
            return 0
        return sum(len(p.token_ids) for p in self.pieces)

    def next_attempt(self) -> GenerateRequest:
        """The request to send now: the prompt and the tokens so far, with what is left of the budget."""
        self.attempt += 1
        self.received = None
        self.wire_id = f"{self.request.request_id}#{self.attempt}"
        prompt, sampling = self.request.prompt_token_ids, self.request.sampling
        if not self.pieces:
            return replace(self.request, request_id=self.wire_id)
        for piece in self.pieces:
            prompt = prompt + piece.token_ids
        left = sampling.max_new_tokens - self.num_generated
        recorded = sum(piece.experts.num_positions for piece in self.pieces if piece.experts is not None)
        return GenerateRequest(
            request_id=self.wire_id,
            prompt_token_ids=prompt,
            sampling=replace(sampling, max_new_tokens=left),
            recorded_positions=self.request.recorded_positions + recorded,
        )

    def keep(self, piece: Completion) -> None:
        """Remember what an interrupted attempt generated."""
        self.received = None
        if piece.token_ids:
            self.pieces.append(piece)

    def receive(self, progress: Progress) -> None:
        """Tokens of the present attempt, which goes on."""
        if self.received is None:
            self.received = Received()
        self.received.add(progress)

    def keep_received(self) -> int:
        """The present attempt is lost: remember what it reported. Returns the number of tokens."""
        if (found := self.received) is None:
            return 0
        piece = Completion(
            request_id=self.wire_id,
            token_ids=found.token_ids,
            logprobs=found.logprobs,
            version_runs=merge_runs(found.runs),
            finish_reason=FinishReason.ABORT,
            generation_s=found.generation_s,
        )
        self.keep(piece)
        return len(piece.token_ids)

    def merged(self, last: Completion) -> Completion:
        """All pieces and the last one as one completion of the original request."""
        if not self.pieces:
            return replace(last, request_id=self.request.request_id)
        parts = [*self.pieces, last]
        tokens, logprobs = array("i"), array("f")
        for part in parts:
            tokens += part.token_ids
            logprobs += part.logprobs
        runs = [run for part in parts for run in part.version_runs]
        return Completion(
            request_id=self.request.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            version_runs=merge_runs(runs),
            finish_reason=last.finish_reason,
            generation_s=sum(part.generation_s for part in parts),
            experts=join_records(part.experts for part in parts),
        )


def empty_completion(request_id: str, reason: FinishReason) -> Completion:
    """A request that ends without a new token."""
    return Completion(
        request_id=request_id,
        token_ids=array("i"),
        logprobs=array("f"),
        version_runs=(),
        finish_reason=reason,
        generation_s=0.0,
    )
