"""Processes that keep Megatron imported and play the ranks of one layout after another.

Importing Megatron costs seconds and forming a layout's groups a fraction of one: the processes are forked from a server
that has imported it, and live as long as the pool.
"""

import multiprocessing as mp
import os
import socket
import traceback

SUMMARY = []
"""Lines to print at the end of the test run."""

_PRELOAD = ["roll_async.trainer.megatron.worker"]
_RUNS_PER_PROCESS = 10
"""Torch lets go of a layout's default group only when the process ends; its threads wake a hundred times a second."""


def _serve(pipe):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send((True, function(**arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return


class RankPool:
    """`run(function, world_size, **arguments)` calls `function(rank=, world_size=, port=, **arguments)` in every rank.

    A failure raises with the ranks' tracebacks and replaces all processes: the others may be waiting for the dead one.
    Processes are replaced now and then in any case.
    """

    def __init__(self, size):
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._size, self._members, self._runs = size, [], 0

    def run(self, function, world_size, timeout=300, **arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if self._runs % _RUNS_PER_PROCESS == 0:
            self.close(gently=True)
        self._runs += 1
        self._fill()
        members = self._members[:world_size]
        for rank, (_, pipe) in enumerate(members):
            pipe.send((function, {"rank": rank, "world_size": world_size, "port": port, **arguments}))
        answers, problems = [], []
        for rank, (_, pipe) in enumerate(members):
            if not pipe.poll(timeout if not problems else 2):
                problems.append(f"rank {rank} gave no answer within {timeout} s")
                continue
            try:
                well, answer = pipe.recv()
            except EOFError:
                well, answer = False, "the process died"
            answers.append(answer)
            if not well:
                problems.append(f"rank {rank}: {answer}")
        if problems:
            self.close()
            raise AssertionError("\n".join(problems))
        return answers

    def _fill(self):
        while len(self._members) < self._size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def close(self, gently=False):
        for process, pipe in self._members:
            if gently:
                pipe.send(None)
                process.join(5)
            pipe.close()
            process.terminate()
            process.join()
        self._members = []
