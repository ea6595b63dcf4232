"""SGLang behind the Engine protocol, on CUDA (and on CPU where its kernels have been replaced, as in the tests).

Its schedulers are processes of their own, one per device; this one holds its tokenizer manager. One behaviour log-prob
per token, of the distribution really sampled from: after temperature, and with top-k or top-p over what these leave
(SGLang's `sampling_mask`). One weight version per token, by SGLang's own spans.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll_async.config.engine_traits import ENGINE_TRAITS
from roll_async.inference.engine import FINISH_REASONS, Engine, Ticket, Tokens, expert_record
from roll_async.inference.hf.weights import WeightTargets
from roll_async.inference.protocol import EngineLoad, EngineMemory, PauseMode
from roll_async.inference.settings import TORCH_DTYPES, EngineSettings
from roll_async.inference.sglang.arguments import (
    engine_arguments,
    kv_bytes_per_token,
    leave_failures_to_the_start,
    prepare_environment,
)
from roll_async.inference.sglang.load import SglangLoadReader
from roll_async.inference.sglang.session import WeightSession
from roll_async.inference.sleeping import KV_CACHE, WEIGHTS, SleepState
from roll_async.inference.staging import Incoming
from roll_async.schema import (
    Completion,
    ExpertRecord,
    GenerateRequest,
    SamplingParams,
    WeightVersion,
    cut_runs,
    merge_runs,
)
from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.errors import EngineDead

_ABORT_AGAIN_S = 0.1
"""Interval of repeated aborts: SGLang loses the abort of a request that has not reached its scheduler yet."""


@dataclass(eq=False, slots=True)
class SglangTicket(Ticket):
    """A request and its tokens so far."""

    output: dict[str, Any] = field(default_factory=dict)
    """SGLang's latest output: all tokens so far."""
    task: asyncio.Task | None = field(default_factory=asyncio.current_task)
    """Of the caller; cancelled when SGLang fails."""

    @property
    def wire_id(self) -> str:
        """SGLang aborts every request whose id has the given id as a prefix."""
        return f"{self.request.request_id};"


