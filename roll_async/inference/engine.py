"""One engine replica, the same for every library: requests, pauses, updates of weights and sleep.

    request   OPEN --admitted--> RUNNING --> done          update    none --begin--> open --finish--> proved --commit-->
    engine    SERVING <--resume-- PAUSED <--pause          weights   whole, or a mixture that refuses `resume`

What a library does is in the hooks (`_generate`, `_halt`, `_swap`, ...) of the subclass in its file. The life of an
update and of a sleep is in `inference/protocol.py`.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import numpy as np

from roll_async.config.engine_traits import EngineTraits
from roll_async.inference.protocol import EngineCapabilities, EngineLoad, EngineMemory, KVCache, PauseMode
from roll_async.inference.settings import EngineSettings
from roll_async.inference.sleeping import SleepRules, SleepState, levels_up_to
from roll_async.schema import Completion, ExpertRecord, FinishReason, GenerateRequest, VersionRuns, WeightVersion
from roll_async.weight_sync.bucket import STAGED, Bucket, UpdatePlan
from roll_async.weight_sync.errors import update_errors

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
"""As vLLM and SGLang name them."""


def are_finite(logprobs: array) -> bool:
    """Whether all are finite: a sum of others is not."""
    return math.isfinite(sum(logprobs))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Part of an answer: R tokens."""

    token_ids: array  # [R] int32
    logprobs: array  # [R] float32
    version_runs: VersionRuns


