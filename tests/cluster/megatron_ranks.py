"""A pool of gloo ranks that stay up between cases: starting one costs seconds (imports), a tiny model a fraction.

`Ranks(n, module)` starts n processes of this file; `run("function", layout, ...)` calls a function of that module on
every rank at once, under that layout, and returns what each rank returned.
"""

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class Ranks:
    """The pool. `module` is the path of the file whose functions run on the ranks."""

    def __init__(self, size, module, timeout_s=120):
        self.size, self._timeout_s = size, timeout_s
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        listener = Listener(("127.0.0.1", 0))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        arguments = [str(x) for x in (listener.address[1], size, port, module)]
        self._processes = [
            subprocess.Popen([sys.executable, __file__, str(rank), *arguments], env=env, cwd=ROOT)
            for rank in range(size)
        ]
        listener._listener._socket.settimeout(timeout_s)
        pipes = {}
        for _ in range(size):
            pipe = listener.accept()
            pipes[pipe.recv()] = pipe
        self._pipes = [pipes[rank] for rank in range(size)]

    def run(self, function, layout, *args):
        """[size] results of `function(*args)` under `layout` (fields of ParallelSizes)."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, layout, args)))  # `send` would share tensors by file descriptor
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._timeout_s):
                raise RankError(f"rank {rank} did not answer {function} within {self._timeout_s} s")
            failed, value = pickle.loads(pipe.recv_bytes())
            if failed:
                raise RankError(f"rank {rank} in {function}, layout {layout}:\n{value}")
            results.append(value)
        return results

    def close(self):
        for process in self._processes:
            process.kill()
            process.wait()


def serve(rank, port, size, rendezvous, module):
    """One rank: answer calls until the pool goes away."""
    import torch
    import torch.distributed as dist

    from roll_async.trainer.megatron import cpu_shim

    cpu_shim.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{rendezvous}", rank=rank, world_size=size)
    spec = importlib.util.spec_from_file_location("rank_functions", module)
    functions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(functions)
    pipe = Client(("127.0.0.1", port))
    pipe.send(rank)
    while True:
        try:
            name, layout, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.get("tensor", 1),
                pipeline_model_parallel_size=layout.get("pipeline", 1),
                virtual_pipeline_model_parallel_size=layout.get("virtual_pipeline"),
                expert_model_parallel_size=layout.get("expert", 1),
                expert_tensor_parallel_size=layout.get("expert_tensor", 1),
            )
            model_parallel_cuda_manual_seed(1)
            answer = (False, getattr(functions, name)(layout, *args))
        except Exception:  # whatever a case raises is that case's failure, not the pool's
            answer = (True, traceback.format_exc())
        parallel_state.destroy_model_parallel()
        pipe.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
