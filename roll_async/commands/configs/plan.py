"""`roll-async plan`: where the processes of a config run, how weights travel, and what a training step consumes."""

from itertools import groupby

import click

from roll_async.buffer.states import QueueOptions
from roll_async.commands.command_line import AS_TYPED, print_pairs
from roll_async.commands.configs.validate import one_config
from roll_async.config.schema import (
    PipelineConfig,
    RLVRConfig,
    RunConfig,
    SupervisedConfig,
    WorkerConfig,
    roles_on_engine_devices,
)
from roll_async.config.schema_worker import MegatronInferConfig, MegatronTrainConfig
from roll_async.weight_sync.adapters import choose_adapters
from roll_async.weight_sync.bucket import STAGED
from roll_async.weight_sync.transport.transports import transport_of

_VERSIONS_SHOWN = 3


@click.command(context_settings=AS_TYPED, options_metavar="[--pipeline rlvr|agentic]")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG [KEY=VALUE]...")
def command(args: tuple[str, ...]) -> int:
    """Print the plan of CONFIG: placement of the processes, weight pushes, and the batches of a training step.

    \b
    Options:
      --pipeline rlvr|agentic     the kind of a config that does not set `pipeline`

    \b
    Example:
      roll-async plan configs/rlvr_config_async.yaml async_generation_ratio=2
    """
    return run_plan(list(args))


def run_plan(args: list[str]) -> int:
    """Print the plan of one config; exit 2 if it is not valid."""
    if (loaded := one_config("plan", args)) is None:
        return 2
    config = loaded.config
    if isinstance(config, SupervisedConfig):
        print_pairs([*placement(config), *steps(config)])
    else:
        print_pairs([*placement(config), *weight_push(loaded.generating), *batches(loaded.generating)])
    return 0


def steps(config: SupervisedConfig) -> list[tuple[str, str]]:
    """What a run without engines takes at a time, and when it ends."""
    what, epochs = "pairs" if config.pipeline == "dpo" else "rows", config.num_train_epochs
    end = f"{config.max_steps} steps" if epochs is None else f"{epochs} epochs"
    saves = f"every {config.save_steps} steps" if config.save_steps else "at the end"
    return [
        ("training step", f"{config.train_batch_size} {what} in 1 optimizer step"),
        ("run", f"{end}, a checkpoint {saves}"),
    ]


def placement(config: RunConfig) -> list[tuple[str, str]]:
    """Placement: one row per role."""
    rows = [("nodes", f"{config.num_nodes} of {config.num_gpus_per_node} devices")]
    for name, worker in config.roles():
        where = _devices(worker, config.num_gpus_per_node)
        if isinstance(config, PipelineConfig) and name == "actor_infer":
            engine = worker.strategy_args.strategy_name
            own = config.num_validation_replicas
            apart = f", the last {own} for validation alone" if own else ""
            rows.append((name, f"{config.num_servers} {engine} replicas{_share(worker, config)} {where}{apart}"))
        else:
            rows.append((name, f"{worker.num_ranks} ranks {where}{_parallel(worker)}"))
    if isinstance(config, PipelineConfig) and (shared := roles_on_engine_devices(config)):
        how = "take turns" if config.colocation == "turns" else "are resident side by side"
        rows.append(("colocation", f"{config.colocation}: {', '.join(shared)} and actor_infer {how} on shared devices"))
    if isinstance(config, RLVRConfig):
        hosts = ", ".join(
            f"{domain} ({reward.type}) x {reward.num_workers}" for domain, reward in config.rewards.items()
        )
        rows.append(("rewards", f"{hosts} CPU processes"))
    return rows


def weight_push(config: PipelineConfig) -> list[tuple[str, str]]:
    """Transport and interval of weight pushes."""
    a = config.async_training
    name, reason = transport_of(config)
    generating = "generate during the transfer" if name in STAGED else "are paused during the transfer"
    alone, why = choose_adapters(config)
    adapters = [("adapters", f"{'alone' if alone else 'merged'}: {why}")]
    return [
        *(adapters if config.actor_train.model_args.lora_rank else []),
        ("weight transport", f"{name}: {reason}; engines {generating}"),
        (
            "weight push",
            f"every {a.trigger_parameter_sync_step} training steps, in buckets of"
            f" {config.weight_sync.bucket_size_mb} MiB per rank, verify {config.weight_sync.verify},"
            f" interrupt {a.interrupt.mode}",
        ),
    ]


def batches(config: PipelineConfig) -> list[tuple[str, str]]:
    """Groups and samples of a training step, the groups admitted, and the staleness bound."""
    queue, a = QueueOptions.of(config), config.async_training
    limits = ", ".join(f"{queue.admission_limit(v * a.trigger_parameter_sync_step)}" for v in range(_VERSIONS_SHOWN))
    rows = [
        (
            "training step",
            f"{config.groups_per_batch} prompts x {config.samples_per_group} samples in "
            f"{config.optimizer_steps_per_batch} optimizer steps of {config.mini_batch_size} samples",
        ),
        ("admitted in total", f"{limits} groups after 0, 1, 2 weight pushes, then {queue.queue_limit} at a time"),
        (
            "staleness",
            f"mean about {config.async_generation_ratio:g} batches, at most {queue.bound_versions} weight versions, "
            f"policy {queue.policy.value}",
        ),
        ("run", f"{config.max_steps} steps, a checkpoint every {config.save_steps or config.max_steps} steps"),
    ]
    if config.is_async and queue.bound_versions == queue.staleness_bound:
        advice = (
            "a small async_generation_ratio with a larger staleness.max_versions is faster and fresher than the reverse"
        )
        rows.append(("advice", f"{advice}: compare both with roll-async simulate"))
    return rows


def _devices(worker: WorkerConfig, per_node: int) -> str:
    """`on devices 0-7 (node 0)`."""
    if worker.device_mapping is None:
        return "on CPU"
    ids, nodes = sorted(worker.device_mapping), sorted({d // per_node for d in worker.device_mapping})
    # Number minus place is the same for neighbours without a gap.
    runs = [[d for _, d in run] for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"on devices {text} (node {', '.join(map(str, nodes))})"


def _share(worker: WorkerConfig, config: PipelineConfig) -> str:
    devices = len(worker.device_mapping or ()) // config.num_servers
    return f" of {devices} devices" if devices > 1 else ""


def _parallel(worker: WorkerConfig) -> str:
    """The parallel sizes of a role that are above 1, as text."""
    strategy = worker.strategy_args.strategy_config
    if not isinstance(strategy, MegatronTrainConfig | MegatronInferConfig):
        return ""
    sizes = {
        "tensor": strategy.tensor_model_parallel_size,
        "pipeline": strategy.pipeline_model_parallel_size,
        "context": strategy.context_parallel_size,
        "expert": strategy.expert_model_parallel_size,
        "data": worker.num_ranks // worker.model_parallel_size,
    }
    named = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f": {named} parallel" if named else ""
