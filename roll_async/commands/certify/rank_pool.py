"""Processes that play the ranks of one layout after another.

Importing Megatron costs seconds and forming a layout's groups a fraction of one: the processes of every layout are
forked from a server that has imported it. They end with the layout, because torch lets go of a default group only then,
and the threads of each wake a hundred times a second.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PRELOAD = ["roll_async.trainer.megatron.worker", "torch._dynamo", "torch.onnx"]
"""torch imports the last two itself at a rank's first step, which costs as much as the step."""


def _play(pipe: Connection, function: Callable[..., object], arguments: dict[str, object]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.freeze()  # a collection of this rank's need not look through all that the server imported
    told: tuple[bool, object] | None = None
    try:
        told = True, function(**arguments)
    finally:
        pipe.send(told or (False, traceback.format_exc()))
        pipe.poll(60)  # tensors are fetched from this process while the answer is read


class RankPool:
    """`run(function, world_size, **arguments)` calls `function(rank=, world_size=, port=, **arguments)` in every rank.

    A failure raises with the ranks' tracebacks and ends all processes: the others may be waiting for the dead one.
    """

    def __init__(self, patience: Callable[[float], float] = float) -> None:
        """`patience`: how long a wait of so many seconds may take on this machine."""
        self._patience = patience
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)

    def run(
        self, function: Callable[..., object], world_size: int, timeout: float = 300, **arguments: object
    ) -> list[Any]:
        """What each rank answers. Raises RuntimeError when one fails, dies, or is silent for `timeout` seconds."""
        from roll_async.cluster.network import held_port  # brings Ray, which no rank needs

        with held_port("127.0.0.1") as port:
            return self._run(function, world_size, timeout, {"port": port, **arguments})

    def _run(
        self, function: Callable[..., object], world_size: int, timeout: float, arguments: dict[str, object]
    ) -> list[Any]:
        ranks = []
        for rank in range(world_size):
            ours, theirs = self._context.Pipe()
            given = {"rank": rank, "world_size": world_size, **arguments}
            process = self._context.Process(target=_play, args=(theirs, function, given), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _answers([pipe for _, pipe in ranks], time.monotonic() + self._patience(timeout), timeout)
        finally:
            for process, pipe in ranks:
                pipe.close()
                process.terminate()
            for process, _ in ranks:
                process.join()


def _answers(pipes: list[Connection], deadline: float, timeout: float) -> list[Any]:
    answers, problems = [], []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(max(0.0, deadline - time.monotonic()) if not problems else 2):
            problems.append(f"rank {rank} gave no answer within {timeout:g} s")
            continue
        try:
            well, answer = pipe.recv()
        except EOFError:
            well, answer = False, "the process died"
        answers.append(answer)
        if not well:
            problems.append(f"rank {rank}: {answer}")
    if problems:
        raise RuntimeError("\n".join(problems))
    return answers
