"""The ranks of a vLLM replica on a node after its first: vLLM's multiprocess executor without an engine (its
`--headless`). The engine on the first node commands them by messages, and they join its process group.
"""

from __future__ import annotations

import multiprocessing.connection

from roll_async.inference.settings import EngineSettings
from roll_async.inference.vllm.arguments import engine_arguments, prepare_environment
from roll_async.inference.vllm.failure import start_errors


class VllmFollower:
    """The processes on this node."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings

    def start(self) -> None:
        """Start the ranks and load the model; blocks until those of all nodes are there. Raises ValueError for settings
        a user can fix, RuntimeError when the library fails.
        """
        prepare_environment(self._settings)
        with start_errors():
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor

            config = engine_arguments(self._settings).create_engine_config(headless=True)
            self._executor = MultiprocExecutor(config, monitor_workers=False)  # `wait` looks for their end

    def wait(self) -> None:
        """Return when one of the ranks has ended."""
        multiprocessing.connection.wait([worker.proc.sentinel for worker in self._executor.workers])
