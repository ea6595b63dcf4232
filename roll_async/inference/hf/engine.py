"""Transformers' continuous batching behind the Engine protocol: the engine that needs nothing extra.

One manager serves all requests; temperature, top-k and top-p are set per request. Truncation (top-k, top-p) sorts the
vocabulary at every step, so it is switched on with the first request that needs it. Tokens are streamed, because a
cancelled request gets no final output.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from roll_async.config.engine_traits import ENGINE_TRAITS
from roll_async.inference.engine import Engine, Ticket, Tokens, first_of
from roll_async.inference.hf.weights import WeightTargets
from roll_async.inference.protocol import EngineLoad, EngineMemory, PauseMode
from roll_async.inference.seeds import manager_seed
from roll_async.inference.settings import TORCH_DTYPES, EngineSettings
from roll_async.inference.sleeping import KV_CACHE, WEIGHTS
from roll_async.inference.staging import Incoming
from roll_async.inference.storages import Storages
from roll_async.schema import Completion, FinishReason, GenerateRequest, SamplingParams, WeightVersion
from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.errors import EngineDead

if TYPE_CHECKING:
    from roll_async.inference.hf.experts import ExpertRecorder
    from roll_async.inference.hf.images import ImageFeeder

_PAGE_TOKENS = 32
_GREEDY_TEMPERATURE = 1e-6
"""The manager always samples; at this temperature the most likely token has probability 1 in float32."""


class _SamplingOptions(TypedDict, total=False):
    """Sampling parameters of one request, as Transformers names them."""

    temperature: float
    top_k: int
    top_p: float


@dataclass(eq=False, slots=True)
class HfTicket(Ticket):
    """A request and what the manager has streamed of it."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    error: str | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the manager has ended the request, or was told to; what it streams later is not taken."""


