"""vLLM's AsyncLLM behind the Engine protocol, on CPU and on CUDA. Versions 0.26 to 0.32 are known.

One behaviour log-prob per token, of the distribution really sampled from (`processed_logprobs`: after temperature,
top-k, top-p). One weight version per token: vLLM labels every decoding step with the version set by `commit`.
"""

from __future__ import annotations

import asyncio
import pickle
from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, TypedDict

from roll_async.config.engine_traits import ENGINE_TRAITS
from roll_async.inference.engine import FINISH_REASONS, Engine, Ticket, Tokens, expert_record
from roll_async.inference.protocol import EngineLoad, EngineMemory, PauseMode
from roll_async.inference.settings import EngineSettings
from roll_async.inference.sleeping import SleepState
from roll_async.inference.vllm.adapters import adapter_request
from roll_async.inference.vllm.arguments import engine_arguments, in_this_process, prepare_environment
from roll_async.inference.vllm.failure import core_alive, start_errors
from roll_async.inference.vllm.load import SchedulerReader, StatisticsReader, VllmLoadReader
from roll_async.inference.vllm.progress import ProgressReader
from roll_async.schema import Completion, GenerateRequest, SamplingParams, WeightVersion, merge_runs
from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.digest import of_replica

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(eq=False, slots=True)
class VllmTicket(Ticket):
    """A request, and what vLLM says of having it."""

    internal_id: str | None = None
    """vLLM's own id of the request, once it has one."""
    handed_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when vLLM has the request or has rejected it; an abort is effective from then on."""


class VllmEngine(Engine[VllmTicket]):
    """One replica; `inference/engine.py: Engine` says what each method does."""

    traits, ticket_type = ENGINE_TRAITS["vllm"], VllmTicket

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._in_process = in_this_process(settings)
        self._beside = False
        """The update under way may run beside a step."""
        self._kv_tokens = self._num_scored = 0
        self._labels_tokens = True
        """Whether this vLLM reports the weight version of every token; older releases do not."""
        self._worker_bytes = (0, 0)
        """(weights, KV cache) of all workers, as they said last."""

    def import_library(self) -> None:
        prepare_environment(self._settings)
        with start_errors():
            import_module(f"{__package__}.in_process" if self._in_process else "vllm.v1.engine.async_llm")

    async def start(self) -> None:
        settings = self._settings
        prepare_environment(settings)
        with start_errors():
            self._llm, self._load_reader = self._new_llm()
        from vllm.outputs import CompletionOutput

        cache = self._llm.vllm_config.cache_config
        self._kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._labels_tokens = "weight_versions" in {f.name for f in fields(CompletionOutput)}
        if not self._labels_tokens:
            self._cannot_keep = "needs a vLLM that labels tokens with weight versions"
        self._progress = ProgressReader(self._llm, labelled=self._labels_tokens)
        await self._label(self._version)
        if settings.adapter is not None:
            await self._workers("roll_start_adapter")
        await self._measure_memory()

    def _library(self) -> AbstractContextManager[None]:
        return core_alive()

    def _new_llm(self) -> tuple[AsyncLLM, VllmLoadReader]:
        """vLLM with its core in a separate process, or in this one, and who reads its load."""
        arguments = engine_arguments(self._settings)
        if self._in_process:
            from roll_async.inference.vllm.in_process import InProcessLLM

            own = InProcessLLM(arguments)
            block_tokens = own.vllm_config.cache_config.block_size
            return own, SchedulerReader(own.scheduler, block_tokens)  # type: ignore[return-value]  # all that is called here
        from vllm.v1.engine.async_llm import AsyncLLM

        reader = StatisticsReader()
        llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[reader])  # pyright: ignore[reportArgumentType]
        cache = llm.vllm_config.cache_config
        reader.started(llm, ((cache.num_gpu_blocks or 1) - 1) * cache.block_size)  # one block stands for none
        return llm, reader

    async def _label(self, version: WeightVersion | None) -> None:
        if self._labels_tokens and version is not None:
            await self._llm.update_weight_version(str(version))

    async def _generate(self, ticket: VllmTicket) -> Completion:
        recorded_from = ticket.request.recorded_positions if self._settings.record_experts else None
        output = (await self._run(ticket, _sampling(ticket.request.sampling, ticket.budget, recorded_from))).outputs[0]
        return self._answer(ticket, output)

    async def _run(self, ticket: VllmTicket, sampling):  # noqa: ANN001, ANN202 (vLLM's types)
        """The final output of one request."""
        from vllm.outputs import RequestOutput

        request = ticket.request
        # With its type it is taken as it is; without, a thread looks first whether it must be tokenized.
        rendered = {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
        adapter = None if self._settings.adapter is None else adapter_request()
        try:
            queue = await self._llm.add_request(request.request_id, rendered, sampling, lora_request=adapter)  # pyright: ignore[reportArgumentType]
            ticket.internal_id = queue.request_id
        finally:
            ticket.handed_over.set()  # also where it was rejected: an abort waits for it
        try:
            result = await queue.get()  # FINAL_ONLY: the first output is the last
        except asyncio.CancelledError:
            await self._llm.abort(queue.request_id, internal=True)
            raise
        assert isinstance(result, RequestOutput)  # not an embedding
        return result

    async def _score(self, token_ids: Sequence[int]) -> array:
        """By a request of its own, which a pause ends: its tokens would be read under two versions."""
        self._num_scored += 1  # rows are scored at the same time, and two requests cannot share an id
        request = GenerateRequest(
            request_id=f"score-{self._num_scored}",
            prompt_token_ids=array("i", token_ids),
            sampling=SamplingParams(max_new_tokens=1),
        )
        with self._open(request) as ticket:
            output = await self._run(ticket, _scoring()) if await self._admitted(ticket) else None
        rows = None if output is None else output.prompt_logprobs
        if not rows:
            raise RuntimeError("the replica was paused before it had scored")
        # The first token has nothing before it, so no log-prob.
        return array("f", [(row or {})[token].logprob for row, token in zip(rows[1:], token_ids[1:], strict=True)])

    def _so_far(self, ticket: VllmTicket, start: int) -> Tokens | None:
        if ticket.internal_id is None:
            return None
        return self._progress.read(ticket.internal_id, start, ticket.held_back, ticket.version)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._llm.get_tokenizer().decode(list(token_ids))

    async def _abort(self, tickets: Sequence[VllmTicket]) -> None:
        await self._handed_over(tickets)
        if running := [ticket.request.request_id for ticket in tickets if not ticket.done.is_set()]:
            await self._llm.abort(running)

    async def _handed_over(self, tickets: Iterable[VllmTicket]) -> None:
        """vLLM ignores an abort of a request it has not got yet, and would run it to its end."""
        await asyncio.gather(*(ticket.handed_over.wait() for ticket in tickets))

    async def _halt(self, mode: PauseMode, tickets: Sequence[VllmTicket]) -> None:
        await self._handed_over(tickets)
        # Here, and not at the commit, the prefix cache is emptied, or vLLM raises. Kept requests go on with the KV of
        # the old weights; where prompts share blocks they compute it again, or a request that begins under the new
        # weights would read what an old one wrote.
        clear = mode is PauseMode.ABORT or self._settings.enable_prefix_caching
        # Not `pause_generation`: it sleeps for 20 ms in case somebody expects the outputs, who are awaited by `pause`.
        await self._llm.engine_core.pause_scheduler_async(mode=mode.value, clear_cache=clear)

    async def _go_on(self) -> None:
        await self._llm.resume_generation()

    # Weights: the workers receive their own parts, see `vllm_worker_extension.py`. An unfinished update is given up
    # there as the next one begins.

    async def _begin(self, plan: UpdatePlan) -> None:
        # Staged, it touches no weights before the commit: a core in this process does it beside the step under way.
        self._beside = self._in_process and not self.loads_in_place(plan)
        await self._workers("roll_begin_update", pickle.dumps(plan), beside=self._beside)

    async def _take_in(self, bucket: Bucket) -> None:
        await self._workers("roll_load_bucket", pickle.dumps(bucket), beside=self._beside)

    async def _digest(self) -> str:
        digests = await self._workers("roll_finish_update", beside=self._beside)
        # Every stage receives what its tensor ranks keep of all layers, so all stages have one digest.
        size = self._settings.tensor_parallel_size
        stages = {of_replica(digests[start : start + size]) for start in range(0, len(digests), size)}
        if len(stages) != 1:
            raise RuntimeError(f"pipeline stages of one replica hold different weights: {sorted(stages)}")
        return stages.pop()

    async def _swap(self, version: WeightVersion) -> None:
        await self._workers("roll_commit")
        await self._label(version)

    async def _workers(self, method: str, *args: object, beside: bool = False) -> list:
        """Call `vllm_worker_extension.py` on every worker. Raises RuntimeError with the first worker's error."""
        if beside:
            answers = await self._llm.rpc_beside("roll_call", (method, *args))  # pyright: ignore[reportAttributeAccessIssue]
        else:
            answers = await self._llm.collective_rpc("roll_call", args=(method, *args))
        error = next((error for _, error in answers if error), None)
        if error is not None:
            raise RuntimeError(error)
        return [result for result, _ in answers]

    # Sleep

    async def _release(self, level: int) -> None:
        if self._settings.device == "cpu":  # vLLM cannot sleep on CPU
            await self._workers("roll_sleep", level)
        else:
            if level == 2:
                await self._workers("roll_forget_frozen")
            await self._llm.sleep(level)
        await self._measure_memory()

    async def _restore(self, tags: Sequence[str]) -> None:
        if self._settings.device == "cpu":
            await self._workers("roll_wake", list(tags))
        else:
            await self._llm.wake_up(list(tags))
        await self._measure_memory()

    async def _measure_memory(self) -> None:
        weights, kv_cache = map(sum, zip(*await self._workers("roll_memory"), strict=True))
        self._worker_bytes = weights, kv_cache

    def memory(self) -> EngineMemory:
        weights, kv_cache = self._worker_bytes
        if self._settings.device == "cpu":
            return EngineMemory(weights_bytes=weights, kv_cache_bytes=kv_cache)
        state = self._sleep.state  # decides on GPUs: the sleeping allocator keeps addresses without memory
        return EngineMemory(
            weights_bytes=0 if state is SleepState.ASLEEP else weights,
            kv_cache_bytes=kv_cache if state is SleepState.AWAKE else 0,
            host_weights_bytes=weights if state is SleepState.ASLEEP and self._sleep.level == 1 else 0,
        )

    def load(self) -> EngineLoad:
        requests, told = len(self._tickets), self._load_reader.read()
        running = min(requests, self._settings.max_running if told is None else told.running)
        kv = None if told is None else told.kv
        if kv is not None and not requests:  # the last requests were aborted, and no step has told of it
            kv = replace(kv, free_tokens=kv.total_tokens)
        return self._load_report(running, kv, self._kv_tokens)

    async def close(self) -> None:
        await self._end(self._tickets.values())
        self._llm.shutdown()
        del self._llm, self._progress, self._load_reader  # its finalizer fails if it runs only at interpreter shutdown

    def _answer(self, ticket: VllmTicket, output) -> Completion:  # noqa: ANN001 (vLLM's CompletionOutput)
        token_ids, runs = array("i", output.token_ids), ()
        if token_ids and self._labels_tokens:
            runs = merge_runs(
                tuple((int(s.version), s.end - s.start) for s in output.weight_versions if s.end > s.start)
            )
        elif token_ids:
            runs = ((ticket.version, len(token_ids)),)  # without labels nothing outlives a weight update
        tokens = Tokens(token_ids, array("f", _sampled_logprobs(output.logprobs, output.token_ids)), runs)
        experts = expert_record(output.routed_experts) if self._settings.record_experts else None
        return self._completion(ticket, tokens, FINISH_REASONS[output.finish_reason], experts)


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
