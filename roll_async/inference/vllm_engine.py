"""vLLM's AsyncLLM behind the Engine protocol, on CPU and on CUDA.

One behaviour log-prob per token, of the distribution really sampled from (`processed_logprobs`: after temperature,
top-k, top-p). One
weight version per token: vLLM labels every decoding step with the version set by `commit`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from array import array
from collections.abc import Sequence
from itertools import groupby

from roll_async.inference.protocol import EngineCapabilities, EngineLoad, PauseMode
from roll_async.inference.settings import TORCH_DTYPES, EngineSettings
from roll_async.schema import Completion, FinishReason, GenerateRequest, SamplingParams, VersionRuns, WeightVersion
from roll_async.weight_sync.bucket import Bucket, UpdatePlan

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def prepare_environment(device: str) -> None:
    """Set what vLLM reads at import. Call it in the engine's process before anything imports vllm."""
    os.environ.update(HF_HUB_OFFLINE=os.environ.get("HF_HUB_OFFLINE", "1"), VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    if device == "cpu":
        # Without it the first token waits 20 s for the inductor; `uni` keeps worker and scheduler in one child process.
        os.environ.update(TORCHDYNAMO_DISABLE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_TARGET_DEVICE="cpu")


class _Ticket:
    """One request inside the engine."""

    def __init__(self) -> None:
        self.started = False
        self.aborted = asyncio.Event()
        self.done = asyncio.Event()


class VllmEngine:
    """One replica. See `inference/protocol.py: Engine` for the contract of each method."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._version: WeightVersion | None = None if settings.random_weights else 0
        self._running: dict[str, _Ticket] = {}
        self._updating = False
        self._serving = asyncio.Event()
        self._serving.set()

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(keep_in_place=True, prefix_caching=self._settings.enable_prefix_caching)

    @property
    def version(self) -> WeightVersion | None:
        return self._version

    async def start(self) -> None:
        settings = self._settings
        prepare_environment(settings.device)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments: dict[str, object] = {
            "model": settings.model_folder,
            "dtype": TORCH_DTYPES[settings.dtype],
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_running,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "seed": settings.seed,
            "load_format": "dummy" if settings.random_weights else "auto",
            "enforce_eager": settings.enforce_eager or settings.device == "cpu",
            "enable_prefix_caching": settings.enable_prefix_caching,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "pipeline_parallel_size": settings.pipeline_parallel_size,
            "quantization": settings.quantization,
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "worker_extension_cls": "roll_async.inference.vllm_worker_extension.WeightUpdateExtension",
        }
        if settings.block_size is not None:
            arguments["block_size"] = settings.block_size
        if settings.device == "cpu":
            arguments |= {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": settings.cpu_kv_cache_bytes}
        else:
            arguments["gpu_memory_utilization"] = settings.memory_fraction
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, **settings.extra))  # type: ignore[arg-type]
        if self._version is not None:
            await self._llm.update_weight_version(str(self._version))

    async def generate(self, request: GenerateRequest) -> Completion:
        room = self._settings.max_model_len - len(request.prompt_token_ids)
        if room < 1:
            raise ValueError(
                f"request {request.request_id}: {len(request.prompt_token_ids)} prompt tokens leave no room in max_model_len "
                f"{self._settings.max_model_len}"
            )
        loop = asyncio.get_running_loop()
        submitted = loop.time()
        ticket = self._running[request.request_id] = _Ticket()
        try:
            if not await self._admitted(ticket):
                return _nothing(request.request_id, loop.time() - submitted)
            output = None
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            async for item in self._llm.generate(prompt, _sampling(request.sampling, room), request.request_id):
                output = item.outputs[0]
            if output is None:
                raise RuntimeError(f"vLLM ended request {request.request_id} without an output")
            return self._completion(request.request_id, output, loop.time() - submitted)
        finally:
            del self._running[request.request_id]
            ticket.done.set()

    async def _admitted(self, ticket: _Ticket) -> bool:
        """Wait while the engine is paused; False when the request is aborted meanwhile."""
        while not self._serving.is_set() and not ticket.aborted.is_set():
            waits = [asyncio.ensure_future(e.wait()) for e in (self._serving, ticket.aborted)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        ticket.started = not ticket.aborted.is_set()
        return ticket.started

    async def abort(self, request_ids: Sequence[str]) -> None:
        tickets = {i: self._running[i] for i in request_ids if i in self._running}
        for ticket in tickets.values():
            ticket.aborted.set()
        started = [i for i, ticket in tickets.items() if ticket.started]
        if started:
            await self._llm.abort(started)
        await asyncio.gather(*(ticket.done.wait() for ticket in tickets.values()))

    async def pause(self, mode: PauseMode) -> None:
        self._serving.clear()
        # KEEP recomputes the KV of kept requests after resume: blocks computed under old weights must not be shared.
        await self._llm.pause_generation(mode=mode.value, clear_cache=True)
        if mode is PauseMode.ABORT:
            await asyncio.gather(*(t.done.wait() for t in list(self._running.values()) if t.started))

    async def resume(self) -> None:
        if self._updating:
            raise RuntimeError("resume during a weight update: the weights are incomplete; finish and commit it first")
        await self._llm.resume_generation()
        self._serving.set()

    async def begin_update(self, plan: UpdatePlan) -> None:
        if self._serving.is_set():
            raise RuntimeError("begin_update on a running engine; pause it first")
        self._updating = True
        await self._llm.collective_rpc("roll_begin_update", args=(plan.transport, plan.verify))

    async def load_bucket(self, bucket: Bucket) -> None:
        if not self._updating:
            raise RuntimeError("load_bucket without begin_update")
        await self._llm.collective_rpc("roll_load_bucket", args=(pickle.dumps(bucket),))

    async def finish_update(self) -> str:
        digests = set(await self._llm.collective_rpc("roll_finish_update"))
        if len(digests) != 1:
            raise RuntimeError(f"workers of one replica hold different weights: {sorted(digests)}")
        await self._llm.reset_prefix_cache()
        return digests.pop()

    async def commit(self, version: WeightVersion) -> None:
        await self._llm.update_weight_version(str(version))
        self._version = version
        self._updating = False

    def load(self) -> EngineLoad:
        running = min(len(self._running), self._settings.max_running)
        return EngineLoad(running=running, waiting=len(self._running) - running, free_kv_fraction=1.0)

    async def close(self) -> None:
        self._llm.shutdown()

    def _completion(self, request_id: str, output, seconds: float) -> Completion:  # noqa: ANN001 (vLLM's CompletionOutput)
        tokens = array("i", output.token_ids)
        spans = output.weight_versions
        if spans:
            runs: VersionRuns = tuple((int(s.version), s.end - s.start) for s in spans if s.end > s.start)
        else:
            runs = ((self._version or 0, len(tokens)),) if tokens else ()
        return Completion(
            request_id=request_id,
            token_ids=tokens,
            logprobs=array("f", _sampled_logprobs(output.logprobs, output.token_ids)),
            version_runs=_merge(runs),
            finish_reason=_REASONS[output.finish_reason],
            generation_s=seconds,
        )


def _nothing(request_id: str, seconds: float) -> Completion:
    """A request that was aborted before it began."""
    return Completion(
        request_id=request_id,
        token_ids=array("i"),
        logprobs=array("f"),
        version_runs=(),
        finish_reason=FinishReason.ABORT,
        generation_s=seconds,
    )


def _sampling(params: SamplingParams, room: int):  # noqa: ANN202 (vLLM's SamplingParams, imported late)
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    return VllmSampling(
        max_tokens=min(params.max_new_tokens, room),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        repetition_penalty=params.repetition_penalty,
        stop=list(params.stop_strings) or None,
        include_stop_str_in_output=params.include_stop_str_in_output,
        stop_token_ids=list(params.stop_token_ids) or None,
        detokenize=bool(params.stop_strings),
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sampled_logprobs(logprobs, token_ids: Sequence[int]) -> list[float]:  # noqa: ANN001 (vLLM's FlatLogprobs)
    """One per token: with `logprobs=0` each position holds exactly the sampled token."""
    assert len(logprobs.logprobs) == len(token_ids), "one log-prob per sampled token"
    return logprobs.logprobs


def _merge(runs: VersionRuns) -> VersionRuns:
    return tuple((v, sum(n for _, n in part)) for v, part in groupby(runs, key=lambda run: run[0]))