class HfEngine(Engine[HfTicket]):
    """One replica; `inference/engine.py: Engine` says what each method does."""

    traits, ticket_type = ENGINE_TRAITS["hf_infer"], HfTicket

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._truncating, self._num_managers = settings.truncated_sampling, 0
        self._manager: Any = None
        """Transformers' ContinuousBatchingManager; None while the KV cache is asleep."""
        self._incoming: Incoming | None = None
        self._kept = LastExport()
        self._recorder: ExpertRecorder | None = None
        self._feeder: ImageFeeder | None = None
        """None: the model reads text alone."""
        self._settled, self._idle = asyncio.Event(), asyncio.Event()
        """Managers are not being changed; no request runs."""
        self._settled.set()
        self._idle.set()

    async def start(self) -> None:
        await asyncio.to_thread(self._load_model)

    def _load_model(self) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        from roll_async.inference.hf import attention as hf_attention

        hf_attention.install()
        settings = self._settings
        config = AutoConfig.from_pretrained(settings.model_folder)
        self._shows_images = getattr(config, "vision_config", None) is not None
        kind = AutoModelForImageTextToText if self._shows_images else AutoModelForCausalLM
        form = {"dtype": getattr(torch, TORCH_DTYPES[settings.dtype]), "attn_implementation": settings.attention}
        if settings.random_weights:
            model = kind.from_config(config, **form)
        else:
            model = kind.from_pretrained(settings.model_folder, **form)
        self._model = model.eval().to(settings.device)  # pyright: ignore[reportArgumentType]  # wraps Module.to, loses self
        if getattr(self._model.config, "kv_lora_rank", None):
            # The cache of continuous batching asks for it; by itself it is the size of the rotary part alone.
            sizes = self._model.config
            sizes.head_dim = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
        if settings.sleep_level:  # memory of a memory-mapped checkpoint cannot be released
            for parameter in self._model.parameters():
                parameter.data = parameter.data.clone()
        self._targets = WeightTargets(self._model, self._model.config.model_type)
        beside: dict[str, Tensor] = {}
        if settings.adapter is not None:
            from roll_async.inference.hf.adapters import add_adapters

            beside = add_adapters(self._model, settings.adapter)
            self._targets.add(beside)
        self._weights = Storages([*self._model.parameters(), *beside.values()])
        self._eos_ids = _stop_ids(self._model)
        if settings.record_experts:
            from roll_async.inference.hf.experts import ExpertRecorder

            # A function: another manager takes its place when truncation is switched on, and after a sleep.
            self._recorder = ExpertRecorder(self._model, lambda: self._manager)
        if self._shows_images:
            from roll_async.inference.hf.images import ImageFeeder

            self._feeder = ImageFeeder(self._model, settings.model_folder, lambda: self._manager)
        self._manager = self._new_manager()

    def _new_manager(self):  # noqa: ANN202 (ContinuousBatchingManager, imported late)
        from transformers import ContinuousBatchingConfig, GenerationConfig

        settings = self._settings
        self._num_managers += 1  # each manager seeds torch; with equal seeds they would sample equal tokens
        # A value other than the neutral one creates the processor; each request sets its own value.
        vocab_size = self._model.config.get_text_config().vocab_size
        truncation = {"top_k": vocab_size, "top_p": 0.5} if self._truncating else {"top_k": 0, "top_p": 1.0}
        generation = GenerationConfig(
            do_sample=True,
            temperature=0.5,
            max_new_tokens=settings.max_model_len,
            eos_token_id=list(self._eos_ids),
            pad_token_id=self._model.generation_config.pad_token_id or 0,
            **truncation,
        )
        batching = ContinuousBatchingConfig(
            num_blocks=self._num_pages,
            page_size=_PAGE_TOKENS,
            # A step must have room for one token of every running request.
            max_batch_tokens=max(512, settings.max_running),
            max_requests_per_batch=settings.max_running,
            per_request_processors=True,
            return_logprobs=True,
            use_async_batching=False,
            use_cuda_graph=False,
            allow_block_sharing=False,  # a swap of weights empties no prefix cache here
            seed=manager_seed(settings.seed, self._num_managers),
        )
        manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        manager.start()
        return manager

    @property
    def _num_pages(self) -> int:
        """Number of pages of the KV cache; enough for all requests at the same time."""
        return self._settings.max_running * -(-self._settings.max_model_len // _PAGE_TOKENS)

    @contextmanager
    def _library(self) -> Iterator[None]:
        import torch

        try:
            yield
        except torch.AcceleratorError as error:  # the device repeats it at every later call of this process
            raise EngineDead(f"the device of this process has failed: {error}") from error

    # Requests

    def _check(self, request: GenerateRequest) -> None:
        if request.sampling.stop_strings or request.sampling.repetition_penalty != 1.0:
            raise ValueError("hf_infer samples without stop_strings and repetition_penalty; use vllm")

    async def _ready(self, ticket: HfTicket) -> bool:
        if not self._settled.is_set():
            await first_of(self._settled, ticket.aborted)
        elif _truncates(ticket.request.sampling) and not self._truncating:
            await self._allow_truncation()
        else:
            return True
        return False

    async def _generate(self, ticket: HfTicket) -> Completion:
        request_id = ticket.request.request_id
        self._idle.clear()  # nothing was awaited since `_ready`, so managers are not being changed
        try:
            if ticket.request.images:
                assert self._feeder is not None, "the request was taken"
                # Shown here: a request that was cancelled meanwhile leaves nothing behind.
                self._feeder.show(request_id, await asyncio.to_thread(self._feeder.seen, ticket.request))
            if not ticket.finished.is_set():  # else it was aborted meanwhile
                self._submit(ticket)
            await ticket.finished.wait()
            if ticket.error is not None:
                raise RuntimeError(ticket.error)
            return self._answer(ticket)
        finally:
            if not ticket.finished.is_set():  # the caller was cancelled
                self._manager.cancel_request(request_id)
                ticket.finished.set()
            if self._recorder is not None:
                self._recorder.forget(request_id)
            if self._feeder is not None:
                self._feeder.forget(request_id)
            if not any(other.admitted for other in self._tickets.values() if other is not ticket):
                self._idle.set()

    async def _score(self, token_ids: Sequence[int]) -> array:
        await self._serving.wait()
        return await asyncio.to_thread(self._logprobs_of, list(token_ids))

    def _logprobs_of(self, token_ids: list[int]) -> array:
        """A separate forward pass, concurrent with the manager's: both only read the weights."""
        import torch

        aside = nullcontext() if self._recorder is None else self._recorder.aside()
        with torch.inference_mode(), aside:
            ids = torch.tensor([token_ids], device=self._settings.device)
            position = torch.arange(len(token_ids), device=ids.device)[None]
            # The manager's attention implementation creates no causal mask.
            later = torch.full((1, 1, len(token_ids), len(token_ids)), torch.finfo(self._model.dtype).min).triu(1)
            mask = later.to(device=ids.device, dtype=self._model.dtype)
            output = self._model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False)
            logits = output.logits[0, :-1].float()  # as the trainer's log-probs, which are of float32 logits
            found = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        return array("f", found.tolist())

    async def _allow_truncation(self) -> None:
        """Change managers when nothing runs; new requests wait meanwhile, so this ends."""
        self._settled.clear()
        try:
            await self._idle.wait()
            self._truncating = True
            await asyncio.to_thread(self._manager.stop, True)  # True: until its thread has ended
            self._manager = await asyncio.to_thread(self._new_manager)
        finally:
            self._settled.set()  # also after an error: requests wait for it

    def _submit(self, ticket: HfTicket) -> None:
        """Submit the request to the manager. Its handler is registered first, because a token may arrive at once."""
        sampling, request_id = ticket.request.sampling, ticket.request.request_id
        options: _SamplingOptions = {"temperature": sampling.temperature or _GREEDY_TEMPERATURE}
        if self._truncating:
            vocab_size = self._model.config.get_text_config().vocab_size  # a larger top_k ends the manager's loop
            top_k = min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size
            options |= {"top_k": top_k, "top_p": sampling.top_p}
        if self._recorder is not None:
            self._recorder.announce(request_id, ticket.request.recorded_positions)
        self._manager.register_result_handler(request_id, lambda output: self._received(ticket, output))
        taken = self._manager.add_request(
            list(ticket.request.prompt_token_ids),
            request_id=request_id,
            max_new_tokens=ticket.budget,
            streaming=True,
            eos_token_id=sorted(self._stops(ticket)),
            **options,
        )
        if taken is None:
            raise EngineDead("the generation loop of Transformers has ended; see the log for its error")

    def _received(self, ticket: HfTicket, output) -> None:  # noqa: ANN001 (GenerationOutput; called on the event loop)
        if ticket.finished.is_set():
            return
        # An output holds all tokens so far, not only the new ones.
        ticket.tokens, ticket.logprobs = output.generated_tokens, output.logprobs
        if output.error is not None:
            ticket.error = str(output.error)
        if output.is_finished() or ticket.error is not None:
            ticket.finished.set()

    def _answer(self, ticket: HfTicket) -> Completion:
        tokens, budget = ticket.tokens, ticket.budget
        if tokens and tokens[-1] in self._stops(ticket):
            reason = FinishReason.STOP
        else:
            reason = FinishReason.LENGTH if len(tokens) >= budget else FinishReason.ABORT
        experts = None
        if self._recorder is not None:
            request = ticket.request
            # The last token was sampled and never read, so no router has seen it.
            fed = len(request.prompt_token_ids) + len(tokens) - 1 if tokens else request.recorded_positions
            experts = self._recorder.take(request.request_id, fed)
        return self._completion(ticket, self._part(ticket, 0, len(tokens)), reason, experts)

    def _so_far(self, ticket: HfTicket, start: int) -> Tokens | None:
        if ticket.finished.is_set():
            return None
        end = len(ticket.tokens)
        if end and (end >= ticket.budget or ticket.tokens[-1] in self._stops(ticket)):
            end -= 1  # the one that ends the request comes with its end
        return self._part(ticket, start, end) if end > start else None

    @staticmethod
    def _part(ticket: HfTicket, start: int, end: int) -> Tokens:
        """The tokens [start, end): all of one version, no request outlives an update."""
        runs = ((ticket.version, end - start),) if end > start else ()
        return Tokens(array("i", ticket.tokens[start:end]), array("f", ticket.logprobs[start:end]), runs)

    def _stops(self, ticket: HfTicket) -> set[int]:
        """Token ids that end a response."""
        return {*self._eos_ids, *ticket.request.sampling.stop_token_ids}

    def decode(self, token_ids: Sequence[int]) -> str:
        raise RuntimeError("hf_infer has no stop strings, and no text")

    async def _abort(self, tickets: Sequence[HfTicket]) -> None:
        running = [ticket for ticket in tickets if not ticket.finished.is_set()]
        for ticket in running:
            self._manager.cancel_request(ticket.request.request_id)
        if running:
            # A cancelled request may still be in the step under way.
            await asyncio.to_thread(self._end_of_step)
        for ticket in tickets:
            ticket.finished.set()

    def _end_of_step(self) -> None:
        """Returns between two steps; requests cancelled before the call are not in the next one."""
        if self._manager.is_running():
            with self._manager.pause():
                pass

    async def _halt(self, mode: PauseMode, tickets: Sequence[HfTicket]) -> None:
        await self._end(tickets)
        await self._settled.wait()  # managers may be changing, which waits for the last request to end

    # Weights

    async def _begin(self, plan: UpdatePlan) -> None:
        self._incoming = Incoming(plan, self._targets.names, self._kept)

    async def _drop(self) -> None:
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None

    async def _take_in(self, bucket: Bucket) -> None:
        assert self._incoming is not None
        await asyncio.to_thread(self._take, self._incoming, bucket)

    def _take(self, incoming: Incoming, bucket: Bucket) -> None:
        tensors = incoming.take_in(bucket)
        if incoming.in_place:
            self._copy(tensors)

    def _copy(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        import torch

        pairs = [(name, self._targets[name], tensor) for name, tensor in tensors]
        for name, target, tensor in pairs:
            if target.shape != tensor.shape:  # `copy_` would broadcast
                raise RuntimeError(f"{name} has shape {tuple(target.shape)}, not {tuple(tensor.shape)}")
            target.copy_(tensor)
        if self._settings.device != "cpu":
            torch.cuda.synchronize()  # the manager computes on a separate stream

    async def _digest(self) -> str:
        assert self._incoming is not None
        return self._incoming.finish()

    def _need_whole_update(self) -> None:
        assert self._incoming is not None
        self._incoming.need_whole()

    async def _swap(self, version: WeightVersion) -> None:
        assert self._incoming is not None
        await asyncio.to_thread(self._copy, self._incoming.staged)
        if self._feeder is not None:
            self._feeder.swapped()
        self._incoming.committed()
        self._incoming = None

    # Sleep

    async def _release(self, level: int) -> None:
        if level == 2:
            self._kept.frozen.forget()  # proved once, and gone now
        await asyncio.to_thread(self._manager.stop, True)
        self._manager = None  # and the KV cache with it
        await asyncio.to_thread(self._weights.release, keep_content=level == 1)

    async def _restore(self, tags: Sequence[str]) -> None:
        if WEIGHTS in tags:
            await asyncio.to_thread(self._weights.restore)
        if KV_CACHE in tags:
            self._manager = await asyncio.to_thread(self._new_manager)

    def memory(self) -> EngineMemory:
        return EngineMemory(
            weights_bytes=self._weights.num_bytes,
            kv_cache_bytes=self._kv_bytes() if self._manager is not None else 0,
            host_weights_bytes=self._weights.host_bytes,
        )

    def _kv_bytes(self) -> int:
        """Bytes of the manager's cache: keys and values of all pages."""
        config = self._model.config.get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        entries = config.num_hidden_layers * 2 * config.num_key_value_heads * head
        return entries * self._num_pages * _PAGE_TOKENS * self._model.dtype.itemsize

    def load(self) -> EngineLoad:
        running = min(sum(ticket.admitted for ticket in self._tickets.values()), self._settings.max_running)
        return EngineLoad(
            running=running,
            waiting=len(self._tickets) - running,
            free_kv_fraction=1 - running / self._settings.max_running,
        )

    async def close(self) -> None:
        self._serving.clear()
        await self._end(self._tickets.values())
        if self._manager is not None:
            await asyncio.to_thread(self._manager.stop, True)


def _truncates(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1


def _stop_ids(model) -> tuple[int, ...]:  # noqa: ANN001 (a Transformers model)
    """End-of-sequence ids: of the generation config, else of the model."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
