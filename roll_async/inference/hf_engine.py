"""Transformers' continuous batching behind the Engine protocol: the engine that needs nothing extra.

One manager per sampling setting is what Transformers has, so the first request decides temperature, top-k and top-p of
a
generation wave; a request with other settings waits until the running ones are done, then the manager is started anew.
Tokens are streamed, because a cancelled request gets no final output.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from roll_async.inference.protocol import EngineCapabilities, EngineLoad, PauseMode
from roll_async.inference.settings import TORCH_DTYPES, EngineSettings
from roll_async.schema import Completion, FinishReason, GenerateRequest, SamplingParams, WeightVersion
from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.digest import Digest
from roll_async.weight_sync.transports import RECEIVERS

_PAGE_TOKENS = 32
_SamplingKey = tuple[float, int, float]


@dataclass(eq=False, slots=True)
class _Running:
    """One request and what has come of it."""

    request: GenerateRequest
    budget: int
    started_s: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    manager_id: str | None = None
    aborted: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None


class HfEngine:
    """One replica. See `inference/protocol.py: Engine` for the contract of each method."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._version: WeightVersion | None = None if settings.random_weights else 0
        self._running: dict[str, _Running] = {}
        self._serving = asyncio.Event()
        self._serving.set()
        self._updating = False
        self._manager = None
        self._sampling: _SamplingKey | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._starting = asyncio.Lock()

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(keep_in_place=False, prefix_caching=False)

    @property
    def version(self) -> WeightVersion | None:
        return self._version

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, TORCH_DTYPES[self._settings.dtype])
        self._model = AutoModelForCausalLM.from_pretrained(
            self._settings.model_folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self._model.to(self._settings.device)
        stop = self._model.generation_config.eos_token_id
        self._stop_ids = set(stop if isinstance(stop, list) else [stop])

    async def generate(self, request: GenerateRequest) -> Completion:
        room = self._settings.max_model_len - len(request.prompt_token_ids)
        if room < 1:
            raise ValueError(
                f"request {request.request_id}: {len(request.prompt_token_ids)} prompt tokens leave no room in "
                f"{self._settings.max_model_len}"
            )
        if request.sampling.stop_strings or request.sampling.repetition_penalty != 1.0:
            raise ValueError("hf_infer samples without stop_strings and repetition_penalty; use vllm")
        run = _Running(request, min(room, request.sampling.max_new_tokens), self._loop.time())
        self._running[request.request_id] = run
        try:
            await self._submit(run)
            await run.finished.wait()
            if run.error is not None:
                raise RuntimeError(run.error)
            return _completion(run, self._stop_ids | set(request.sampling.stop_token_ids), self._loop.time())
        finally:
            del self._running[request.request_id]

    async def _submit(self, run: _Running) -> None:
        """Hand the request to a manager with its sampling; waits while paused or while others sample differently."""
        key = _key(run.request.sampling)
        while not run.aborted:
            if not self._serving.is_set():
                await _first(self._serving, run.finished)
                continue
            async with self._starting:
                if self._sampling != key and self._active() == 0:
                    await asyncio.to_thread(self._restart, key)
                if self._sampling == key and self._serving.is_set():
                    self._add(run)
                    return
            self._idle.clear()
            await _first(self._idle, run.finished)

    def _restart(self, key: _SamplingKey) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if self._manager is not None:
            self._manager.stop(block=True)
        temperature, top_k, top_p = key
        generation = GenerationConfig(
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_k=top_k if top_k > 0 else 0,
            top_p=top_p,
            max_new_tokens=self._settings.max_model_len,
            eos_token_id=sorted(self._stop_ids),
            pad_token_id=self._model.generation_config.pad_token_id or 0,
        )
        pages = self._settings.max_running * -(-self._settings.max_model_len // _PAGE_TOKENS)
        batching = ContinuousBatchingConfig(
            num_blocks=pages,
            page_size=_PAGE_TOKENS,
            max_batch_tokens=max(512, self._settings.max_running),
            max_requests_per_batch=self._settings.max_running,
            return_logprobs=True,
            use_async_batching=False,
            use_cuda_graph=False,
            allow_block_sharing=False,
        )
        self._manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self._manager.start()
        self._sampling = key

    def _add(self, run: _Running) -> None:
        assert self._manager is not None
        run.manager_id = self._manager.add_request(
            list(run.request.prompt_token_ids), max_new_tokens=run.budget, streaming=True
        )
        self._manager.register_result_handler(run.manager_id, lambda output: self._received(run, output))

    def _received(self, run: _Running, output) -> None:  # noqa: ANN001 (GenerationOutput; called by the manager on the event loop)
        if run.finished.is_set():
            return
        if output.error is not None:
            run.error = str(output.error)
        new = len(output.generated_tokens) - len(run.tokens)
        if new > 0:
            run.tokens = list(output.generated_tokens)
            run.logprobs = [float(x) for x in output.logprobs]
            run.versions += [self._version or 0] * new
        if output.is_finished() or run.error is not None:
            self._end(run)

    def _end(self, run: _Running) -> None:
        run.finished.set()
        if self._active() == 0:
            self._idle.set()

    def _active(self) -> int:
        return sum(1 for r in self._running.values() if r.manager_id is not None and not r.finished.is_set())

    async def abort(self, request_ids: Sequence[str]) -> None:
        for run in [self._running[i] for i in request_ids if i in self._running]:
            self._stop(run)

    def _stop(self, run: _Running) -> None:
        run.aborted = True
        if run.manager_id is not None and self._manager is not None and not run.finished.is_set():
            self._manager.cancel_request(run.manager_id)
        self._end(run)

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.KEEP:
            raise ValueError("interrupt.mode keep is not possible with hf_infer; use resume")
        self._serving.clear()
        for run in list(self._running.values()):
            if run.manager_id is not None:
                self._stop(run)
        # The step under way still ends; after it the manager has nothing to do.
        async with self._starting:
            if self._manager is not None:
                manager, self._manager, self._sampling = self._manager, None, None
                await asyncio.to_thread(manager.stop, True)

    async def resume(self) -> None:
        if self._updating:
            raise RuntimeError("resume during a weight update: the weights are incomplete; finish and commit it first")
        self._serving.set()

    async def begin_update(self, plan: UpdatePlan) -> None:
        if self._serving.is_set():
            raise RuntimeError("begin_update on a running engine; pause it first")
        self._updating = True
        self._plan, self._digest = plan, Digest(plan.verify)
        self._missing = {name for name, _ in self._model.named_parameters()}

    async def load_bucket(self, bucket: Bucket) -> None:
        if not self._updating:
            raise RuntimeError("load_bucket without begin_update")
        await asyncio.to_thread(self._copy, bucket)

    def _copy(self, bucket: Bucket) -> None:
        import torch

        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for slot, raw, tensor in RECEIVERS[self._plan.transport](bucket):
                self._digest.update(slot, raw)
                if slot.name not in parameters:
                    raise RuntimeError(f"the model has no parameter {slot.name}")
                parameters[slot.name].copy_(tensor)
                self._missing.discard(slot.name)

    async def finish_update(self) -> str:
        if self._missing:
            raise RuntimeError(f"weight update is incomplete: {sorted(self._missing)[:3]} did not come")
        return self._digest.hexdigest()

    async def commit(self, version: WeightVersion) -> None:
        self._version = version
        self._updating = False

    def load(self) -> EngineLoad:
        active = self._active()
        free = 1 - active / max(1, self._settings.max_running)
        return EngineLoad(running=active, waiting=len(self._running) - active, free_kv_fraction=max(0.0, free))

    async def close(self) -> None:
        for run in list(self._running.values()):
            self._stop(run)
        if self._manager is not None:
            await asyncio.to_thread(self._manager.stop, True)


def _key(sampling: SamplingParams) -> _SamplingKey:
    return (sampling.temperature, sampling.top_k, sampling.top_p)


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(e.wait()) for e in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _completion(run: _Running, stop_ids: set[int], now_s: float) -> Completion:
    tokens, reason = run.tokens, FinishReason.LENGTH
    stops = [i for i, token in enumerate(tokens) if token in stop_ids]
    if stops:  # a stop id of the request that the manager does not know ends the text here
        tokens, reason = tokens[: stops[0] + 1], FinishReason.STOP
    elif run.aborted:
        reason = FinishReason.ABORT
    versions = run.versions[: len(tokens)]
    return Completion(
        request_id=run.request.request_id,
        token_ids=array("i", tokens),
        logprobs=array("f", run.logprobs[: len(tokens)]),
        version_runs=tuple((v, len(list(same))) for v, same in groupby(versions)),
        finish_reason=reason,
        generation_s=now_s - run.started_s,
    )
