"""A rank pool whose processes have the Transformer Engine of te_stub/: a process of its own hosts it, because the
server that ranks are forked from has imported Megatron with or without that package, for good.
"""

import multiprocessing as mp
import os
import sys
from pathlib import Path

from tests.patience import patient

STUB = Path(__file__).resolve().parent / "te_stub"


def _host(pipe):
    os.environ["PYTHONPATH"] = f"{STUB}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    sys.path.insert(0, str(STUB))
    from roll_async.commands.certify.rank_pool import RankPool

    pool = RankPool(patient)
    while True:
        try:
            function, world_size, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, pool.run(function, world_size, **arguments)))
        except RuntimeError as error:
            pipe.send((False, str(error)))


class EnginePool:
    """`run` as of RankPool. To be closed."""

    def __init__(self):
        self._pipe, theirs = mp.get_context("spawn").Pipe()
        self._process = mp.get_context("spawn").Process(target=_host, args=(theirs,))
        self._process.start()
        theirs.close()

    def run(self, function, world_size, **arguments):
        self._pipe.send((function, world_size, arguments))
        if not self._pipe.poll(patient(600)):
            raise AssertionError("the pool gave no answer within 600 s")
        well, answer = self._pipe.recv()
        if not well:
            raise AssertionError(answer)
        return answer

    def close(self):
        self._pipe.close()
        self._process.join(patient(20))
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