@dataclass(eq=False, slots=True)
class Ticket:
    """One request inside an engine. A library adds what it keeps of one."""

    request: GenerateRequest
    budget: int
    """Most tokens of the response."""
    held_back: int
    """Last tokens that may be the beginning of a stop string: not reported before the request ends."""
    submitted_s: float
    admitted: bool = False
    version: WeightVersion = 0
    """Served when the request was admitted; of all its tokens where the library labels none."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_tokens(self) -> int:
        """Largest number of tokens that the request can hold in the KV cache."""
        return len(self.request.prompt_token_ids) + self.budget


T = TypeVar("T", bound=Ticket)


class Engine(ABC, Generic[T]):
    """One replica. Plain asyncio in one process: a library's threads and processes are behind the hooks.

    Calls raise EngineDead when the library will not answer any more, those of an update UpdateFailed.
    """

    ticket_type: ClassVar[type[Ticket]] = Ticket
    """What a request is inside this engine."""
    traits: ClassVar[EngineTraits]
    """What its library can."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._tickets: dict[str, T] = {}
        self._version: WeightVersion | None = None if settings.random_weights else 0
        self._cannot_keep = None if self.traits.keep_in_place else f"is not possible with {self.traits.title}"
        """Why `PauseMode.KEEP` is refused; an engine may find so at its start, of an older release."""
        self._shows_images = False
        """Of requests; an engine finds out when it loads the model."""
        self._sleep = SleepRules(self._sleep_levels())
        self._plan: UpdatePlan | None = None
        """Of the update under way."""
        self._whole = not settings.random_weights
        """False: the model holds no single version, and nothing is generated until the next commit."""
        self._serving = asyncio.Event()
        if self._whole:
            self._serving.set()

    def _sleep_levels(self) -> Sequence[int]:
        """Levels of `sleep` that the replica has."""
        return levels_up_to(self._settings.sleep_level)

    @property
    def capabilities(self) -> EngineCapabilities:
        """Known once it has started."""
        return EngineCapabilities(keep_in_place=self._cannot_keep is None)

    @property
    def version(self) -> WeightVersion | None:
        """The version it serves; None before the first update of an engine that started without weights."""
        return self._version

    def import_library(self) -> None:
        """What `start` would import: it takes longer than to load a small model, and a start tells of both."""
        import transformers  # noqa: F401  # all of them read the model's configuration with it

    @abstractmethod
    async def start(self) -> None:
        """Load the model. Raises ValueError for settings a user can fix, RuntimeError when the library fails."""

    @abstractmethod
    async def close(self) -> None:
        """Release devices and child processes; running requests end with ABORT."""

    def _library(self) -> AbstractContextManager[None]:
        """Around every call of the library: a subclass turns its way of saying that it is dead into EngineDead."""
        return nullcontext()

    # Requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request to its end, or to an abort. One log-prob and one weight version per token.
        With `EngineSettings.record_experts` also the experts of every position read from `recorded_positions` on.

        Raises ValueError when the request can not fit (prompt longer than the context).
        """
        self._sleep.need_awake(f"request {request.request_id}")
        with self._open(request) as ticket:
            if await self._admitted(ticket):
                with self._library():
                    completion = await self._generate(ticket)
                if not are_finite(completion.logprobs):
                    # Of no policy: a trainer would make NaN of all of its weights.
                    raise ArithmeticError(
                        f"log-probs of version {self._version} that are no numbers: weights or activations outside of "
                        "the range of this dtype"
                    )
                return completion
            return Completion.empty(request.request_id, generation_s=_now() - ticket.submitted_s)

    @contextmanager
    def _open(self, request: GenerateRequest) -> Iterator[T]:
        """The ticket of a request as long as it is here. Raises ValueError for one that cannot be computed."""
        budget = token_budget(request, self._settings)
        if request.images and not self._shows_images:
            raise ValueError(f"request {request.request_id} has images, which this model is not shown; use hf_infer")
        self._check(request)
        ticket: T = self.ticket_type(request, budget, held_back(request, self._settings), _now())  # type: ignore[assignment]
        # From here on an abort finds it, admitted or not.
        self._tickets[request.request_id] = ticket
        try:
            yield ticket
        finally:
            del self._tickets[request.request_id]
            ticket.done.set()  # also after an error: an abort waits for it

    def _check(self, request: GenerateRequest) -> None:
        """Raises ValueError for what this library cannot sample."""

    async def _admitted(self, ticket: T) -> bool:
        """Wait while the engine is paused; False when the request is aborted meanwhile."""
        # A loop: between the event and this task another pause, of the next push, may have come.
        while not ticket.aborted.is_set():
            if not self._serving.is_set():
                await first_of(self._serving, ticket.aborted)
            elif await self._ready(ticket):
                # A `_ready` that says True has not waited, so no pause has come since the look at `_serving`.
                ticket.admitted, ticket.version = True, self._version or 0
                return True
        return False

    async def _ready(self, ticket: T) -> bool:
        """Whether the library can take this request now; False after a wait, in which the engine may have paused."""
        return True

    @abstractmethod
    async def _generate(self, ticket: T) -> Completion:
        """An admitted request, to its end. When the caller is cancelled it ends in the library, too."""

    async def score(self, token_ids: Sequence[int]) -> array:
        """Log-prob of every token except the first, given those before it, under the weights now served: float32
        [n - 1], of the whole distribution at temperature 1, independent of sampling parameters. Waits while paused.

        Raises ValueError for fewer than two tokens, or more than the context has.
        """
        self._sleep.need_awake("score")
        check_scored(token_ids, self._settings.max_model_len)
        with self._library():
            return await self._score(token_ids)

    @abstractmethod
    async def _score(self, token_ids: Sequence[int]) -> array: ...

    def progress(self, request_id: str, start: int) -> Completion | None:
        """The tokens of a running request from its token `start` on, as the piece of a `Progress`; None when there is
        none.

        The call does not end the request, and reported tokens stay valid: the request can continue from them on
        another replica. The host handles a stop string whose first part they contain (`stop_strings.py`).
        """
        ticket = self._tickets.get(request_id)
        tokens = None if ticket is None else self._so_far(ticket, start)
        if ticket is None or tokens is None or not are_finite(tokens.logprobs):
            return None
        return self._completion(ticket, tokens, FinishReason.ABORT)

    @abstractmethod
    def _so_far(self, ticket: T, start: int) -> Tokens | None:
        """Tokens from `start` on without the last `held_back` ones, and without the one that ends the request: that
        one comes with its end. None when there are none.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of these tokens. Only asked for requests with stop strings."""

    def _completion(
        self, ticket: T, tokens: Tokens, reason: FinishReason, experts: ExpertRecord | None = None
    ) -> Completion:
        return Completion(
            request_id=ticket.request.request_id,
            token_ids=tokens.token_ids,
            logprobs=tokens.logprobs,
            version_runs=tokens.version_runs,
            finish_reason=reason,
            generation_s=_now() - ticket.submitted_s,
            experts=experts,
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their `generate` calls have returned (FinishReason.ABORT) before this returns. Unknown
        ids are ignored.
        """
        await self._end([self._tickets[i] for i in request_ids if i in self._tickets])

    async def _end(self, tickets: Iterable[T]) -> None:
        tickets = list(tickets)  # `close` gives a view of a dict, which shrinks as they end
        for ticket in tickets:
            ticket.aborted.set()  # all that one needs that was not admitted
        if running := [ticket for ticket in tickets if ticket.admitted and not ticket.done.is_set()]:
            with self._library():
                await self._abort(running)
        await asyncio.gather(*(ticket.done.wait() for ticket in tickets))

    @abstractmethod
    async def _abort(self, tickets: Sequence[T]) -> None:
        """End admitted requests, also one that is just being handed over to the library."""

    async def pause(self, mode: PauseMode) -> None:
        """After this returns no token is sampled until `resume`. New `generate` calls wait."""
        if mode is PauseMode.KEEP and self._cannot_keep is not None:
            raise ValueError(f"interrupt.mode keep {self._cannot_keep}; use resume")
        # Before the list below is taken: a request that was admitted later would not be halted.
        self._serving.clear()
        admitted = [ticket for ticket in self._tickets.values() if ticket.admitted]
        with self._library():
            await self._halt(mode, admitted)
        # With KEEP they are still there: they end after the resume.
        if mode is PauseMode.ABORT:
            await asyncio.gather(*(ticket.done.wait() for ticket in admitted))

    @abstractmethod
    async def _halt(self, mode: PauseMode, tickets: Sequence[T]) -> None:
        """Sample nothing after this; with ABORT the admitted requests, `tickets`, end."""

    async def resume(self) -> None:
        """Generate again. Raises RuntimeError without whole weights in awake memory."""
        self._sleep.need_awake("resume")
        if not self._whole:
            raise RuntimeError("resume without whole weights: the last update did not come to its commit")
        with self._library():
            # Before `_serving` is set: a request must not reach a library that is still halted.
            await self._go_on()
        self._serving.set()

    async def _go_on(self) -> None:
        """Undo `_halt`."""

    # Weights

    def loads_in_place(self, plan: UpdatePlan) -> bool:
        """Whether an update changes the served weights from its first bucket on: there is no room beside them."""
        return plan.transport not in STAGED

    async def begin_update(self, plan: UpdatePlan) -> None:
        """Expect the buckets of a version; an earlier update that was not committed is given up."""
        self._sleep.need_weights("begin_update")
        in_place = self.loads_in_place(plan)
        if in_place and self._serving.is_set():
            raise RuntimeError(f"begin_update over {plan.transport} changes the served weights; pause the engine first")
        with update_errors("begin_update"), self._library():
            await self._give_up()
            self._whole = self._whole and not in_place  # before the first byte: a begin that fails leaves a mixture
            await self._begin(plan)
            self._plan = plan

    @abstractmethod
    async def _begin(self, plan: UpdatePlan) -> None: ...

    async def load_bucket(self, bucket: Bucket) -> None:
        """Take one bucket in. The sender may reuse its memory afterwards, if the transport is not a staged one."""
        self._need_update("load_bucket")
        with update_errors("load_bucket"), self._library():
            await self._take_in(bucket)

    @abstractmethod
    async def _take_in(self, bucket: Bucket) -> None: ...

    async def finish_update(self) -> str:
        """Digest over what was taken in (see `weight_sync/digest.py`)."""
        self._need_update("finish_update")
        with update_errors("finish_update"), self._library():
            return await self._digest()

    @abstractmethod
    async def _digest(self) -> str:
        """Raises RuntimeError when tensors are missing."""

    async def commit(self, version: WeightVersion) -> None:
        """Swap the weights in and drop the prefix cache: tokens sampled from now on carry this version.

        The replica must be paused. Raises UpdateFailed when the update is not whole; it then needs another one.
        """
        self._sleep.need_weights("commit")
        self._need_update("commit")
        if self._serving.is_set():
            raise RuntimeError("commit on a running engine; pause it first")
        with update_errors("commit"), self._library():
            self._need_whole_update()  # while the served weights are still whole
            self._whole = False  # until the swap is done, the label of tokens included
            await self._swap(version)
        self._version, self._plan, self._whole = version, None, True

    def _need_whole_update(self) -> None:
        """Raises RuntimeError when tensors are missing, where that is known before the first one is swapped."""

    @abstractmethod
    async def _swap(self, version: WeightVersion) -> None:
        """Serve what was taken in; empty the prefix cache, and label what is sampled from now on."""

    def _need_update(self, what: str) -> None:
        if self._plan is None:
            raise RuntimeError(f"{what} without begin_update")

    async def _give_up(self) -> None:
        """Discard an update that was not committed, or whose commit failed."""
        self._plan = None
        await self._drop()

    async def _drop(self) -> None:
        """Give back what an update left behind; nothing where the next one does it when it begins."""

    # Sleep

    @property
    def sleep_state(self) -> SleepState:
        """The device memory that the replica holds now."""
        return self._sleep.state

    async def sleep(self, level: int) -> None:
        """Release device memory. Level 1: the KV cache is released, the weights move to host memory. Level 2: both are
        released, and `resume` is refused until a `commit` has loaded weights.

        The replica must be paused with no request running. While it sleeps `generate`, `resume`, `begin_update` and
        `commit` raise RuntimeError; the prefix cache is empty afterwards. Nothing happens if it sleeps at this level.
        Raises ValueError for a level that the replica was not started for (`EngineSettings.sleep_level`).
        """
        running = sum(ticket.admitted for ticket in self._tickets.values())
        if not self._sleep.may_sleep(level, paused=not self._serving.is_set(), num_running=running):
            return
        with self._library():
            await self._give_up()  # an update in progress would write into released memory
            if level == 2:
                self._whole = False
            await self._release(level)
        self._sleep.fell_asleep(level)

    @abstractmethod
    async def _release(self, level: int) -> None: ...

    async def wake(self, tags: Sequence[str]) -> None:
        """Allocate memory again: `["weights"]`, then `["kv_cache"]`, or both at once; what is awake is unchanged. The
        replica stays paused. With weights alone it accepts updates and cannot generate.

        Raises ValueError for an unknown tag, RuntimeError for a KV cache without weights.
        """
        if wanted := self._sleep.to_wake(tags):
            with self._library():
                await self._restore(wanted)
            self._sleep.woke(wanted)

    @abstractmethod
    async def _restore(self, tags: Sequence[str]) -> None: ...

    # Load

    @abstractmethod
    def memory(self) -> EngineMemory:
        """What the replica holds now."""

    @abstractmethod
    def load(self) -> EngineLoad:
        """The requests it has, and the room that they leave."""

    def _load_report(self, running: int, kv: KVCache | None, kv_tokens: int) -> EngineLoad:
        """`running`: of its requests; the others wait. `kv_tokens`: size of the KV cache."""
        claimed = sum(ticket.num_tokens for ticket in self._tickets.values())
        return EngineLoad(
            running=running,
            waiting=len(self._tickets) - running,
            # Waiting requests claim, too, so the claims may exceed the cache.
            free_kv_fraction=max(0.0, 1 - claimed / max(1, kv_tokens)),
            kv=kv,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


def token_budget(request: GenerateRequest, settings: EngineSettings) -> int:
    """Most tokens of the response. Raises ValueError for a prompt without a token, or one that leaves no room in the
    context, and for a response without a token.
    """
    if not request.prompt_token_ids or request.sampling.max_new_tokens < 1:
        asked = f"{len(request.prompt_token_ids)} prompt tokens, max_new_tokens {request.sampling.max_new_tokens}"
        raise ValueError(f"request {request.request_id}: {asked}: expected one of each at least")
    room = settings.max_model_len - len(request.prompt_token_ids)
    if room < 1:
        raise ValueError(
            f"request {request.request_id}: {len(request.prompt_token_ids)} prompt tokens leave no room in a context "
            f"of {settings.max_model_len}"
        )
    return min(room, request.sampling.max_new_tokens)


def held_back(request: GenerateRequest, settings: EngineSettings) -> int:
    """Last tokens that may be the beginning of a stop string: not reported before the request ends. Raises ValueError
    for stop strings where the engine was started without them.
    """
    stops = request.sampling.stop_strings
    if stops and not settings.stop_strings:
        raise ValueError(f"request {request.request_id} has stop_strings, and the engine was started without them")
    return max((len(stop.encode()) for stop in stops), default=1) - 1  # a token has a byte at least


def check_scored(token_ids: Sequence[int], max_model_len: int) -> None:
    """Raises ValueError for fewer than two tokens, or more than the context takes beside the one token that an engine
    samples after them.
    """
    if not 2 <= len(token_ids) < max_model_len:
        raise ValueError(f"{len(token_ids)} tokens to score: 2 to {max_model_len - 1} fit")


async def first_of(*events: asyncio.Event) -> None:
    """Wait until one of them is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()  # else it stays until its event is set, which may be never


def expert_record(routed: np.ndarray | None) -> ExpertRecord | None:
    """From [positions, layers, experts per token], uint8 or of 16 bits; layers without experts hold nothing of meaning.
    None of a request that never ran.
    """
    if routed is None:
        return None
    kind, typecode = (np.uint8, "B") if routed.dtype == np.uint8 else (np.int16, "h")
    ids = array(typecode)
    ids.frombytes(np.ascontiguousarray(routed, dtype=kind).tobytes())
    return ExpertRecord(ids=ids, num_layers=routed.shape[1], top_k=routed.shape[2])
