"""Transformers' continuous batching behind the Engine protocol: the engine that needs nothing extra.

One manager serves all requests; temperature, top-k and top-p are set per request. Truncation (top-k, top-p) sorts the
vocabulary at every step, so it is switched on with the first request that needs it. Tokens are streamed, because a
cancelled request gets no final output.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from roll_async.inference.admission import check_scored, first_of, token_budget
from roll_async.inference.hf_weights import WeightTargets
from roll_async.inference.protocol import EngineCapabilities, EngineLoad, EngineMemory, PauseMode
from roll_async.inference.seeds import manager_seed
from roll_async.inference.settings import TORCH_DTYPES, EngineSettings
from roll_async.inference.sleeping import KV_CACHE, WEIGHTS, SleepRules, SleepState, levels_up_to
from roll_async.inference.staging import Incoming
from roll_async.inference.storages import Storages
from roll_async.schema import Completion, FinishReason, GenerateRequest, SamplingParams, WeightVersion
from roll_async.weight_sync.bucket import STAGED, Bucket, UpdatePlan
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.errors import EngineDead, update_errors

if TYPE_CHECKING:
    from roll_async.inference.hf_experts import ExpertRecorder

_PAGE_TOKENS = 32
_GREEDY_TEMPERATURE = 1e-6
"""The manager always samples; at this temperature the most likely token has probability 1 in float32."""


class _SamplingOptions(TypedDict, total=False):
    """Sampling parameters of one request, as Transformers names them."""

    temperature: float
    top_k: int
    top_p: float


@dataclass(eq=False, slots=True)
class _HfRequest:
    """One request and its tokens so far."""

    request: GenerateRequest
    budget: int
    started_s: float
    version: WeightVersion = 0
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    submitted: bool = False
    error: str | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    returned: asyncio.Event = field(default_factory=asyncio.Event)


class HfEngine:
    """One replica. See `inference/protocol.py: Engine` for the contract of each method."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._version: WeightVersion | None = None if settings.random_weights else 0
        self._mixed = settings.random_weights
        """The model holds no whole version: nothing is generated until the next commit."""
        self._running: dict[str, _HfRequest] = {}
        self._truncating, self._num_managers = settings.truncated_sampling, 0
        self._sleep = SleepRules(levels_up_to(settings.sleep_level))
        self._manager: Any = None
        """Transformers' ContinuousBatchingManager; None while the KV cache is asleep."""
        self._incoming: Incoming | None = None
        self._kept = LastExport()
        self._recorder: ExpertRecorder | None = None
        self._serving, self._settled, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._settled.set()
        self._idle.set()
        if not settings.random_weights:
            self._serving.set()

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(keep_in_place=False)

    @property
    def version(self) -> WeightVersion | None:
        return self._version

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from roll_async.inference import hf_attention

        hf_attention.install()
        settings = self._settings
        form = {"dtype": getattr(torch, TORCH_DTYPES[settings.dtype]), "attn_implementation": settings.attention}
        if settings.random_weights:
            config = AutoConfig.from_pretrained(settings.model_folder)
            model = AutoModelForCausalLM.from_config(config, **form)
        else:
            model = AutoModelForCausalLM.from_pretrained(settings.model_folder, **form)
        self._model = model.eval().to(settings.device)  # pyright: ignore[reportArgumentType]  # wraps Module.to, loses self
        if settings.sleep_level:  # memory of a memory-mapped checkpoint cannot be released
            for parameter in self._model.parameters():
                parameter.data = parameter.data.clone()
        self._targets = WeightTargets(self._model, self._model.config.model_type)
        beside: dict[str, Tensor] = {}
        if settings.adapter is not None:
            from roll_async.inference.hf_adapters import add_adapters

            beside = add_adapters(self._model, settings.adapter)
            self._targets.add(beside)
        self._weights = Storages([*self._model.parameters(), *beside.values()])
        self._eos_ids = _stop_ids(self._model)
        if settings.record_experts:
            from roll_async.inference.hf_experts import ExpertRecorder

            self._recorder = ExpertRecorder(self._model, lambda: self._manager)
        self._manager = self._new_manager()

    def _new_manager(self):  # noqa: ANN202 (ContinuousBatchingManager, imported late)
        from transformers import ContinuousBatchingConfig, GenerationConfig

        settings = self._settings
        self._num_managers += 1  # each manager seeds torch; with equal seeds they would sample equal tokens
        # A value other than the neutral one creates the processor; each request sets its own value.
        vocab_size = self._model.config.vocab_size
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
            max_batch_tokens=max(512, settings.max_running),
            max_requests_per_batch=settings.max_running,
            per_request_processors=True,
            return_logprobs=True,
            use_async_batching=False,
            use_cuda_graph=False,
            allow_block_sharing=False,
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

    # Requests

    async def generate(self, request: GenerateRequest) -> Completion:
        self._sleep.need_awake(f"request {request.request_id}")
        sampling = request.sampling
        budget = token_budget(request, self._settings)
        if sampling.stop_strings or sampling.repetition_penalty != 1.0:
            raise ValueError("hf_infer samples without stop_strings and repetition_penalty; use vllm")
        run = _HfRequest(request, budget, self._loop.time())
        self._running[request.request_id] = run
        try:
            if await self._may_start(run):
                self._submit(run)
            await run.finished.wait()
            if run.error is not None:
                raise RuntimeError(run.error)
            return self._completion(run)
        finally:
            if run.submitted and not run.finished.is_set():  # the caller was cancelled
                self._manager.cancel_request(request.request_id)
                run.finished.set()
            if self._recorder is not None:
                self._recorder.forget(request.request_id)
            del self._running[request.request_id]
            run.returned.set()
            self._note_idle()

    async def score(self, token_ids: Sequence[int]) -> array:
        self._sleep.need_awake("score")
        check_scored(token_ids, self._settings.max_model_len)
        await self._serving.wait()
        return await asyncio.to_thread(self._score, list(token_ids))

    def _score(self, token_ids: list[int]) -> array:
        """A separate forward pass, concurrent with the manager's: both only read the weights."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self._settings.device)
            position = torch.arange(len(token_ids), device=ids.device)[None]
            # The manager's attention implementation creates no causal mask.
            later = torch.full((1, 1, len(token_ids), len(token_ids)), torch.finfo(self._model.dtype).min).triu(1)
            mask = later.to(device=ids.device, dtype=self._model.dtype)
            output = self._model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False)
            logits = output.logits[0, :-1].float()
            found = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        return array("f", found.tolist())

    async def _may_start(self, run: _HfRequest) -> bool:
        """Wait while paused, and until the manager can sample as wanted; False when aborted meanwhile."""
        while not run.finished.is_set():
            if not self._serving.is_set():
                await first_of(self._serving, run.finished)
            elif not self._settled.is_set():
                await first_of(self._settled, run.finished)
            elif _truncates(run.request.sampling) and not self._truncating:
                await self._allow_truncation()
            else:
                return True
        return False

    async def _allow_truncation(self) -> None:
        """Change managers when nothing runs; new requests wait meanwhile, so this ends."""
        self._settled.clear()
        try:
            await self._idle.wait()
            self._truncating = True
            await asyncio.to_thread(self._manager.stop, True)
            self._manager = await asyncio.to_thread(self._new_manager)
        finally:
            self._settled.set()

    def _submit(self, run: _HfRequest) -> None:
        """Submit the request to the manager. Its handler is registered first, because a token may arrive at once."""
        sampling, request_id = run.request.sampling, run.request.request_id
        options: _SamplingOptions = {"temperature": sampling.temperature or _GREEDY_TEMPERATURE}
        if self._truncating:
            vocab_size = self._model.config.vocab_size  # a larger top_k ends the manager's loop
            top_k = min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size
            options |= {"top_k": top_k, "top_p": sampling.top_p}
        run.submitted, run.version = True, self._version or 0
        self._idle.clear()
        if self._recorder is not None:
            self._recorder.announce(request_id, run.request.recorded_positions)
        self._manager.register_result_handler(request_id, lambda output: self._received(run, output))
        taken = self._manager.add_request(
            list(run.request.prompt_token_ids),
            request_id=request_id,
            max_new_tokens=run.budget,
            streaming=True,
            eos_token_id=[*self._eos_ids, *sampling.stop_token_ids],
            **options,
        )
        if taken is None:
            raise EngineDead("the generation loop of Transformers has ended; see the log for its error")

    def _received(self, run: _HfRequest, output) -> None:  # noqa: ANN001 (GenerationOutput; called on the event loop)
        if run.finished.is_set():
            return
        run.tokens, run.logprobs = output.generated_tokens, output.logprobs
        if output.error is not None:
            run.error = str(output.error)
        if output.is_finished() or run.error is not None:
            run.finished.set()

    def _note_idle(self) -> None:
        if not any(r.submitted for r in self._running.values()):
            self._idle.set()

    def _completion(self, run: _HfRequest) -> Completion:
        tokens = run.tokens
        if tokens and tokens[-1] in self._stops(run):
            reason = FinishReason.STOP
        else:
            reason = FinishReason.LENGTH if len(tokens) >= run.budget else FinishReason.ABORT
        experts = None
        if self._recorder is not None:
            fed = len(run.request.prompt_token_ids) + len(tokens) - 1 if tokens else run.request.recorded_positions
            experts = self._recorder.take(run.request.request_id, fed)
        return Completion(
            request_id=run.request.request_id,
            token_ids=array("i", tokens),
            logprobs=array("f", run.logprobs),
            version_runs=((run.version, len(tokens)),) if tokens else (),
            finish_reason=reason,
            generation_s=self._loop.time() - run.started_s,
            experts=experts,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        raise RuntimeError("hf_infer has no stop strings, and no text")

    def progress(self, request_id: str, start: int) -> Completion | None:
        run = self._running.get(request_id)
        if run is None or run.finished.is_set():
            return None
        end = len(run.tokens)
        if end and (end >= run.budget or run.tokens[-1] in self._stops(run)):
            end -= 1  # the one that ends the request comes with its end
        if end <= start:
            return None
        return Completion(
            request_id=request_id,
            token_ids=array("i", run.tokens[start:end]),
            logprobs=array("f", run.logprobs[start:end]),
            version_runs=((run.version, end - start),),
            finish_reason=FinishReason.ABORT,
            generation_s=self._loop.time() - run.started_s,
        )

    def _stops(self, run: _HfRequest) -> set[int]:
        """Token ids that end a response."""
        return {*self._eos_ids, *run.request.sampling.stop_token_ids}

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._stop([self._running[i] for i in request_ids if i in self._running])

    async def _stop(self, runs: Iterable[_HfRequest]) -> None:
        runs = list(runs)
        running = [r for r in runs if r.submitted and not r.finished.is_set()]
        for run in running:
            self._manager.cancel_request(run.request.request_id)
        if running:
            await asyncio.to_thread(self._end_of_step)
        for run in runs:
            run.finished.set()
        await asyncio.gather(*(run.returned.wait() for run in runs))

    def _end_of_step(self) -> None:
        """Returns between two steps; requests cancelled before the call are not in the next one."""
        if self._manager.is_running():
            with self._manager.pause():
                pass

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.KEEP:
            raise ValueError("interrupt.mode keep is not possible with hf_infer; use resume")
        self._serving.clear()
        await self._stop([r for r in self._running.values() if r.submitted])
        await self._settled.wait()

    async def resume(self) -> None:
        self._sleep.need_awake("resume")
        if self._mixed:
            raise RuntimeError("resume without whole weights: the last update did not come to its commit")
        self._serving.set()

    # Weights

    async def begin_update(self, plan: UpdatePlan) -> None:
        self._sleep.need_weights("begin_update")
        in_place = plan.transport not in STAGED
        if in_place and self._serving.is_set():
            raise RuntimeError(f"begin_update over {plan.transport} changes the served weights; pause the engine first")
        with update_errors("begin_update"):
            self._give_up()
            self._mixed = self._mixed or in_place
            self._incoming = Incoming(plan, self._targets.names, self._kept)

    def _give_up(self) -> None:
        """Discard an update that was not committed."""
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None

    async def load_bucket(self, bucket: Bucket) -> None:
        if self._incoming is None:
            raise RuntimeError("load_bucket without begin_update")
        with update_errors("load_bucket"):
            await asyncio.to_thread(self._take_in, self._incoming, bucket)

    def _take_in(self, incoming: Incoming, bucket: Bucket) -> None:
        tensors = incoming.take_in(bucket)
        if incoming.in_place:
            self._copy(tensors)

    def _copy(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        import torch

        pairs = [(name, self._targets[name], tensor) for name, tensor in tensors]
        for name, target, tensor in pairs:
            if target.shape != tensor.shape:
                raise RuntimeError(f"{name} has shape {tuple(target.shape)}, not {tuple(tensor.shape)}")
            target.copy_(tensor)
        if self._settings.device != "cpu":
            torch.cuda.synchronize()  # the manager computes on a separate stream

    async def finish_update(self) -> str:
        if self._incoming is None:
            raise RuntimeError("finish_update without begin_update")
        with update_errors("finish_update"):
            return self._incoming.finish()

    async def commit(self, version: WeightVersion) -> None:
        self._sleep.need_weights("commit")
        if self._incoming is None:
            raise RuntimeError("commit without a whole update")
        if self._serving.is_set():
            raise RuntimeError("commit on a running engine; pause it first")
        with update_errors("commit"):
            self._incoming.need_whole()
            self._mixed = True
            await asyncio.to_thread(self._copy, self._incoming.staged)
            self._incoming.committed()
        self._incoming = None
        self._version, self._mixed = version, False

    # Sleep

    @property
    def sleep_state(self) -> SleepState:
        return self._sleep.state

    async def sleep(self, level: int) -> None:
        running = sum(run.submitted for run in self._running.values())
        if not self._sleep.may_sleep(level, paused=not self._serving.is_set(), num_running=running):
            return
        self._give_up()  # an update in progress would write into released memory
        if level == 2:
            self._mixed = True
            self._kept.frozen.forget()
        await asyncio.to_thread(self._manager.stop, True)
        self._manager = None  # and the KV cache with it
        await asyncio.to_thread(self._weights.release, keep_content=level == 1)
        self._sleep.fell_asleep(level)

    async def wake(self, tags: Sequence[str]) -> None:
        wanted = self._sleep.to_wake(tags)
        if WEIGHTS in wanted:
            await asyncio.to_thread(self._weights.restore)
        if KV_CACHE in wanted:
            self._manager = await asyncio.to_thread(self._new_manager)
        self._sleep.woke(wanted)

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
        active = sum(r.submitted for r in self._running.values())
        running = min(active, self._settings.max_running)
        return EngineLoad(
            running=running,
            waiting=len(self._running) - running,
            free_kv_fraction=1 - running / self._settings.max_running,
        )

    async def close(self) -> None:
        self._serving.clear()
        await self._stop(self._running.values())
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
