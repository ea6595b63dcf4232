"""Worlds without computation: steps that take time, and hang, crash or cannot be judged, by seed, task and number.

The real `WorldPool` opens them. Blocking ones run in `SimWorker`, a worker process without a process: its worlds share
its fate, as those of a real one do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from itertools import count
from math import exp
from statistics import NormalDist
from typing import Protocol

from roll_async.envs.pool import WorldWorker
from roll_async.envs.protocol import GraderFailed, WorldFailed
from roll_async.processes.pool import ProcessPool
from roll_async.simulator.parts.models import WorldModel, uniform

_NEVER_S = 1e9
_NORMAL = NormalDist()
_START_S = 0.5
_CLOSING = -2  # in place of a number of moves: -1 is the reset
_QUARTER_SHARE = 0.3


class Fault(Enum):
    """The fault of a world in one of its steps."""

    NONE = "none"
    HANGS = "hangs"
    CRASHES = "crashes"
    UNGRADED = "cannot be judged at its end"


@dataclass(frozen=True, slots=True)
class WorldId:
    """The `number`-th world that was opened for a task."""

    task: int
    number: int

    def text(self, moves: int) -> str:
        """What it says after so many moves."""
        return f"{self.task}:{self.number}:{moves}"


class Fates:
    """What worlds are like: a function of seed, task and number."""

    def __init__(self, seed: int, model: WorldModel, flat_share: float) -> None:
        self._seed, self._model, self._flat_share = seed, model, flat_share

    def moves(self, world: WorldId) -> int:
        """After how many it is at its end."""
        fewest, most = self._model.fewest_moves, self._model.moves
        return fewest + int((most + 1 - fewest) * uniform("moves", self._seed, world))

    def step_s(self, world: WorldId, moves: int) -> float:
        """Seconds that a step takes; `moves` before it, -1 = the reset."""
        model = self._model
        if not (model.seconds and model.sigma):
            return model.seconds
        z = _NORMAL.inv_cdf(uniform("step", self._seed, world, moves))
        return model.seconds * exp(model.sigma * z - model.sigma**2 / 2)  # lognormal; its mean is `seconds`

    def fault(self, world: WorldId) -> tuple[Fault, int]:
        """(fault, number of moves before the step in which it happens; -1 = in the reset)."""
        model, x = self._model, uniform("fault", self._seed, world)
        # From -1, the reset, to the last step.
        where = int((1 + self.moves(world)) * uniform("fault at", self._seed, world)) - 1
        for fault, share in ((Fault.HANGS, model.hang_share), (Fault.CRASHES, model.crash_share)):
            if x < share:
                return fault, where
            x -= share  # one draw for all faults, so that a world has one at most
        ungraded = x < model.ungraded_share
        return (Fault.UNGRADED, self.moves(world) - 1) if ungraded else (Fault.NONE, 0)

    def reward(self, world: WorldId, moves: int) -> float:
        """Of the step after so many moves, in quarters: sums are exact."""
        last = moves == self.moves(world) - 1
        if self._flat_share and uniform("flat", self._seed, world.task) < self._flat_share:
            return float(last)  # the same for all worlds of the task: their group has no variance
        quarter = 0.25 * (uniform("reward", self._seed, world, moves) < _QUARTER_SHARE)
        # Even and odd worlds of a task differ: a group of two has a variance.
        return quarter + float(last and world.number % 2)


class Reports(Protocol):
    """Receives findings about broken invariants."""

    def report(self, invariant: int, message: str) -> None: ...


class WorldBook:
    """All worlds of one process of a run."""

    def __init__(self, fates: Fates, reports: Reports, *, max_open: int, lock_step: bool = False) -> None:
        """`max_open`: of training; 0 = no limit. `lock_step`: a step ends when all worlds have ended theirs."""
        self.fates, self._reports, self._max_open, self._lock_step = fates, reports, max_open, lock_step
        self._numbers: Counter[int] = Counter()
        self._open: dict[WorldId, bool] = {}
        """Whether it has ended its step."""
        self._all_ended = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Worlds that were reset and neither closed nor lost with their process."""
        return len(self._open)

    def begin(self, task: int) -> WorldId:
        """One more world of this task."""
        world = WorldId(task, self._numbers[task])
        self._numbers[task] += 1
        self._open[world] = False
        return world

    def count(self) -> None:
        """Not more are open than may be."""
        training = sum(w.task < HELD_OUT for w in self._open) if self._max_open else 0
        if training > self._max_open:
            self._reports.report(20, f"{training} worlds at the same time, {self._max_open} are allowed")

    def end(self, world: WorldId) -> None:
        """It is closed, or gone."""
        self._open.pop(world, None)
        self._look()

    async def turn_ended(self, world: WorldId) -> None:
        """Returns when the next turn of this world may begin."""
        if self._lock_step:
            self._open[world] = True
            self._look()
            if self._open[world]:  # else it was the last one, and `_look` has begun the next turn
                await self._all_ended.wait()

    def _look(self) -> None:
        if self._lock_step and self._open and all(self._open.values()):
            self._open = dict.fromkeys(self._open, False)
            self._all_ended.set()
            self._all_ended = asyncio.Event()


