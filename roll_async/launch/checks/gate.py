"""The check of configs that `run` and the launchers make, and hence `validate`, `show`, `plan` and `simulate`.

A config that passes the loader may still have settings that this version does not support, devices that no transport
connects, or parallel sizes that do not divide the model. All of these are refused here, before anything starts, with
the place in the file, the key and the remedy; docs_roll/status.md lists what is not supported yet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from roll_async.cluster.placement import of_nodes, uneven
from roll_async.config.api import ConfigError, Diagnostic, Loaded, load_with_warnings
from roll_async.config.loading.lookup import find_config
from roll_async.config.rules.every import placed
from roll_async.config.schema import (
    OF_TEACHERS,
    AgenticConfig,
    MegatronInferConfig,
    MegatronTrainConfig,
    ModelArguments,
    PipelineConfig,
    RunConfig,
    WorkerConfig,
    roles_on_engine_devices,
)
from roll_async.config.secrets import changed_leaves
from roll_async.config.user_code import search_beside
from roll_async.config.yaml.compose import CHECKOUT, SHIPPED
from roll_async.config.yaml.node import Node, find, leaves
from roll_async.launch.checks.inputs import missing_inputs, unread_variables
from roll_async.launch.checks.model_fit import mismatches
from roll_async.launch.checks.needs import needs_elsewhere
from roll_async.launch.checks.packages import missing_packages, runs_here
from roll_async.launch.checks.user_code import named_code
from roll_async.weight_sync.adapters import choose_adapters
from roll_async.weight_sync.transport.transports import SENDERS, transport_of

_INPUTS = {"pretrain", "reward_pretrain", "model_name_or_path", "file_name"}


def check_supported(path: str | Path, overrides: Sequence[str] = (), pipeline: str | None = None) -> Loaded:
    """The config at `path` if a launcher would start it. Raises ConfigError with all problems: C001 to C156 of the
    loader; or of this module C201, a setting that is not supported yet or has no effect, C202, devices and transport,
    C203, parallel sizes against the model. Dotted paths name modules beside this config from now on, too.
    """
    path = find_config(path)
    search_beside(path)
    loaded = in_checkout(load_with_warnings(path, overrides, pipeline))
    found = [placed(*refusal, loaded.root) for refusal in refusals(loaded)]
    if found:
        raise ConfigError((*loaded.warnings, *found))
    return loaded


def in_checkout(loaded: Loaded) -> Loaded:
    """The same with the models and prompt files that a shipped config names and that are in the checkout and not in the
    working directory: `./output/demo_assets/model` is the demo's wherever a command is typed. What a user's own file
    or an override says is meant from the working directory alone.
    """
    moved = {}
    for _, leaf in leaves(loaded.root, ""):
        for node in leaf.value if isinstance(leaf.value, list) else [leaf]:
            name = node.value
            shipped = not node.from_override and Path(os.path.abspath(node.file)).parent == SHIPPED
            if shipped and isinstance(name, str) and not os.path.exists(name):
                moved[name] = str(CHECKOUT / name)

    def change(path: tuple[str, ...], value: object) -> object:
        if not {*path[-2:]} & _INPUTS or not isinstance(value, str):
            return value
        there = moved.get(value, value)
        return there if os.path.exists(there) else value

    config = cast(RunConfig, changed_leaves(loaded.config, (), change))
    return loaded if config is loaded.config else replace(loaded, config=config)


def require_packages(loaded: Loaded) -> tuple[Diagnostic, ...]:
    """What is not installed here, as warnings (W14) of a config with devices, which may be for another machine. Raises
    ConfigError (C204) for one without: its roles are processes of the machine that it is looked at on.
    """
    on_devices = any(role.device_mapping for _, role in loaded.config.roles())
    found = missing_packages(loaded.config)
    if found and not on_devices and runs_here(loaded.config):
        raise ConfigError((*loaded.warnings, *(placed("C204", *one, loaded.root) for one in found)))
    return tuple(placed("W14", *one, loaded.root) for one in found)


def require_models(loaded: Loaded, config: RunConfig) -> None:
    """Raises ConfigError (C203) for models that were names on a hub when the config was admitted, and for variables
    that their chat template does not read. `config`: with a folder for each of them.
    """
    found = [*(mismatches(config) if config != loaded.config else ()), *unread_variables(config)]
    if found:
        raise ConfigError(tuple(placed("C203", _written(loaded.root, key), text, loaded.root) for key, text in found))


def require_devices(loaded: Loaded) -> None:
    """Raises ConfigError (C204), of one line, for a config whose devices are not on this machine while no cluster is
    joined: nothing else of what is missing need be said in another one.
    """
    if (needs := needs_elsewhere(loaded.config)) is not None:
        raise ConfigError((placed("C204", "(file)", needs, loaded.root),))


def require_inputs(loaded: Loaded) -> None:
    """Raises ConfigError (C204) for packages, model folders, prompt files and worlds that are not on this machine, and
    for an own loss or estimator that fails on two rows.
    Called where the run starts only: a config may be validated on another machine.
    """
    lacking = missing_packages(loaded.config, engines=runs_here(loaded.config))
    found = [*lacking, *missing_inputs(loaded.config)]
    if isinstance(loaded.config, AgenticConfig) and not lacking:  # worlds import what is lacking
        from roll_async.launch.agents import check_agents

        try:
            check_agents(loaded.config)
        except ValueError as error:
            found.append(_keyed(str(error)))
    if isinstance(loaded.config, PipelineConfig) and any(loaded.config.algorithm.own_code()) and not lacking:
        from roll_async.algorithms.own_code import unusable_code  # torch, which other configs do not wait for

        found += unusable_code(loaded.config.algorithm)
    if found:
        errors = (placed("C204", key, text, loaded.root) for key, text in found)
        raise ConfigError((*loaded.warnings, *errors))


def refusals(loaded: Loaded) -> Iterator[tuple[str, str, str]]:
    """(id, key, message) of every problem that this module finds."""
    config = loaded.config
    for problem in unsupported(config):
        yield ("C201", *_keyed(problem))
    if isinstance(config, PipelineConfig):
        yield from (("C201", key, message) for key, message in named_code(loaded))
        yield from (("C202", *_keyed(problem)) for problem in _devices(config))
    for key, message in mismatches(config):
        yield "C203", _written(loaded.root, key), message


def _written(root: Node, key: str) -> str:
    """The key of a length that was written, where the sum of two others has none of its own."""
    parts = ("sequence_length", "response_length", "prompt_length") if key == "sequence_length" else (key,)
    return next((part for part in parts if find(root, part.split("."))), key)


def unsupported(config: RunConfig) -> list[str]:
    """Key, value and remedy of every setting that this version does not support."""
    return [*_roles(config), *(_engine(config) if isinstance(config, PipelineConfig) else ())]


def _keyed(problem: str) -> tuple[str, str]:
    """`KEY=VALUE ...` or `KEY: ...` as (key, message)."""
    match = re.match(r"([A-Za-z_][A-Za-z0-9_.]*)(?:=|: | )", problem)
    return (match[1], problem[match.end() :]) if match else ("(file)", problem)


def _devices(config: PipelineConfig) -> Iterator[str]:
    """Devices that no transport connects, and processes whose devices are on two nodes."""
    try:
        transport_of(config)
    except ValueError as error:
        yield str(error).replace("weight_sync.transport ", "weight_sync.transport: ", 1)  # a key, for `_keyed`
    engines = config.actor_infer
    if engines.device_mapping is None:
        return
    size, per_node = len(engines.device_mapping) // config.num_servers, config.num_gpus_per_node
    traits = config.actor_infer.engine.traits
    for first in range(0, len(engines.device_mapping), size):
        devices = engines.device_mapping[first : first + size]
        by_node = of_nodes(devices, per_node)
        if len(by_node) == 1:
            continue
        what = f"actor_infer.device_mapping: devices {list(devices)} of one replica"
        if problem := uneven(by_node):
            yield f"{what} {problem}; order them by nodes (num_gpus_per_node={per_node})"
        elif config.actor_infer.engine.pipeline_parallel_size > 1 and not traits.stages_over_nodes:
            yield (
                f"{what} lie on nodes {[node for node, _ in by_node]}, and {traits.title} sends weights to other "
                "nodes in a group that knows tensor-parallel ranks alone; use pipeline_parallel_size: 1, or vllm, or "
                "order them so that the devices of a replica share a node"
            )
        elif roles := roles_on_engine_devices(config):
            yield (
                f"{what} lie on nodes {[node for node, _ in by_node]}, and {', '.join(roles)} shares them; "
                "give engines that span nodes devices of their own"
            )
        else:
            continue
        return


def _roles(config: RunConfig) -> list[str]:
    problems = []
    for name, role in config.roles():
        problems += _without_effect(name, role)
        strategy = role.strategy_args.strategy_config
        if isinstance(strategy, MegatronTrainConfig | MegatronInferConfig):
            problems += _megatron(name, role, strategy)
        elif name in ("reference", "teacher") or name.startswith(OF_TEACHERS):
            problems.append(
                f"{name}.strategy_args.strategy_name={role.strategy_args.strategy_name} is not there yet; "
                "use megatron_infer"
            )
    return problems


def _without_effect(name: str, role: WorkerConfig) -> list[str]:
    """Settings of a role that have no effect."""
    problems = []
    trains = isinstance(role.strategy_args.strategy_config, MegatronTrainConfig)
    plain, given = ModelArguments(), role.model_args
    for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "freeze_module_prefix"):
        if not trains and tuple_free(getattr(given, key)) != tuple_free(getattr(plain, key)):
            problems.append(f"{name}.model_args.{key} has no effect on a role that does not train; remove it")
    if not role.logits_in_fp32:
        problems.append(f"{name}.logits_in_fp32=false: log-probs always come from fp32 logits; remove it")
    return problems


def tuple_free(value: object) -> object:
    """A value with its tuples as lists, so that loaded values and defaults compare equal."""
    return list(value) if isinstance(value, tuple) else value


def _megatron(name: str, role: WorkerConfig, strategy: MegatronTrainConfig | MegatronInferConfig) -> list[str]:
    problems = []
    if isinstance(strategy, MegatronTrainConfig):
        if strategy.overlap_param_gather and not (strategy.use_distributed_optimizer and strategy.overlap_grad_reduce):
            problems.append(
                f"{name}.strategy_args.strategy_config.overlap_param_gather=true needs use_distributed_optimizer: true "
                "and overlap_grad_reduce: true; set it to false"
            )
    return problems


def _engine(config: PipelineConfig) -> list[str]:
    problems = []
    if config.actor_train.router_replay:
        problems += _cannot_record(config)
    problems += _quantized_on_cpu(config)
    problems += _stages_on_cpu(config)
    problems += _adapters(config)
    transport = config.weight_sync.transport
    if transport not in ("auto", *SENDERS):
        problems.append(f"weight_sync.transport={transport} is not there yet; use auto")
    generating = config.actor_infer.generating_args
    sections = {
        f"validation.sets.{name}" if name else "validation": a for name, a in config.validation_sampling.items()
    }
    if isinstance(config, AgenticConfig):
        sections = {"val_env_manager": sections["validation"]}
    for section, args in {"actor_infer": generating, **sections}.items():
        if not args.logprobs and (section == "actor_infer" or args is not generating):
            problems.append(
                f"{section}.generating_args.logprobs=false has no effect: engines always report log-probs; remove it"
            )
    if not (traits := config.actor_infer.engine.traits).samples_all:
        vllm = "set actor_infer.strategy_args.strategy_name: vllm"
        if generating.stop_strings:
            problems.append(f"actor_infer.generating_args.stop_strings: {traits.title} samples without them; {vllm}")
        if generating.repetition_penalty != 1:
            value = f"{generating.repetition_penalty:g}"
            problems.append(
                f"actor_infer.generating_args.repetition_penalty={value}: {traits.title} samples without it; {vllm}"
            )
    return problems


def _adapters(config: PipelineConfig) -> list[str]:
    """Adapters that cannot be pushed alone, or are on unknown layers."""
    try:
        choose_adapters(config)
    except ValueError as error:
        return [str(error)]
    return []


def _quantized_on_cpu(config: PipelineConfig) -> list[str]:
    wanted = config.actor_infer.engine.quantization
    if wanted is None or config.actor_infer.device_mapping is not None:
        return []
    key = "actor_infer.strategy_args.strategy_config.quantization"
    return [f"{key}={wanted}: the engines have no such kernels on CPU; remove it, or set device_mapping"]


def _stages_on_cpu(config: PipelineConfig) -> list[str]:
    stages, traits = config.actor_infer.engine.pipeline_parallel_size, config.actor_infer.engine.traits
    if stages == 1 or traits.stages_on_cpu or config.actor_infer.device_mapping is not None:
        return []
    key = "actor_infer.strategy_args.strategy_config.pipeline_parallel_size"
    return [
        f"{key}={stages}: {traits.title}'s CPU build makes no buffers for what its stages hand on, and "
        "fails at its first step; set it to 1, or set device_mapping"
    ]


def _cannot_record(config: PipelineConfig) -> list[str]:
    """Why vLLM could not report the experts that it used."""
    key, engine = "actor_infer.strategy_args.strategy_config", config.actor_infer.engine
    if engine.traits.records_whole:
        return []
    problems = []
    if not engine.shares_prefixes:
        problems.append(f"{key}.enable_prefix_caching=false: vLLM records experts beside its prefix cache")
    if engine.pipeline_parallel_size > 1:
        size = engine.pipeline_parallel_size
        problems.append(f"{key}.pipeline_parallel_size={size}: vLLM records experts of one stage only")
    remedy = "set actor_train.router_replay: false"
    found = [f"{problem}; change it, or {remedy}" for problem in problems]
    if config.actor_infer.device_mapping is None:
        found.append(
            "actor_train.router_replay=true: vLLM records no experts on CPU, because what records them needs Triton; "
            f"use strategy_name: hf_infer or sglang, or {remedy}"
        )
    return found
