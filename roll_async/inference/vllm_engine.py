"""vLLM's AsyncLLM behind the Engine protocol, on CPU and on CUDA. Versions 0.26 to 0.32 are known.

One behaviour log-prob per token, of the distribution really sampled from (`processed_logprobs`: after temperature,
top-k, top-p). One weight version per token: vLLM labels every decoding step with the version set by `commit`.
"""

from __future__ import annotations

import asyncio
import pickle
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from roll_async.inference.engine import check_scored, first_of, held_back, token_budget
from roll_async.inference.protocol import EngineCapabilities, EngineLoad, EngineMemory, PauseMode
from roll_async.inference.settings import EngineSettings
from roll_async.inference.sleeping import SleepRules, SleepState, levels_up_to
from roll_async.inference.vllm_adapters import adapter_request
from roll_async.inference.vllm_arguments import engine_arguments, in_this_process, prepare_environment
from roll_async.inference.vllm_failure import core_alive, start_errors
from roll_async.inference.vllm_load import SchedulerReader, StatisticsReader, VllmLoadReader
from roll_async.inference.vllm_progress import ProgressReader
from roll_async.schema import (
    Completion,
    ExpertRecord,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    VersionRuns,
    WeightVersion,
    merge_runs,
)
from roll_async.weight_sync.bucket import STAGED, Bucket, UpdatePlan
from roll_async.weight_sync.digest import of_replica
from roll_async.weight_sync.errors import update_errors

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(eq=False, slots=True)
class _Ticket:
    """One request inside the engine."""

    num_tokens: int
    """Largest number of tokens that the request can hold in the KV cache."""
    admitted: bool = False
    version: WeightVersion = 0
    """Weight version that was served when the request was admitted."""
    submitted_s: float = 0.0
    held_back: int = 0
    """Last tokens that may be the beginning of a stop string: not reported before the request ends."""
    internal_id: str | None = None
    """vLLM's own id of the request, once it has one."""
    handed_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when vLLM has the request or has rejected it; an abort is effective from then on."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class VllmEngine:
    """One replica; `inference/engine.py: Engine` says what each method does."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings, self._in_process = settings, in_this_process(settings)
        self._version: WeightVersion | None = None if settings.random_weights else 0
        self._running: dict[str, _Ticket] = {}
        self._mixed = settings.random_weights
        """The model holds no whole version: nothing is generated until the next commit."""
        self._transport: str | None = None
        self._kv_tokens = self._num_scored = 0
        self._sleep = SleepRules(levels_up_to(settings.sleep_level))
        self._held = EngineMemory(weights_bytes=0, kv_cache_bytes=0)
        self._labels_tokens = True
        """Whether this vLLM reports the weight version of every token; older releases do not."""
        self._serving = asyncio.Event()
        if not settings.random_weights:
            self._serving.set()

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(keep_in_place=self._labels_tokens)

    @property
    def version(self) -> WeightVersion | None:
        return self._version

    async def start(self) -> None:
        settings = self._settings
        prepare_environment(settings)
        with start_errors():
            self._llm, self._load_reader = self._new_llm()
        from vllm.outputs import CompletionOutput

        cache = self._llm.vllm_config.cache_config
        self._kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._labels_tokens = "weight_versions" in {f.name for f in fields(CompletionOutput)}
        self._progress = ProgressReader(self._llm, labelled=self._labels_tokens)
        await self._label(self._version)
        if settings.adapter is not None:
            await self._workers("roll_start_adapter")
        await self._measure_memory()

    def _new_llm(self) -> tuple[AsyncLLM, VllmLoadReader]:
        """vLLM with its core in a separate process, or in this one, and who reads its load."""
        arguments = engine_arguments(self._settings)
        if self._in_process:
            from roll_async.inference.vllm_in_process import InProcessLLM

            own = InProcessLLM(arguments)
            block_tokens = own.vllm_config.cache_config.block_size
            return own, SchedulerReader(own.scheduler, block_tokens)  # type: ignore[return-value]  # all that is called here
        from vllm.v1.engine.async_llm import AsyncLLM

        reader = StatisticsReader()
        llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[reader])  # pyright: ignore[reportArgumentType]
        cache = llm.vllm_config.cache_config
        reader.started(llm, ((cache.num_gpu_blocks or 1) - 1) * cache.block_size)
        return llm, reader

    async def _label(self, version: WeightVersion | None) -> None:
        if self._labels_tokens and version is not None:
            await self._llm.update_weight_version(str(version))

    async def generate(self, request: GenerateRequest) -> Completion:
        self._sleep.need_awake(f"request {request.request_id}")
        prompt, max_tokens = list(request.prompt_token_ids), token_budget(request, self._settings)
        loop = asyncio.get_running_loop()
        submitted = loop.time()
        ticket = self._running[request.request_id] = _Ticket(
            num_tokens=len(prompt) + max_tokens,
            submitted_s=submitted,
            held_back=held_back(request, self._settings),
        )
        try:
            if not await self._admitted(ticket):
                return Completion.empty(request.request_id, generation_s=loop.time() - submitted)
            recorded_from = request.recorded_positions if self._settings.record_experts else None
            sampling = _sampling(request.sampling, max_tokens, recorded_from)
            output = (await self._run(request.request_id, prompt, sampling, ticket)).outputs[0]
            return self._completion(request.request_id, output, ticket.version, loop.time() - submitted)
        finally:
            del self._running[request.request_id]
            ticket.handed_over.set()
            ticket.done.set()

    async def _run(self, request_id: str, prompt: list[int], sampling, ticket: _Ticket):  # noqa: ANN001, ANN202 (vLLM's types)
        """The final output of one request."""
        from vllm.outputs import RequestOutput

        with core_alive():
            # With its type it is taken as it is; without, a thread looks first whether it must be tokenized.
            rendered = {"type": "token", "prompt_token_ids": prompt}
            adapter = None if self._settings.adapter is None else adapter_request()
            queue = await self._llm.add_request(request_id, rendered, sampling, lora_request=adapter)  # pyright: ignore[reportArgumentType]
            ticket.internal_id = queue.request_id
            ticket.handed_over.set()
            try:
                result = await queue.get()  # FINAL_ONLY: the first output is the last
            except asyncio.CancelledError:
                await self._llm.abort(queue.request_id, internal=True)
                raise
        assert isinstance(result, RequestOutput)  # not an embedding
        return result

    async def score(self, token_ids: Sequence[int]) -> array:
        self._sleep.need_awake("score")
        check_scored(token_ids, self._settings.max_model_len)
        self._num_scored += 1
        name = f"score-{self._num_scored}"
        ticket = self._running[name] = _Ticket(
            num_tokens=len(token_ids) + 1, submitted_s=asyncio.get_running_loop().time(), held_back=0
        )
        try:
            output = (
                await self._run(name, list(token_ids), _scoring(), ticket) if await self._admitted(ticket) else None
            )
        finally:
            del self._running[name]
            ticket.handed_over.set()
            ticket.done.set()
        rows = None if output is None else output.prompt_logprobs
        if not rows:
            raise RuntimeError("the replica was paused before it had scored")
        return array("f", [(row or {})[token].logprob for row, token in zip(rows[1:], token_ids[1:], strict=True)])

    async def _admitted(self, ticket: _Ticket) -> bool:
        """Wait while the engine is paused; False when the request is aborted meanwhile."""
        while not self._serving.is_set() and not ticket.aborted.is_set():
            await first_of(self._serving, ticket.aborted)
        ticket.admitted, ticket.version = not ticket.aborted.is_set(), self._version or 0
        return ticket.admitted

    def progress(self, request_id: str, start: int) -> Completion | None:
        ticket = self._running.get(request_id)
        if ticket is None or ticket.internal_id is None:
            return None
        part = self._progress.read(ticket.internal_id, start, ticket.held_back, ticket.version)
        if part is None:
            return None
        return Completion(
            request_id=request_id,
            token_ids=part.token_ids,
            logprobs=part.logprobs,
            version_runs=part.version_runs,
            finish_reason=FinishReason.ABORT,
            generation_s=asyncio.get_running_loop().time() - ticket.submitted_s,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._llm.get_tokenizer().decode(list(token_ids))

    async def abort(self, request_ids: Sequence[str]) -> None:
        tickets = {i: self._running[i] for i in request_ids if i in self._running}
        for ticket in tickets.values():
            ticket.aborted.set()
        await self._handed_over(tickets.values())
        running = {i: ticket for i, ticket in tickets.items() if ticket.admitted and not ticket.done.is_set()}
        if running:
            with core_alive():
                await self._llm.abort(list(running))
        await asyncio.gather(*(ticket.done.wait() for ticket in tickets.values()))

    async def _handed_over(self, tickets: Iterable[_Ticket]) -> None:
        """vLLM ignores an abort of a request it has not got yet, and would run it to its end."""
        await asyncio.gather(*(ticket.handed_over.wait() for ticket in tickets if ticket.admitted))

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.KEEP and not self._labels_tokens:
            raise ValueError("interrupt.mode keep needs a vLLM that labels tokens with weight versions; use resume")
        self._serving.clear()
        admitted = [t for t in self._running.values() if t.admitted]
        await self._handed_over(admitted)
        # Here, and not at the commit, the prefix cache is emptied, or vLLM raises. Kept requests go on with the KV of
        # the old weights; where prompts share blocks they compute it again, or a request that begins under the new
        # weights would read what an old one wrote.
        clear = mode is PauseMode.ABORT or self._settings.enable_prefix_caching
        # Not `pause_generation`: it sleeps for 20 ms in case somebody expects the outputs, who are awaited below.
        with core_alive():
            await self._llm.engine_core.pause_scheduler_async(mode=mode.value, clear_cache=clear)
        if mode is PauseMode.ABORT:
            await asyncio.gather(*(t.done.wait() for t in admitted))

    async def resume(self) -> None:
        self._sleep.need_awake("resume")
        if self._mixed:
            raise RuntimeError("resume without whole weights: the last update did not come to its commit")
        with core_alive():
            await self._llm.resume_generation()
        self._serving.set()

    async def begin_update(self, plan: UpdatePlan) -> None:
        self._sleep.need_weights("begin_update")
        in_place = plan.transport not in STAGED
        if in_place and self._serving.is_set():
            raise RuntimeError(f"begin_update over {plan.transport} changes the served weights; pause the engine first")
        self._mixed = self._mixed or in_place
        self._transport = plan.transport
        with update_errors("begin_update"):
            await self._stage("roll_begin_update", pickle.dumps(plan))

    async def load_bucket(self, bucket: Bucket) -> None:
        if self._transport is None:
            raise RuntimeError("load_bucket without begin_update")
        with update_errors("load_bucket"):
            await self._stage("roll_load_bucket", pickle.dumps(bucket))

    async def finish_update(self) -> str:
        if self._transport is None:
            raise RuntimeError("finish_update without begin_update")
        with update_errors("finish_update"):
            digests, size = await self._stage("roll_finish_update"), self._settings.tensor_parallel_size
            stages = {of_replica(digests[start : start + size]) for start in range(0, len(digests), size)}
            if len(stages) != 1:
                raise RuntimeError(f"pipeline stages of one replica hold different weights: {sorted(stages)}")
        return stages.pop()

    async def commit(self, version: WeightVersion) -> None:
        self._sleep.need_weights("commit")
        if self._transport is None:
            raise RuntimeError("commit without an update")
        if self._serving.is_set():
            raise RuntimeError("commit on a running engine; pause it first")
        with update_errors("commit"), core_alive():
            self._mixed = True
            await self._workers("roll_commit")
            await self._label(version)
        self._version, self._transport, self._mixed = version, None, False

    async def _stage(self, method: str, *args: object) -> list[str]:
        """Part of an update before its commit. With a staged transport it touches no weights: a core in this process
        does it beside the step under way.
        """
        beside = self._in_process and self._transport in STAGED
        return await self._workers(method, *args, beside=beside)

    async def _workers(self, method: str, *args: object, beside: bool = False) -> list:
        """Call `vllm_worker_extension.py` on every worker. Raises RuntimeError with the first worker's error."""
        with core_alive():
            if beside:
                answers = await self._llm.rpc_beside("roll_call", (method, *args))  # pyright: ignore[reportAttributeAccessIssue]
            else:
                answers = await self._llm.collective_rpc("roll_call", args=(method, *args))
        error = next((error for _, error in answers if error), None)
        if error is not None:
            raise RuntimeError(error)
        return [result for result, _ in answers]

    @property
    def sleep_state(self) -> SleepState:
        return self._sleep.state

    async def sleep(self, level: int) -> None:
        running = sum(ticket.admitted for ticket in self._running.values())
        if not self._sleep.may_sleep(level, paused=not self._serving.is_set(), num_running=running):
            return
        self._transport = None  # an update in progress would write into released memory
        if level == 2:
            self._mixed = True
        if self._settings.device == "cpu":  # vLLM cannot sleep on CPU
            await self._workers("roll_sleep", level)
        else:
            if level == 2:
                await self._workers("roll_forget_frozen")
            await self._llm.sleep(level)
        self._sleep.fell_asleep(level)
        await self._measure_memory()

    async def wake(self, tags: Sequence[str]) -> None:
        wanted = self._sleep.to_wake(tags)
        if not wanted:
            return
        if self._settings.device == "cpu":
            await self._workers("roll_wake", list(wanted))
        else:
            await self._llm.wake_up(list(wanted))
        self._sleep.woke(wanted)
        await self._measure_memory()

    async def _measure_memory(self) -> None:
        """Memory that the workers hold. On GPUs the sleeping allocator keeps addresses without memory, so the sleep
        state decides.
        """
        weights, kv_cache = map(sum, zip(*await self._workers("roll_memory"), strict=True))
        if self._settings.device == "cpu":
            self._held = EngineMemory(weights_bytes=weights, kv_cache_bytes=kv_cache)
            return
        state = self._sleep.state
        self._held = EngineMemory(
            weights_bytes=0 if state is SleepState.ASLEEP else weights,
            kv_cache_bytes=kv_cache if state is SleepState.AWAKE else 0,
            host_weights_bytes=weights if state is SleepState.ASLEEP and self._sleep.level == 1 else 0,
        )

    def memory(self) -> EngineMemory:
        return self._held

    def load(self) -> EngineLoad:
        requests, claimed = len(self._running), sum(t.num_tokens for t in self._running.values())
        told = self._load_reader.read()
        running = min(requests, self._settings.max_running if told is None else told.running)
        kv = None if told is None else told.kv
        if kv is not None and not requests:  # the last requests were aborted, and no step has told of it
            kv = replace(kv, free_tokens=kv.total_tokens)
        return EngineLoad(
            running=running,
            waiting=requests - running,
            free_kv_fraction=max(0.0, 1 - claimed / max(1, self._kv_tokens)),
            kv=kv,
        )

    async def close(self) -> None:
        await self.abort(list(self._running))
        self._llm.shutdown()
        del self._llm, self._progress, self._load_reader  # its finalizer fails if it runs only at interpreter shutdown

    def _completion(self, request_id: str, output, version: WeightVersion, seconds: float) -> Completion:  # noqa: ANN001
        """From vLLM's CompletionOutput. Without labels nothing outlives a weight update, so one version is all."""
        tokens = array("i", output.token_ids)
        runs: VersionRuns = ((version, len(tokens)),) if tokens else ()
        if self._labels_tokens and tokens:
            runs = tuple((int(s.version), s.end - s.start) for s in output.weight_versions if s.end > s.start)
        return Completion(
            request_id=request_id,
            token_ids=tokens,
            logprobs=array("f", _sampled_logprobs(output.logprobs, output.token_ids)),
            version_runs=merge_runs(runs),
            finish_reason=_REASONS[output.finish_reason],
            generation_s=seconds,
            experts=expert_record(output.routed_experts) if self._settings.record_experts else None,
        )