HELD_OUT = 10**6
"""Tasks of a validation begin here."""


@dataclass(frozen=True, kw_only=True)
class BookOptions:
    """`env_config` of a fake world."""

    book: WorldBook


class SimWorld:
    """A world whose steps run in the event loop."""

    Options = BookOptions

    def __init__(self, options: BookOptions) -> None:
        self._book = options.book
        self._world: WorldId | None = None
        self._moves = 0

    async def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Its first words."""
        assert seed is not None
        world = self._world = self._book.begin(seed)
        await asyncio.sleep(0)  # worlds that ended in this turn of the loop are closed in the next one
        self._book.count()
        await self._pass(world, -1)
        return world.text(0), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One move, whatever it is."""
        world, fates = self._world, self._book.fates
        assert world is not None, "reset() first"
        await self._pass(world, self._moves)
        reward = fates.reward(world, self._moves)
        self._moves += 1
        ended = self._moves == fates.moves(world)
        if not ended:
            await self._book.turn_ended(world)
        return world.text(self._moves), reward, ended, False, {}

    async def _pass(self, world: WorldId, moves: int) -> None:
        fault, where = self._book.fates.fault(world)
        if fault is Fault.HANGS and where == moves:
            await self._hang(world)
        if seconds := self._book.fates.step_s(world, moves):
            await asyncio.sleep(seconds)
        if fault is Fault.CRASHES and where == moves:
            raise SimCrash(f"world {world} crashed")
        if fault is Fault.UNGRADED and where == moves:
            raise GraderFailed("the judge does not work")

    async def _hang(self, world: WorldId) -> None:
        self._book.end(world)  # nothing refers to it any more
        await asyncio.sleep(_NEVER_S)

    async def close(self) -> None:
        """What it held is free, after as long as a step takes."""
        if self._world is not None:
            world, self._world = self._world, None
            self._book.end(world)
            await self._pass(world, _CLOSING)

    def lose(self) -> None:
        """Its process is gone."""
        if self._world is not None:
            self._book.end(self._world)


class SimCrash(RuntimeError):
    """The end of a world, and of the process it is in."""


class BlockingSimWorld(SimWorld):
    """A world whose steps run in a worker."""

    def step(self, action: str) -> Coroutine[object, object, tuple[str, float, bool, bool, dict]]:  # type: ignore[override]
        """Not async by its looks: it is sent to a worker."""
        return super().step(action)


class SimWorker(WorldWorker):
    """A worker process on the virtual clock: every request is a task, as a real one has a thread for it."""

    def __init__(
        self, timeout_s: float, processes: ProcessPool, book: WorldBook, *, seed: int, number: int, broken_share: float
    ) -> None:
        super().__init__(timeout_s, processes)
        self._book, self._seed, self._number, self._broken_share = book, seed, number, broken_share
        self._held: dict[int, BlockingSimWorld] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._up = False

    @property
    def alive(self) -> bool:
        return self._up

    async def _start(self) -> None:
        await asyncio.sleep(_START_S)
        if uniform("worker", self._seed, self._number) < self._broken_share:
            raise WorldFailed("it ended at its start")
        self._up = True

    def _send(self, request: dict) -> None:
        if not self._up:
            raise WorldFailed("its worker process has ended")
        task = asyncio.get_running_loop().create_task(self._serve(request))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _serve(self, request: dict) -> None:
        try:
            self._answered({"id": request["id"], **await self._do(request)})
        except GraderFailed as error:
            self._answered({"id": request["id"], "error": str(error), "kind": "grader"})
        except SimCrash:
            await self._end_process()
            self._fail("its worker process ended")

    async def _do(self, request: dict) -> dict:
        number = request["world"]
        match request["op"]:
            case "reset":
                world = self._held[number] = BlockingSimWorld(BookOptions(book=self._book))
                text, info = await world.reset(seed=request["seed"])
                return {"text": text, "info": info}
            case "step":
                names = ("text", "reward", "terminated", "truncated", "info")
                return dict(zip(names, await self._held[number].step(request["action"]), strict=True))
            case _:
                if (closing := self._held.pop(number, None)) is not None:
                    await closing.close()
                return {"text": ""}

    async def _end_process(self) -> None:
        """Its worlds end where they stand."""
        self._up = False
        # The task that runs this is the one that crashed.
        for task in self._requests - {asyncio.current_task()}:  # type: ignore[arg-type]
            task.cancel()
        for world in self._held.values():
            world.lose()
        self._held.clear()


def workers(book: WorldBook, *, seed: int, broken_share: float) -> Callable[[float, ProcessPool], WorldWorker]:
    """What makes the workers of a pool. None of them starts one of its processes."""
    numbers = count()

    def make(timeout_s: float, processes: ProcessPool) -> WorldWorker:
        return SimWorker(timeout_s, processes, book, seed=seed, number=next(numbers), broken_share=broken_share)

    return make
