"""vLLM's engine core inside the engine's own process, under the unchanged AsyncLLM front end. For CPU replicas.

AsyncLLM runs its core in a child process and talks to it over sockets: right where a GPU does the work, and a third of
all the work where the model is a CPU's. Here one thread owns the core: whatever touches it is a call in its inbox,
carried out between two steps; outputs come back in order, tokens of many steps at once where nobody waits for each
(`vllm_gather.py`). Saves the child's start-up too: it imports torch and vLLM again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TypeVar

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.request import Request, RequestStatus

from roll_async.inference.vllm_gather import OutputGatherer

T = TypeVar("T")

_DECODING = {"num_lookahead_tokens": 0}
"""What the scheduler says of a request that already runs; of others it says more."""


class InProcessCore(EngineCoreClient):
    """What AsyncLLM calls on its core, without the socket. One event loop, one thread."""

    engine_ranks_managed = (0,)

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        _allocate_only_at_block_ends(core)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-core")
        self._inbox: deque[Callable[[], None]] = deque()
        self._outputs: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue()
        self._gatherer = OutputGatherer()
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
                await self._loop.run_in_executor(self._thread, self._steps)
                for future in self._drained:
                    if not future.done():
                        future.set_result(None)
                self._drained.clear()
        except Exception as error:  # whatever ends the core ends every request of it
            self._die(error)

    def _steps(self) -> None:
        """In the thread: calls and steps until nothing is left to do. The event loop hears of a step only when there is
        something to tell: each time it wakes up it takes the interpreter lock from here.
        """
        core = self._core
        while not self._closed:
            while self._inbox:
                self._inbox.popleft()()
            if not (core.scheduler.has_requests() or core.batch_queue):
                if self._inbox:
                    continue
                return
            outputs, executed = core.step_fn()
            core.post_step(executed)
            for output in (outputs or {}).values():
                self._tell(output)

    def _tell(self, outputs: EngineCoreOutputs) -> None:
        """In the thread: to the front end, now or together with what comes next."""
        for gathered in self._gatherer.take(outputs):
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, gathered)

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
            self._gatherer.expect(request)
            try:
                self._core.add_request(*self._core.preprocess_add_request(request))
            except (TypeError, ValueError):
                self._end([request.request_id], FinishReason.ERROR)

        self._post(add)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """The front end has forgotten them."""
        if request_ids and not self.resources.engine_dead:
            self._post(lambda: self._abort(request_ids))

    def _abort(self, request_ids: list[str]) -> None:
        self._core.abort_requests(request_ids)
        for request_id in request_ids:
            self._gatherer.forget(request_id)

    async def end_requests_async(self, request_ids: list[str]) -> None:
        """End them with every token they have: unlike the front end's abort, which knows those it was told of."""

        def end() -> None:
            ended = self._core.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
            self._end([request.request_id for request in ended], FinishReason.ABORT)

        await self._call(end)

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

    async def rpc_beside_async(self, method: str, args: tuple[object, ...]) -> list:
        """A call of the workers that a step does not mind: it waits for none."""
        return await asyncio.to_thread(self._core.collective_rpc, method, None, args)

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
        version = self._core.get_weight_version()
        self._tell(EngineCoreOutputs(finished_requests=set(request_ids), outputs=outputs, weight_version=version))


def _allocate_only_at_block_ends(core: EngineCore) -> None:
    """Ask for KV blocks only when a token may need one. A decoding request asks at every token, and 127 of 128 times
    the answer is an empty list, found slowly: 7 % of what a small model's step costs.

    Only with plain full attention and one group of layers: sliding windows give blocks back at any token.
    """
    manager = core.scheduler.kv_cache_manager  # type: ignore[attr-defined]
    caches = manager.coordinator.single_type_managers
    if len(caches) != 1 or type(caches[0]) is not FullAttentionManager:
        return
    allocate, block_size = manager.allocate_slots, caches[0].block_size

    def sparing(request: Request, num_new_tokens: int, *args: object, **options: object) -> KVCacheBlocks | None:
        # The token lies in the block of the one before it, and does not fill it (a full block is put into the cache).
        inside = 0 < request.num_computed_tokens % block_size < block_size - 1
        if inside and num_new_tokens == 1 and not args and options == _DECODING:
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, *args, **options)

    manager.allocate_slots = sparing


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