def expert_record(routed: np.ndarray | None) -> ExpertRecord | None:
    """From vLLM's [positions, layers, experts per token], uint8 or uint16; layers without experts hold nothing of
    meaning.
    """
    if routed is None:
        return None
    kind, typecode = (np.uint8, "B") if routed.dtype == np.uint8 else (np.int16, "h")
    ids = array(typecode)
    ids.frombytes(np.ascontiguousarray(routed, dtype=kind).tobytes())
    return ExpertRecord(ids=ids, num_layers=routed.shape[1], top_k=routed.shape[2])


class _NewParameter(TypedDict, total=False):
    """A sampling parameter that the oldest supported vLLM does not have."""

    routed_experts_prompt_start: int


@lru_cache(maxsize=1024)
def _sampling(params: SamplingParams, max_tokens: int, recorded_from: int | None):  # noqa: ANN202 (vLLM's, imported late)
    """`recorded_from`: position that the record of experts begins with; None = nothing is recorded."""
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    recorded: _NewParameter = {} if recorded_from is None else {"routed_experts_prompt_start": recorded_from}
    return VllmSampling(
        max_tokens=max_tokens,
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
        **recorded,
    )


@lru_cache(maxsize=1)
def _scoring():  # noqa: ANN202 (vLLM's, imported late)
    """Log-probs of the prompt only; vLLM samples at least one token."""
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    return VllmSampling(
        max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def _sampled_logprobs(logprobs, token_ids: Sequence[int]) -> list[float]:  # noqa: ANN001 (vLLM's FlatLogprobs)
    """One per token: with `logprobs=0` each position holds exactly the sampled token."""
    assert len(logprobs.logprobs) == len(token_ids), "one log-prob per sampled token"
    return logprobs.logprobs
