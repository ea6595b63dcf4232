"""`--device cpu` of a launcher: the same config on this machine's CPU, on the demo's tiny model and data.

What the config says of the algorithm, of sampling, of corrections and of asynchrony stays; model, data, reward,
devices, parallel sizes and the size of a batch are the demo's. It shows a config at work, not what it would learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from roll_async.config.api import ConfigError, Diagnostic, load
from roll_async.config.schema import PipelineConfig, RLVRConfig, WorkerConfig
from roll_async.launch.checks.packages import missing_packages

ASSETS = "./output/demo_assets"
_MODEL = f"{ASSETS}/model"
_SIZES = (
    "prompt_length=24",
    "response_length=40",
    "rollout_batch_size=8",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.per_device_train_batch_size=32",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "max_steps=3",
    "save_steps=0",
    "eval_steps=0",
)
# local: Transformer Engine needs a GPU.
_LOCAL = "{strategy_name: NAME, strategy_config: {transformer_impl: local}}"


def take_device(args: Sequence[str]) -> tuple[list[str], bool]:
    """(arguments without `--device cpu`, whether it was there). Raises ConfigError for another device."""
    rest, wanted = [], False
    words = iter(args)
    for word in words:
        flag, separator, value = word.partition("=")
        if flag != "--device":
            rest.append(word)
            continue
        value = value if separator else next(words, "")
        if value != "cpu":
            raise _usage(f"--device {value}: only cpu; devices are named by device_mapping of each role")
        wanted = True
    return rest, wanted


def cpu_overrides(path: Path, overrides: Sequence[str], pipeline: str | None) -> list[str]:
    """What comes before the overrides of the user. Raises ConfigError for a config of agents."""
    config = load(path, overrides, pipeline)
    if not isinstance(config, RLVRConfig):
        raise _usage(
            "--device cpu is for rlvr configs; agents have configs for CPU, e.g. agentic_frozen_lake_async_cpu"
        )
    found = [
        f"pretrain={_MODEL}",
        f"actor_train.data_args={{file_name: {ASSETS}/train.jsonl}}",
        "rewards={addition: {type: exact_match, num_workers: 1}}",
        "validation=null",
        *_SIZES,
        "actor_train.router_replay=false",  # the model has no experts
    ]
    if config.algorithm.overlong_buffer.enable:
        found.append("algorithm.overlong_buffer.len=8")  # of the response's 40 tokens
    for role, worker in config.roles():
        found += [f"{role}.device_mapping=null", f"{role}.world_size=1", f"{role}.model_args.dtype=fp32"]
        if worker.model_args.model_name_or_path != config.pretrain:
            found.append(f"{role}.model_args.model_name_or_path={_MODEL}")
        found.append(f"{role}.strategy_args={''.join(_strategy(config, role, worker))}")
    return found


def _strategy(config: PipelineConfig, role: str, worker: WorkerConfig) -> Iterator[str]:
    """That of the config without its parallel sizes; an engine that is not installed for the CPU is hf_infer."""
    name = worker.strategy_args.strategy_name
    if worker.is_megatron:
        yield _LOCAL.replace("NAME", name)
        return
    engine = worker.engine
    here = replace(worker, device_mapping=None)
    lacking = missing_packages(replace(config, actor_infer=here))  # type: ignore[arg-type]
    if engine.traits.package is None or any(key == f"{role}.strategy_args.strategy_name" for key, _ in lacking):
        yield "{strategy_name: hf_infer}"
    else:
        eager = f", {engine.traits.eager_key}: true" if engine.traits.eager_key else ""
        yield f"{{strategy_name: {name}, strategy_config: {{load_format: {engine.load_format}{eager}}}}}"


def _usage(message: str) -> ConfigError:
    return ConfigError((Diagnostic(id="C008", key="(file)", file="(command line)", line=0, message=message),))
