"""The transports of weights by name, and the choice of one for a device mapping. Choosing must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from roll_async.config.schema import PipelineConfig

SENDERS: dict[str, str] = {
    "shm": "roll_async.weight_sync.transport.shm.FileWriter",
    "filesystem": "roll_async.weight_sync.transport.filesystem.FolderWriter",
    "gloo": "roll_async.weight_sync.transport.gloo.writer",
    "nccl": "roll_async.weight_sync.transport.nccl.writer",
    "cuda_ipc": "roll_async.weight_sync.transport.cuda_ipc.writer",
}
RECEIVERS: dict[str, str] = {
    "shm": "roll_async.weight_sync.transport.shm.reader",
    "filesystem": "roll_async.weight_sync.transport.shm.reader",
    "gloo": "roll_async.weight_sync.transport.gloo.reader",
    "nccl": "roll_async.weight_sync.transport.nccl.reader",
    "cuda_ipc": "roll_async.weight_sync.transport.cuda_ipc.reader",
}
ONE_HOST = frozenset({"shm", "cuda_ipc"})
"""They end at the host of the trainer."""

OVER_NETWORK = frozenset({"gloo", "filesystem"})
"""They cross a network or a disk: fewer bytes are less time. Within a host, finding what changed costs several
times what a copy costs; between devices, it would have to pass through the host.
"""


def sends_changes(wanted: str, transport: str) -> bool:
    """`weight_sync.sparse` for a transport."""
    return wanted == "on" or (wanted == "auto" and transport in OVER_NETWORK)


def transport_of(config: PipelineConfig) -> tuple[str, str]:
    """`choose_transport` for the device mappings of a config."""
    return choose_transport(
        config.weight_sync.transport,
        trainer_devices=config.actor_train.device_mapping,
        engine_devices=config.actor_infer.device_mapping,
        num_gpus_per_node=config.num_gpus_per_node,
        front_end=needs_front_end(config),
    )


def needs_front_end(config: PipelineConfig) -> str | None:
    """Why the ranks of an engine cannot take weights in themselves, each its part on its device; None = they can."""
    engine, traits = config.actor_infer.engine, config.actor_infer.engine.traits
    if engine.pipeline_parallel_size > 1 and not traits.stages_receive:
        return f"{traits.title} has pipeline stages, and only the first one answers"
    if others := sorted(engine.extra.keys() & traits.keys_of_other_parts):
        return f"with {', '.join(others)} {traits.title}'s ranks keep other parts than its tensor parallelism says"
    return None


def choose_transport(
    wanted: str,
    *,
    trainer_devices: Sequence[int] | None,
    engine_devices: Sequence[int] | None,
    num_gpus_per_node: int,
    front_end: str | None = None,
) -> tuple[str, str]:
    """(transport, reason). Devices None: CPU. `front_end`: why the engine's ranks do not receive weights themselves;
    its front end then passes them on, through host memory. Raises ValueError when the wanted transport cannot connect
    the roles.
    """
    trainer, engines = set(trainer_devices or ()), set(engine_devices or ())
    nodes, shared = sorted({d // num_gpus_per_node for d in trainer | engines}), sorted(trainer & engines)
    if wanted == "auto":
        if trainer and engines and front_end is not None:
            name = "gloo" if len(nodes) > 1 else "shm"  # the front end takes weights in host memory
            return name, f"{front_end}, so its front end receives the weights"
        if shared:  # NCCL refuses two ranks on one GPU
            return "cuda_ipc", f"actor_train and actor_infer share devices {shared}"
        if trainer and engines:
            return "nccl", "actor_train and actor_infer lie on different devices"
        if len(nodes) > 1:
            return "gloo", f"one side has no devices, and the roles lie on nodes {nodes}"
        return "shm", "one host without devices on both sides, and engines generate while the weights travel"
    if wanted not in SENDERS:
        raise ValueError(f"weight_sync.transport {wanted!r} is not one of auto | {' | '.join(SENDERS)}")
    if wanted in ("nccl", "cuda_ipc") and front_end is not None:
        raise ValueError(f"weight_sync.transport {wanted}: {front_end}; use auto")
    if wanted in ("nccl", "cuda_ipc") and not (trainer and engines):
        raise ValueError(f"weight_sync.transport {wanted} needs actor_train and actor_infer on GPUs; use auto")
    if wanted == "nccl" and shared:
        raise ValueError(f"weight_sync.transport nccl: actor_train and actor_infer share devices {shared}; use auto")
    if wanted == "cuda_ipc" and not shared:
        raise ValueError("weight_sync.transport cuda_ipc: actor_train and actor_infer share no device; use auto")
    if wanted == "shm" and len(nodes) > 1:
        raise ValueError(f"weight_sync.transport shm: trainer and engines lie on nodes {nodes}; use auto")
    return wanted, "as configured"
