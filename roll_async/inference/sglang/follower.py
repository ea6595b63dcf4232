"""The ranks of an SGLang replica on a node after its first: its schedulers without a front end, as `--node-rank` starts
them. The engine on the first node commands them by messages.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os

from roll_async.inference.settings import EngineSettings
from roll_async.inference.sglang.arguments import engine_arguments, leave_failures_to_the_start, prepare_environment


class SglangFollower:
    """The processes on this node."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings

    def start(self) -> None:
        """Start the ranks and load the model; blocks until those of all nodes are there. Raises ValueError for settings
        a user can fix, RuntimeError when the library fails.
        """
        prepare_environment(self._settings)
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # else SGLang waits in its start for their end
        import sglang
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._settings.model_folder).get_text_config()
        arguments = engine_arguments(self._settings, config)
        self._engine = sglang.Engine(**arguments, custom_sigquit_handler=leave_failures_to_the_start)
        self._ranks = self._engine._scheduler_init_result.all_child_pids

    def wait(self) -> None:
        """Return when one of the ranks has ended."""
        ranks = [child.sentinel for child in multiprocessing.active_children() if child.pid in self._ranks]
        if len(ranks) == len(self._ranks):  # a rank that ended before this call is no active child
            multiprocessing.connection.wait(ranks)
