"""SGLang behind the Engine protocol, on CUDA (and on CPU where its kernels have been replaced, as in the tests).

Its schedulers are processes of their own, one per device; this one holds its tokenizer manager. One behaviour log-prob
per token, of the distribution really sampled from: after temperature, and with top-k or top-p over what these leave
(SGLang's `sampling_mask`). One weight version per token, by SGLang's own spans.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll_async.inference.engine import check_scored, first_of, held_back, token_budget
from roll_async.inference.hf_weights import WeightTargets
from roll_async.inference.protocol import EngineCapabilities, EngineLoad, EngineMemory, PauseMode
from roll_async.inference.settings import TORCH_DTYPES, EngineSettings
from roll_async.inference.sglang_arguments import (
    engine_arguments,
    kv_bytes_per_token,
    leave_failures_to_the_start,
    prepare_environment,
)
from roll_async.inference.sglang_load import SglangLoadReader
from roll_async.inference.sglang_session import WeightSession
from roll_async.inference.sleeping import KV_CACHE, WEIGHTS, SleepRules, SleepState, levels_up_to
from roll_async.inference.staging import Incoming
from roll_async.schema import (
    Completion,
    ExpertRecord,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    VersionRuns,
    WeightVersion,
    cut_runs,
    merge_runs,
)
from roll_async.weight_sync.bucket import STAGED, Bucket, UpdatePlan
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.errors import EngineDead, update_errors

_ABORT_AGAIN_S = 0.1
"""Interval of repeated aborts: SGLang loses the abort of a request that has not reached its scheduler yet."""
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(eq=False, slots=True)
class _SglangRequest:
    """One request and its tokens so far."""

    request: GenerateRequest
    budget: int
    started_s: float
    wire_id: str
    held_back: int
    """Last tokens that may be the beginning of a stop string: not reported before the request ends."""
    admitted: bool = False
    version: WeightVersion = 0
    """Weight version that was served when the request was admitted."""
    output: dict[str, Any] = field(default_factory=dict)
    """SGLang's latest output: all tokens so far."""
    task: asyncio.Task | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class SglangEngine:
    """One replica; `inference/engine.py: Engine` says what each method does."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._version: WeightVersion | None = None if settings.random_weights else 0
        self._mixed = settings.random_weights
        """The model holds no whole version: nothing is generated until the next commit."""
        self._running: dict[str, _SglangRequest] = {}
        self._incoming: Incoming | None = None
        """An update that waits in the memory of this process."""
        self._ranks_receive = False
        """An update that the ranks receive themselves."""
        self._kept = LastExport()
        self._failed = False
        # On CUDA SGLang decides at the start whether it keeps a copy of the weights on the host.
        levels = levels_up_to(settings.sleep_level)
        self._sleep = SleepRules(levels if settings.device == "cpu" else levels[-1:])
        self._serving = asyncio.Event()
        if not settings.random_weights:
            self._serving.set()

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(keep_in_place=True)

    @property
    def version(self) -> WeightVersion | None:
        return self._version

    async def start(self) -> None:
        settings = self._settings
        prepare_environment(settings)
        self._read_config()
        arguments = engine_arguments(settings, self._text_config)
        import sglang

        try:
            self._engine = sglang.Engine(**arguments, custom_sigquit_handler=leave_failures_to_the_start)
        except TypeError as error:
            raise ValueError(f"strategy_config.extra: {error}") from error
        self._manager = self._engine.tokenizer_manager
        self._manager.signal_handler_class = self._signals
        self._kv_tokens = self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
        self._load_reader = SglangLoadReader(self._manager, self._kv_tokens)
        self._session = await WeightSession.over(self._manager, settings)

    def _signals(self, manager: Any) -> Any:
        """What SGLang's manager does on signals, where it runs on the main thread: when one of its processes fails,
        the requests fail; by default SGLang would kill this process, whatever else it does.
        """
        from sglang.srt.managers.tokenizer_manager import SignalHandler

        handler = SignalHandler(manager)
        handler.running_phase_sigquit_handler = self._fail
        return handler

    def _fail(self) -> None:
        """Fail all requests after a scheduler has ended."""
        self._failed = True
        for run in self._running.values():
            if run.task is not None:
                run.task.cancel()

    def _need_alive(self) -> None:
        if self._failed:
            raise EngineDead("a process of SGLang has failed; its own log names the cause")

    def _read_config(self) -> None:
        """Names and sizes from the model's config alone."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self._settings.model_folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self._names = WeightTargets(model, config.model_type).names
        self._text_config = config.get_text_config()
        self._kv_bytes_per_token = kv_bytes_per_token(self._text_config, self._settings.dtype)
        size = getattr(torch, TORCH_DTYPES[self._settings.dtype]).itemsize
        self._weight_bytes = sum(p.numel() for p in model.parameters()) * size

    # Requests

    async def generate(self, request: GenerateRequest) -> Completion:
        self._need_alive()
        self._sleep.need_awake(f"request {request.request_id}")
        run = self._running[request.request_id] = _SglangRequest(
            request=request,
            budget=token_budget(request, self._settings),
            started_s=asyncio.get_running_loop().time(),
            task=asyncio.current_task(),
            wire_id=f"{request.request_id};",  # SGLang aborts every request whose id has the given id as a prefix
            held_back=held_back(request, self._settings),
        )
        try:
            if await self._admitted(run):
                await self._stream(run)
            return self._completion(run)
        except asyncio.CancelledError:
            self._need_alive()
            raise
        finally:
            del self._running[request.request_id]
            run.done.set()

    async def _admitted(self, run: _SglangRequest) -> bool:
        """Wait while the engine is paused; False when the request is aborted meanwhile."""
        while not self._serving.is_set() and not run.aborted.is_set():
            await first_of(self._serving, run.aborted)
        run.admitted, run.version = not run.aborted.is_set(), self._version or 0
        return run.admitted

    async def _stream(self, run: _SglangRequest) -> None:
        """Until the request has ended."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = run.request.sampling
        options: dict[str, Any] = {}
        if _truncates(sampling):
            options = {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        if self._settings.record_experts:
            options |= {"return_routed_experts": True, "routed_experts_start_len": run.request.recorded_positions}
        wanted = GenerateReqInput(
            rid=run.wire_id,
            input_ids=list(run.request.prompt_token_ids),
            sampling_params=_sampling(sampling, run.budget, self._text_config.vocab_size),
            return_logprob=True,
            stream=True,
            **options,
        )
        try:
            async for output in self._manager.generate_request(wanted, None):
                self._load_reader.add(run.output.get("meta_info", {}), output["meta_info"])
                run.output = output
        except ValueError as error:
            if not run.aborted.is_set():  # SGLang raises for a request that was aborted while it waited
                raise ValueError(f"request {run.request.request_id}: {error}") from error

    async def score(self, token_ids: Sequence[int]) -> array:
        from sglang.srt.managers.io_struct import GenerateReqInput

        self._need_alive()
        self._sleep.need_awake("score")
        check_scored(token_ids, self._settings.max_model_len)
        await self._serving.wait()
        wanted = GenerateReqInput(
            input_ids=list(token_ids),
            sampling_params={"max_new_tokens": 1, "temperature": 0.0},
            return_logprob=True,
            logprob_start_len=0,
        )
        output = await anext(self._manager.generate_request(wanted, None))
        return array("f", [row[0] for row in output["meta_info"]["input_token_logprobs"][1:]])

    def _completion(self, run: _SglangRequest) -> Completion:
        tokens, logprobs, runs = self._tokens(run, len(run.output.get("output_ids", ())))
        finish = run.output.get("meta_info", {}).get("finish_reason") or {"type": "abort"}
        if finish["type"] == "abort" and not run.aborted.is_set() and self._serving.is_set():
            raise RuntimeError(f"SGLang gave up request {run.request.request_id}: {finish.get('message')}")
        return Completion(
            request_id=run.request.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            version_runs=runs,
            finish_reason=_REASONS[finish["type"]],
            generation_s=asyncio.get_running_loop().time() - run.started_s,
            experts=self._experts(run) if self._settings.record_experts else None,
        )

    def _tokens(self, run: _SglangRequest, end: int, start: int = 0) -> tuple[array, array, VersionRuns]:
        """Tokens, log-probs and versions of [start, end)."""
        if end <= start:
            return array("i"), array("f"), ()
        meta = run.output["meta_info"]
        ids = run.output["output_ids"]
        if _truncates(run.request.sampling):
            logprobs = meta["output_token_sampling_logprobs"]
        else:
            logprobs = [row[0] for row in meta["output_token_logprobs"]]
        assert len(logprobs) >= end, "one log-prob per sampled token"
        spans = meta.get("weight_versions") or [{"version": run.version, "start": 0, "end": len(ids)}]
        runs = merge_runs([(int(s["version"]), s["end"] - s["start"]) for s in spans if s["end"] > s["start"]])
        return array("i", ids[start:end]), array("f", logprobs[start:end]), cut_runs(runs, start, end)

    def _experts(self, run: _SglangRequest) -> ExpertRecord | None:
        """From SGLang's int32 [positions, layers, experts per token]."""
        encoded = run.output.get("meta_info", {}).get("routed_experts")
        if encoded is None:
            return None
        layers, top_k = self._text_config.num_hidden_layers, self._text_config.num_experts_per_tok
        routed = np.frombuffer(base64.b64decode(encoded), dtype=np.int32).reshape(-1, layers, top_k)
        kind, typecode = (np.uint8, "B") if self._text_config.num_experts <= 256 else (np.int16, "h")
        ids = array(typecode)
        ids.frombytes(np.ascontiguousarray(routed, dtype=kind).tobytes())
        return ExpertRecord(ids=ids, num_layers=layers, top_k=top_k)

    def progress(self, request_id: str, start: int) -> Completion | None:
        run = self._running.get(request_id)
        if run is None or not run.output or run.output["meta_info"]["finish_reason"] is not None:
            return None
        # SGLang's own list of tokens may be ahead of the message, by the one that ends the request.
        end = min(run.output["meta_info"]["completion_tokens"], run.budget - 1) - run.held_back
        if end <= start:
            return None
        tokens, logprobs, runs = self._tokens(run, end, start)
        return Completion(
            request_id=request_id,
            token_ids=tokens,
            logprobs=logprobs,
            version_runs=runs,
            finish_reason=FinishReason.ABORT,
            generation_s=asyncio.get_running_loop().time() - run.started_s,
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._end(self._running[i] for i in request_ids if i in self._running)

    async def _end(self, runs: Iterable[_SglangRequest]) -> None:
        """Abort until all of them have ended."""
        left = list(runs)
        for run in left:
            run.aborted.set()
        while left := [run for run in left if not run.done.is_set()]:
            for run in left:
                state = self._manager.rid_to_state.get(run.wire_id)
                if state is not None:
                    state.abort_sent = False
                    self._manager.abort_request(run.wire_id)
            waits = [asyncio.ensure_future(run.done.wait()) for run in left]
            await asyncio.wait(waits, timeout=_ABORT_AGAIN_S)
            for wait in waits:
                wait.cancel()

    async def pause(self, mode: PauseMode) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._serving.clear()
        if mode is PauseMode.ABORT:
            await self._end([run for run in self._running.values() if run.admitted])
        # Where prompts share a cache, kept requests compute theirs again under the new weights; else they keep it.
        kept = "retract" if mode is PauseMode.ABORT or self._settings.enable_prefix_caching else "in_place"
        await self._manager.pause_generation(PauseGenerationReqInput(mode=kept))
        await self._manager.get_internal_state()  # when it has answered, the schedulers have paused

    async def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._sleep.need_awake("resume")
        if self._mixed:
            raise RuntimeError("resume without whole weights: the last update did not come to its commit")
        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._serving.set()

    # Weights

    async def begin_update(self, plan: UpdatePlan) -> None:
        self._need_alive()
        self._sleep.need_weights("begin_update")
        in_place = self.goes_to_ranks(plan)
        if in_place and self._serving.is_set():
            raise RuntimeError(f"begin_update over {plan.transport} changes the served weights; pause the engine first")
        with update_errors("begin_update"):
            await self._give_up()
            if in_place:
                self._mixed = self._ranks_receive = True
                await self._session.open()
                await self._session.command("begin", plan, list(self._names))
            else:
                self._incoming = Incoming(plan, self._names, self._kept)

    @staticmethod
    def goes_to_ranks(plan: UpdatePlan) -> bool:
        """Whether the ranks receive an update themselves, into the served weights; else it waits in this process."""
        return plan.transport not in STAGED

    async def _give_up(self) -> None:
        """Discard an update that was not committed, or whose commit failed."""
        if self._session.is_open and not self._failed:  # dead schedulers answer nothing
            if self._ranks_receive:
                await self._session.command("give_up")
            await self._session.close()
        self._ranks_receive = False
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None

    async def load_bucket(self, bucket: Bucket) -> None:
        self._need_update("load_bucket")
        with update_errors("load_bucket"):
            if self._incoming is None:
                await self._session.command("load", bucket)
            else:
                await asyncio.to_thread(self._incoming.take_in, bucket)

    async def finish_update(self) -> str:
        self._need_update("finish_update")
        with update_errors("finish_update"):
            return await self._session.digest() if self._incoming is None else self._incoming.finish()

    def _need_update(self, what: str) -> None:
        self._need_alive()
        if self._incoming is None and not self._ranks_receive:
            raise RuntimeError(f"{what} without begin_update")

    async def commit(self, version: WeightVersion) -> None:
        self._sleep.need_weights("commit")
        self._need_update("commit")
        if self._serving.is_set():
            raise RuntimeError("commit on a running engine; pause it first")
        with update_errors("commit"):
            await self._swap(version)

    async def _swap(self, version: WeightVersion) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        if self._incoming is not None:
            self._incoming.need_whole()
        self._mixed = True
        if self._incoming is None:
            await self._session.command("commit")
        else:
            await self._session.open()
            await self._session.load(self._incoming.staged)
        await self._session.close()
        if self._settings.enable_prefix_caching or not self._running:
            flushed = await self._manager.flush_cache()
            if not flushed.success:
                raise RuntimeError(f"SGLang kept its prefix cache: {flushed.message}")
        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        )
        if self._incoming is not None:
            self._incoming.committed()
        self._incoming, self._ranks_receive, self._version, self._mixed = None, False, version, False

    # Sleep

    @property
    def sleep_state(self) -> SleepState:
        return self._sleep.state

    async def sleep(self, level: int) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        running = sum(run.admitted for run in self._running.values())
        if not self._sleep.may_sleep(level, paused=not self._serving.is_set(), num_running=running):
            return
        await self._give_up()
        if level == 2:
            self._mixed = True
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=[KV_CACHE, WEIGHTS]), None)
        self._sleep.fell_asleep(level)

    async def wake(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        wanted = self._sleep.to_wake(tags)
        for tag in wanted:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[tag]), None)
        self._sleep.woke(wanted)

    def memory(self) -> EngineMemory:
        state, gives_back = self._sleep.state, self._settings.device != "cpu"  # its memory saver needs CUDA
        asleep = gives_back and state is SleepState.ASLEEP
        return EngineMemory(
            weights_bytes=0 if asleep else self._weight_bytes,
            kv_cache_bytes=0 if gives_back and state is not SleepState.AWAKE else self._kv_bytes,
            host_weights_bytes=self._weight_bytes if asleep and self._sleep.level == 1 else 0,
        )

    @property
    def _kv_bytes(self) -> int:
        return self._kv_tokens * self._kv_bytes_per_token

    def load(self) -> EngineLoad:
        requests = len(self._running)
        running, kv = self._load_reader.read(requests)
        claimed = sum(len(run.request.prompt_token_ids) + run.budget for run in self._running.values())
        return EngineLoad(
            running=running,
            waiting=requests - running,
            free_kv_fraction=max(0.0, 1 - claimed / max(1, self._kv_tokens)),
            kv=kv,
        )

    async def close(self) -> None:
        await self._end(list(self._running.values()))
        await self._give_up()
        for task in self._manager.asyncio_tasks:
            task.cancel()
        await asyncio.to_thread(self._engine.shutdown)


def _truncates(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def _sampling(params: SamplingParams, budget: int, vocab_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_new_tokens": budget,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "stop": list(params.stop_strings) or None,
        "no_stop_trim": True,  # the response includes the token that ends it
        "skip_special_tokens": False,
    }
    if _truncates(params):  # the sampling mask is kept only with a bound, of at most the vocabulary
        options["top_k"] = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    return options
