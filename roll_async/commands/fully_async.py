"""The fully asynchronous mode as a program: `FullyAsyncMain` and the classes a start script may replace.

from roll_async.commands.fully_async import FullyAsyncMain, FullyAsyncTrainer

class MyTrainer(FullyAsyncTrainer):
    def compute_custom_metrics(self, batch):
        return {"mine/longest": max(s.num_turns for g in batch for s in g.samples)}

sys.exit(FullyAsyncMain(trainer=MyTrainer).run(sys.argv[1:]))
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from roll_async.buffer.message_queue import MessageQueue
from roll_async.commands.command_line import execute
from roll_async.commands.run import launcher
from roll_async.pipelines.fully_async import FullyAsyncTrainer
from roll_async.pipelines.health import CustomMonitor
from roll_async.pipelines.wire import UserHooks
from roll_async.rollout.rollouter import Rollouter
from roll_async.rollout.tools import Tool, ToolCompletionCallback
from roll_async.weight_sync.push import ParameterSynchronizer

__all__ = ["FullyAsyncMain", "FullyAsyncTrainer", "MessageQueue", "ParameterSynchronizer", "Rollouter"]

DEFAULT_CONFIG = "fully_async_cpu"
LOG_NAME = "fully_async_training.log"


class FullyAsyncMain:
    """Coordinator of a fully asynchronous run: starts all components, watches their health, stops them in order,
    and leaves an exit code (docs_roll/metrics.md).

    `trainer`, `rollouter`: sub-classes with their hooks. `tools`: what the model may call, by name; `tool_callback`:
    how calls are found. `custom_monitor(trainer_stats, rollouter_stats)`: called every `monitor_interval_s` seconds and
    at the end.
    """

    def __init__(
        self,
        *,
        trainer: type[FullyAsyncTrainer] = FullyAsyncTrainer,
        rollouter: type[Rollouter] = Rollouter,
        tools: Mapping[str, Tool] | None = None,
        tool_callback: type[ToolCompletionCallback] = ToolCompletionCallback,
        custom_monitor: CustomMonitor | None = None,
        monitor_interval_s: float = 10.0,
    ) -> None:
        self._hooks = UserHooks(
            trainer=trainer,
            rollouter=rollouter,
            tools=dict(tools or {}),
            tool_callback=tool_callback,
            monitor_interval_s=monitor_interval_s,
            custom_monitor=custom_monitor,
            log_name=LOG_NAME,
            rollout_process=True,
        )

    def run(self, args: Sequence[str]) -> int:
        """`[--config NAME_OR_PATH | --config-path DIR --config-name NAME] [KEY=VALUE ...]` to an exit code; without a
        config the CPU demo. `--help` lists all options.
        """
        name = Path(sys.argv[0]).name
        example = f"python {name} --config-path configs --config-name {DEFAULT_CONFIG} max_steps=5"
        trains = launcher(name, pipeline="rlvr", hooks=self._hooks, default=DEFAULT_CONFIG, example=example)
        return execute(trains, args, name)
