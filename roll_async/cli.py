"""`roll-async`: parse, hand over. Every command checks its input before it imports anything heavy."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from roll_async import __version__
from roll_async.commands.command_line import EXIT_CODES, Commands, execute

COMMANDS = {
    "demo": ("roll_async.commands.demo.demo", "a tiny model learns to add numbers, on this machine's CPU"),
    "new": ("roll_async.commands.configs.new", "write a first config and a reward for a model, data and GPUs"),
    "doctor": ("roll_async.commands.doctor.doctor", "what of this machine, or for a config, stands in a run's way"),
    "run": ("roll_async.commands.run", "train what a config says"),
    "sft": ("roll_async.commands.supervised", "supervised fine-tuning on chats: the trainer without engines"),
    "dpo": ("roll_async.commands.supervised", "preference optimisation on pairs of answers, without engines"),
    "validate": ("roll_async.commands.configs.validate", "check configs, one line each"),
    "show": (
        "roll_async.commands.configs.show",
        "a config with all defaults and derived values; --memory: GB per device",
    ),
    "plan": (
        "roll_async.commands.configs.plan",
        "where a config's processes run, how weights travel, what a step consumes",
    ),
    "launch": ("roll_async.commands.launch.launch", "the run of a config on a cluster of Slurm or KubeRay"),
    "simulate": ("roll_async.commands.simulate", "a config's schedule on a virtual clock, before any GPU is used"),
    "port": (
        "roll_async.commands.configs.port",
        "a config of ROLL or verl in the keys of this project, with the reasons",
    ),
    "runs": ("roll_async.commands.runs", "the runs of a folder: id, steps, last reward, state"),
    "view": ("roll_async.commands.reading.view", "runs as a page in the browser, or as one HTML file"),
    "status": ("roll_async.commands.reading.status", "how a run stands: step, reward, who waits, what next"),
    "compare": ("roll_async.commands.reading.compare", "two runs: metrics at equal steps, and their configs"),
    "samples": ("roll_async.commands.reading.samples", "answers that a run keeps, the best or the worst first"),
    "scale": ("roll_async.commands.scale", "more or fewer engine replicas for a run under way"),
    "publish": ("roll_async.commands.reading.publish", "the model of a run on the Hugging Face hub, with a model card"),
    "convert": ("roll_async.commands.convert", "Hugging Face <-> Megatron checkpoints"),
    "certify": (
        "roll_async.commands.certify.certify",
        "prove a model family: shards, steps, files and pushes against Transformers",
    ),
    "eval": ("roll_async.commands.eval", "the validation of a config, of a model folder, a checkpoint or an address"),
    "rollout": ("roll_async.commands.rollout", "the worlds of an agentic config and a fixed model, without training"),
    "serve-policy": ("roll_async.commands.serve_policy", "a fixed model at the endpoints that agents are trained at"),
    "bench": ("roll_async.commands.bench", "the budgets of docs_roll/benchmarks.md"),
}
_HELP = """Asynchronous reinforcement-learning post-training: Megatron trains, vLLM or SGLang generates.

\b
Example:
  roll-async demo
  roll-async validate rlvr_config_async_cpu
  roll-async run --config rlvr_config_async_cpu max_steps=5
"""

app = Commands(COMMANDS, name="roll-async", help=_HELP, epilog=EXIT_CODES, no_args_is_help=False)
app = click.version_option(__version__, message="roll-async %(version)s")(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `roll-async` and `python -m roll_async`; returns the exit code."""
    return execute(app, sys.argv[1:] if argv is None else argv, "roll-async")


if __name__ == "__main__":
    sys.exit(main())
