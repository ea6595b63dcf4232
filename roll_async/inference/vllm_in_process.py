"""vLLM's engine core inside the engine's own process, under the unchanged AsyncLLM front end. For CPU replicas.

AsyncLLM runs its core in a child process and talks to it over sockets: right where a GPU does the work, and a third of
all the work where the model is a CPU's. Here one thread owns the core: whatever touches it is a call in its inbox,
carried out between two steps; outputs come back in order. Saves the child's start-up too: it imports torch and vLLM
again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TypeVar

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.request import Request, RequestStatus

T = TypeVar("T")


class InProcessCore(EngineCoreClient):
    """What AsyncLLM calls on its core, without the socket. One event loop, one thread."""

    engine_ranks_managed = (0,)

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-core")
        self._inbox: deque[Callable[[], None]] = deque()
        self._outputs: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue()
        self._work = asyncio.Event()
        self._drained: list[asyncio.Future[None]] = []
        """Waiters for a core without running requests."""
        self.resources = SimpleNamespace(engine_dead=False)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._stepping = self._loop.create_task(self._run(), name="vllm-core")

    # The loop

    async def _run(self) -> None:
        """Steps while there are requests; sleeps until a call comes."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                busy = True
                while busy:
                    outputs, busy = await self._loop.run_in_executor(self._thread, self._step)
                    for output in outputs:
                        self._outputs.put_nowait(output)
                for future in self._drained:
                    if not future.done():
                        future.set_result(None)
                self._drained.clear()
        except Exception as error:  # whatever ends the core ends every request of it
            self._die(error)

    def _step(self) -> tuple[list[EngineCoreOutputs], bool]:
        """In the thread: the calls that came, then one step. True while something is left to do."""
        core = self._core
        while self._inbox:
            self._inbox.popleft()()
        if not (core.scheduler.has_requests() or core.batch_queue):
            return [], bool(self._inbox)
        outputs, executed = core.step_fn()
        core.post_step(executed)
        return list((outputs or {}).values()), True

    def _die(self, error: Exception) -> None:
        self.resources.engine_dead = True
        dead = EngineDeadError()
        dead.__cause__ = error
        self._outputs.put_nowait(dead)
        for future in self._drained:
            if not future.done():
                future.set_exception(dead)

    def _post(self, call: Callable[[], None]) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError()
        self._inbox.append(call)
        self._work.set()

    async def _call(self, function: Callable[[], T]) -> T:
        """Run in the thread between two steps; its result, or its error."""
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(set_it: Callable[[object], None], value: object) -> None:
            self._loop.call_soon_threadsafe(lambda: None if future.done() else set_it(value))

        def run() -> None:
            try:
                result = function()
            except Exception as error:  # belongs to the caller, as over a socket
                settle(future.set_exception, error)  # type: ignore[arg-type]
            else:
                settle(future.set_result, result)  # type: ignore[arg-type]

        self._post(run)
        return await future

    # What AsyncLLM calls

    async def get_output_async(self) -> EngineCoreOutputs:
        output = await self._outputs.get()
        if isinstance(output, EngineDeadError):
            raise output
        return output

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        def add() -> None:
            try:
                self._core.add_request(*self._core.preprocess_add_request(request))
            except (TypeError, ValueError):
                self._end([request.request_id], FinishReason.ERROR)

        self._post(add)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            self._post(lambda: self._core.abort_requests(request_ids))

    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """As the core process does it: abort at once, wait for what runs, or keep it frozen."""
        state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW

        def pause() -> None:
            scheduler = self._core.scheduler
            if mode == "abort":
                aborted: list[Request] = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
                self._end([request.request_id for request in aborted], FinishReason.ABORT)
            scheduler.set_pause_state(state)

        await self._call(pause)
        idle: asyncio.Future[None] = self._loop.create_future()
        self._drained.append(idle)
        self._work.set()
        await idle
        await self._call(lambda: self._core._finish_pause(clear_cache))

    async def resume_scheduler_async(self) -> None:
        await self._call(self._core.resume_scheduler)

    async def is_scheduler_paused_async(self) -> bool:
        return await self._call(self._core.is_scheduler_paused)

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return await self._call(lambda: self._core.reset_prefix_cache(reset_running_requests, reset_connector))

    async def collective_rpc_async(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, object] | None = None,
    ) -> list[T]:
        return await self._call(lambda: self._core.collective_rpc(method, timeout, args, kwargs))

    async def set_weight_version_async(self, weight_version: str) -> None:
        await self._call(lambda: self._core.set_weight_version(weight_version))

    async def get_weight_version_async(self) -> str:
        return await self._call(self._core.get_weight_version)

    async def get_supported_tasks_async(self):  # noqa: ANN201 (vLLM's tuple of tasks)
        return await self._call(self._core.get_supported_tasks)

    async def reset_mm_cache_async(self) -> None:
        await self._call(self._core.reset_mm_cache)

    def shutdown(self, timeout: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._stepping.cancel()
        self._thread.submit(self._core.shutdown).result(timeout)
        self._thread.shutdown(wait=False)

    def _end(self, request_ids: list[str], reason: FinishReason) -> None:
        """In the thread: tell the front end that these are over."""
        if not request_ids:
            return
        outputs = [EngineCoreOutput(i, [], finish_reason=reason) for i in request_ids]
        report = EngineCoreOutputs(finished_requests=set(request_ids), outputs=outputs)
        self._loop.call_soon_threadsafe(self._outputs.put_nowait, report)


@contextlib.contextmanager
def core_in_this_process() -> Iterator[None]:
    """AsyncLLM made inside this block keeps its core here. vLLM offers no such choice, so its factory is exchanged for
    the moment; `test_engine_protocol.py` fails loudly when a release moves it.
    """
    factory = EngineCoreClient.__dict__["make_async_mp_client"]

    def make(vllm_config, executor_class, log_stats: bool, **_: object) -> InProcessCore:  # noqa: ANN001 (vLLM's types)
        return InProcessCore(EngineCore(vllm_config, executor_class, log_stats))

    EngineCoreClient.make_async_mp_client = staticmethod(make)  # type: ignore[method-assign]
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = factory  # type: ignore[method-assign]
