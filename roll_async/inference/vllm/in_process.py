"""vLLM with its core in the replica's own process: an option of CPU replicas.

vLLM's `LLMEngine` offers this (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), but its caller has to step it. Here one thread
does: whatever touches the engine is a call in its inbox, carried out between two steps. To the caller it looks like the
part of `AsyncLLM` that `VllmEngine` uses. It saves a child process, with its memory and start, and its sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestOutputCollector

T = TypeVar("T")


class _Answer(RequestOutputCollector):
    """Filled by the engine's thread, awaited on the event loop."""

    def __init__(self, sampling: SamplingParams, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(sampling.output_kind, request_id)
        self._loop = loop

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            self._loop.call_soon_threadsafe(super().put, output)


class InProcessLLM:
    """What `VllmEngine` calls on `AsyncLLM`. One event loop, one thread."""

    def __init__(self, arguments: EngineArgs) -> None:
        gc.freeze()  # vLLM collects everything three times while it starts, and its imports are a million objects
        self._engine = LLMEngine.from_engine_args(arguments)
        self.vllm_config, self.model_config = self._engine.vllm_config, self._engine.model_config
        self.output_processor, self.get_tokenizer = self._engine.output_processor, self._engine.get_tokenizer
        self.engine_core = self
        self._core = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.scheduler = self._core.scheduler
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._paused = self._closed = False
        self._dead: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._run, name="vllm-core", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Run steps while there are requests; otherwise wait for a call."""
        # A new thread takes the process's number of threads when asked for it or at its first parallel operation:
        # vLLM's attention would be planned before that for OpenMP's number, and refused after it. Setting it is no way:
        # vLLM's worker makes `torch.set_num_threads` do nothing.
        torch.get_num_threads()
        try:
            while not self._closed:
                idle = self._paused or not self._engine.has_unfinished_requests()
                try:
                    while True:
                        self._inbox.get(block=idle)()
                        idle = False  # it may have brought a request: take what else is there, then step
                except queue.Empty:
                    pass
                if not self._paused and not self._closed and self._engine.has_unfinished_requests():
                    self._engine.step()
        except Exception as error:  # whatever ends the core ends every request of it
            self._dead = EngineDeadError()
            self._dead.__cause__ = error
            for state in self.output_processor.request_states.values():
                if state.queue is not None:
                    state.queue.put(self._dead)
            while not self._closed:
                self._inbox.get()()  # each call finds the engine dead

    async def _call(self, function: Callable[[], T]) -> T:
        """Run in the thread between two steps; its result, or its error."""
        future: asyncio.Future[T] = self._loop.create_future()

        # The future belongs to the event loop's thread; its caller may be cancelled by then.
        def settle(set_it: Callable[..., None], value: object) -> None:
            self._loop.call_soon_threadsafe(lambda: None if future.done() else set_it(value))

        def run() -> None:
            try:
                if self._dead is not None:
                    raise self._dead
                settle(future.set_result, function())
            except StopIteration as error:
                in_its_place = RuntimeError("StopIteration in vLLM")  # a future takes no StopIteration
                in_its_place.__cause__ = error
                settle(future.set_exception, in_its_place)
            except Exception as error:  # belongs to the caller, as over a socket
                settle(future.set_exception, error)

        self._inbox.put(run)
        return await future

    # Requests

    async def add_request(
        self, request_id: str, prompt: object, sampling: SamplingParams, lora_request: LoRARequest | None = None
    ) -> RequestOutputCollector:
        """Start a request; the answer comes out of the collector."""
        return await self._call(lambda: self._add(request_id, prompt, sampling, lora_request))

    def _add(
        self,
        request_id: str,
        prompt,  # noqa: ANN001 (vLLM's)
        sampling: SamplingParams,
        lora_request: LoRARequest | None,
    ) -> RequestOutputCollector:
        engine = self._engine
        tasks = engine.get_supported_tasks()
        request = engine.input_processor.process_inputs(
            request_id, prompt, sampling, supported_tasks=tasks, lora_request=lora_request
        )
        engine.input_processor.assign_request_id(request)
        answer = _Answer(sampling, request.request_id, self._loop)
        engine.output_processor.add_request(request, None, None, 0, answer)
        engine.engine_core.add_request(request)
        return answer

    async def abort(self, request_ids: Iterable[str], internal: bool = False) -> None:
        """Abort these requests; their outputs hold all tokens sampled so far."""
        ids = list(request_ids)
        if self._dead is None:  # all requests of a dead core have ended
            await self._call(lambda: self._engine.abort_request(ids, internal))

    # Control

    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """No step after this; with `abort` every request ends with its tokens."""

        def pause() -> None:
            if mode == "abort":
                self._engine.abort_request(list(self.output_processor.request_states), internal=True)
            self._core.pause_scheduler(mode, clear_cache)
            self._paused = True

        await self._call(pause)

    async def resume_generation(self) -> None:
        def resume() -> None:
            self._core.resume_scheduler()
            self._paused = False

        await self._call(resume)

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list:
        return await self._call(lambda: self._core.collective_rpc(method, None, args))

    async def rpc_beside(self, method: str, args: tuple[object, ...]) -> list:
        """A call of the worker that may run during a step."""
        return await asyncio.to_thread(self._core.collective_rpc, method, None, args)

    async def update_weight_version(self, version: str) -> None:
        await self._call(lambda: self._core.set_weight_version(version))

    def shutdown(self) -> None:
        """End the thread and release the core."""

        def end() -> None:
            self._closed = True
            self._engine.engine_core.shutdown()

        self._inbox.put(end)
        self._thread.join(timeout=30)  # a step that hangs must not keep the process from its end