class SglangEngine(Engine[SglangTicket]):
    """One replica; `inference/engine.py: Engine` says what each method does."""

    traits, ticket_type = ENGINE_TRAITS["sglang"], SglangTicket

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._incoming: Incoming | None = None
        """An update that waits in the memory of this process; None = the ranks receive it themselves."""
        self._kept = LastExport()
        self._failed = False

    def _sleep_levels(self) -> Sequence[int]:
        # On CUDA SGLang decides at the start whether it keeps a copy of the weights on the host.
        levels = super()._sleep_levels()
        return levels if self._settings.device == "cpu" else levels[-1:]

    def import_library(self) -> None:
        prepare_environment(self._settings)
        import sglang.srt.entrypoints.engine  # noqa: F401

    async def start(self) -> None:
        settings = self._settings
        prepare_environment(settings)
        self._read_config()
        arguments = engine_arguments(settings, self._text_config)
        import sglang

        try:
            self._engine = sglang.Engine(**arguments, custom_sigquit_handler=leave_failures_to_the_start)
        except TypeError as error:  # an argument that `sglang.Engine` does not have
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
        for ticket in self._tickets.values():
            if ticket.task is not None:
                ticket.task.cancel()

    def _library(self) -> AbstractContextManager[None]:
        self._need_alive()  # a dead scheduler would answer nothing, for ever
        return nullcontext()

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
        try:
            return await super().generate(request)
        except asyncio.CancelledError:  # by `_fail`, wherever the request was; a cancelled caller goes on
            self._need_alive()
            raise

    async def _generate(self, ticket: SglangTicket) -> Completion:
        await self._stream(ticket)
        finish = ticket.output.get("meta_info", {}).get("finish_reason") or {"type": "abort"}
        # Neither an abort of ours nor a pause: SGLang could not run it.
        if finish["type"] == "abort" and not ticket.aborted.is_set() and self._serving.is_set():
            raise RuntimeError(f"SGLang gave up request {ticket.request.request_id}: {finish.get('message')}")
        tokens = self._tokens(ticket, 0, len(ticket.output.get("output_ids", ())))
        experts = self._experts(ticket) if self._settings.record_experts else None
        return self._completion(ticket, tokens, FINISH_REASONS[finish["type"]], experts)

    async def _stream(self, ticket: SglangTicket) -> None:
        """Until the request has ended."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = ticket.request.sampling
        options: dict[str, Any] = {}
        if _truncates(sampling):
            options = {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        if self._settings.record_experts:
            options |= {"return_routed_experts": True, "routed_experts_start_len": ticket.request.recorded_positions}
        wanted = GenerateReqInput(
            rid=ticket.wire_id,
            input_ids=list(ticket.request.prompt_token_ids),
            sampling_params=_sampling(sampling, ticket.budget, self._text_config.vocab_size),
            return_logprob=True,
            stream=True,
            **options,
        )
        try:
            async for output in self._manager.generate_request(wanted, None):
                self._load_reader.add(ticket.output.get("meta_info", {}), output["meta_info"])
                ticket.output = output
        except ValueError as error:
            if not ticket.aborted.is_set():  # SGLang raises for a request that was aborted while it waited
                raise ValueError(f"request {ticket.request.request_id}: {error}") from error

    async def _score(self, token_ids: Sequence[int]) -> array:
        from sglang.srt.managers.io_struct import GenerateReqInput

        await self._serving.wait()
        wanted = GenerateReqInput(
            input_ids=list(token_ids),
            sampling_params={"max_new_tokens": 1, "temperature": 0.0},
            return_logprob=True,
            logprob_start_len=0,
        )
        output = await anext(self._manager.generate_request(wanted, None))
        # The first token has nothing before it, so no log-prob.
        return array("f", [row[0] for row in output["meta_info"]["input_token_logprobs"][1:]])

    def _tokens(self, ticket: SglangTicket, start: int, end: int) -> Tokens:
        """Those of [start, end)."""
        if end <= start:
            return Tokens(array("i"), array("f"), ())
        meta, ids = ticket.output["meta_info"], ticket.output["output_ids"]
        if _truncates(ticket.request.sampling):
            logprobs = meta["output_token_sampling_logprobs"]
        else:
            logprobs = [row[0] for row in meta["output_token_logprobs"]]
        assert len(logprobs) >= end, "one log-prob per sampled token"
        spans = meta.get("weight_versions") or [{"version": ticket.version, "start": 0, "end": len(ids)}]
        runs = merge_runs([(int(s["version"]), s["end"] - s["start"]) for s in spans if s["end"] > s["start"]])
        return Tokens(array("i", ids[start:end]), array("f", logprobs[start:end]), cut_runs(runs, start, end))

    def _experts(self, ticket: SglangTicket) -> ExpertRecord | None:
        """From SGLang's int32 [positions, layers, experts per token]."""
        encoded = ticket.output.get("meta_info", {}).get("routed_experts")
        if encoded is None:
            return None
        layers, top_k = self._text_config.num_hidden_layers, self._text_config.num_experts_per_tok
        routed = np.frombuffer(base64.b64decode(encoded), dtype=np.int32).reshape(-1, layers, top_k)
        return expert_record(routed.astype(np.uint8 if self._text_config.num_experts <= 256 else np.int16))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._manager.tokenizer.decode(list(token_ids))

    def _so_far(self, ticket: SglangTicket, start: int) -> Tokens | None:
        if not ticket.output or ticket.output["meta_info"]["finish_reason"] is not None:
            return None
        # SGLang's own list of tokens may be ahead of the message, by the one that ends the request.
        end = min(ticket.output["meta_info"]["completion_tokens"], ticket.budget - 1) - ticket.held_back
        return self._tokens(ticket, start, end) if end > start else None

    async def _abort(self, tickets: Sequence[SglangTicket]) -> None:
        left = list(tickets)
        while left := [ticket for ticket in left if not ticket.done.is_set()]:
            for ticket in left:
                state = self._manager.rid_to_state.get(ticket.wire_id)
                if state is not None:  # else it is on its way to SGLang: the next round finds it
                    state.abort_sent = (
                        False  # SGLang sends it once, and loses it where the scheduler has no request yet
                    )
                    self._manager.abort_request(ticket.wire_id)
            waits = [asyncio.ensure_future(ticket.done.wait()) for ticket in left]
            await asyncio.wait(waits, timeout=_ABORT_AGAIN_S)
            for wait in waits:
                wait.cancel()

    async def _halt(self, mode: PauseMode, tickets: Sequence[SglangTicket]) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode is PauseMode.ABORT:
            await self._end(tickets)
        # Where prompts share a cache, kept requests compute theirs again under the new weights; else they keep it.
        kept = "retract" if mode is PauseMode.ABORT or self._settings.enable_prefix_caching else "in_place"
        await self._manager.pause_generation(PauseGenerationReqInput(mode=kept))
        await self._manager.get_internal_state()  # when it has answered, the schedulers have paused

    async def _go_on(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())

    # Weights

    async def _begin(self, plan: UpdatePlan) -> None:
        if self.loads_in_place(plan):
            await self._session.open()
            await self._session.command("begin", plan, list(self._names))
        else:
            self._incoming = Incoming(plan, self._names, self._kept)

    async def _drop(self) -> None:
        if self._session.is_open and not self._failed:  # dead schedulers answer nothing
            if self._incoming is None:
                await self._session.command("give_up")
            await self._session.close()
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None

    async def _take_in(self, bucket: Bucket) -> None:
        if self._incoming is None:
            await self._session.command("load", bucket)
        else:
            await asyncio.to_thread(self._incoming.take_in, bucket)

    async def _digest(self) -> str:
        return await self._session.digest() if self._incoming is None else self._incoming.finish()

    def _need_whole_update(self) -> None:
        if self._incoming is not None:
            self._incoming.need_whole()

    async def _swap(self, version: WeightVersion) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        if self._incoming is None:
            await self._session.command("commit")
        else:
            await self._session.open()
            await self._session.load(self._incoming.staged)
        await self._session.close()
        # Else kept requests hold the cache (see `_halt`), and no prefix in it is shared.
        if self._settings.enable_prefix_caching or not self._tickets:
            flushed = await self._manager.flush_cache()
            if not flushed.success:
                raise RuntimeError(f"SGLang kept its prefix cache: {flushed.message}")
        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        )
        if self._incoming is not None:
            self._incoming.committed()
            self._incoming = None

    # Sleep

    async def _release(self, level: int) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=[KV_CACHE, WEIGHTS]), None)

    async def _restore(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        for tag in tags:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[tag]), None)

    def memory(self) -> EngineMemory:
        state, gives_back = self._sleep.state, self._settings.device != "cpu"  # its memory saver needs CUDA
        asleep, kv_bytes = gives_back and state is SleepState.ASLEEP, self._kv_tokens * self._kv_bytes_per_token
        return EngineMemory(
            weights_bytes=0 if asleep else self._weight_bytes,
            kv_cache_bytes=0 if gives_back and state is not SleepState.AWAKE else kv_bytes,
            host_weights_bytes=self._weight_bytes if asleep and self._sleep.level == 1 else 0,
        )

    def load(self) -> EngineLoad:
        running, kv = self._load_reader.read(len(self._tickets))
        return self._load_report(running, kv, self._kv_tokens)

    async def close(self) -> None:
        if not self._failed:
            await self._end(self._tickets.values())
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
