"""Estimate of the memory on each device of a config: trainer roles, engines, weight buckets; and whether it fits.

Roles that share devices use them in turns: the engine sleeps while the trainer trains, the trainer's state is in host
memory while the engine generates, and a push needs the weights of both on the device. With `colocation: resident` all
of it is there at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.known_models import known_config
from roll_async.checkpoint.transforms import HeadLayout
from roll_async.config.schema import (
    MegatronInferConfig,
    MegatronTrainConfig,
    PipelineConfig,
    RunConfig,
    WorkerConfig,
)
from roll_async.trainer.megatron.memory_estimate import RankMemory, rank_memory
from roll_async.trainer.megatron.settings import MegatronSettings, ParallelSizes

GB = 1e9
CONTEXT_BYTES = int(1.5e9)
"""CUDA context, libraries and NCCL's buffers of one process."""
ENGINE_WORK_BYTES = int(2e9)
"""Activations, logits of the sampled positions and CUDA graphs of an engine rank."""
RESIDENT_MARGIN = 0.05
"""Share of a device that stays free where trainer and engine are resident: torch's allocator keeps freed blocks that no
other process can have, and the engine starts again beside a trainer that holds all of its own.
"""
_KV_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBytes:
    """Bytes on one device of an engine."""

    weights: int
    reserved: int
    """Total of the engine: its share of the device."""
    kv: int
    """Part of it for the KV cache."""
    kv_tokens: int
    """Tokens in the KV cache, over all devices of the engine."""
    longest: int
    """Tokens of the longest sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """Memory of each device of a set of devices with equal contents."""

    devices: tuple[int, ...]
    trainers: tuple[tuple[str, RankMemory], ...]
    engine: EngineBytes | None
    buckets: int
    device_bytes: int
    resident: bool = False
    """Trainer and engine hold their memory at the same time."""

    @property
    def training(self) -> int:
        """State of all trainer roles, and the largest temporary memory of one of them."""
        if not self.trainers:
            return 0
        work = max(memory.activations + memory.logits for _, memory in self.trainers)
        return sum(memory.state + CONTEXT_BYTES for _, memory in self.trainers) + work

    @property
    def pushing(self) -> int:
        """During a push: the weights of trainer and engine, and the buckets."""
        weights = sum(memory.weights + CONTEXT_BYTES for _, memory in self.trainers)
        return weights + (self.engine.weights + CONTEXT_BYTES if self.engine else 0) + self.buckets

    @property
    def generating(self) -> int:
        """The engine's share, and the CUDA contexts of trainer processes that are offloaded."""
        if self.engine is None:
            return 0
        return self.engine.reserved + len(self.trainers) * CONTEXT_BYTES

    @property
    def beside_engine(self) -> int:
        """What a resident engine cannot have."""
        return self.training + self.buckets + int(RESIDENT_MARGIN * self.device_bytes)

    @property
    def total(self) -> int:
        """The largest phase; of resident roles all of it."""
        if self.resident and self.engine is not None and self.trainers:
            return self.beside_engine + self.engine.reserved
        return max(self.training, self.pushing, self.generating)

    @property
    def problem(self) -> str | None:
        """Why it does not fit; None when it does."""
        if self.engine is not None and self.engine.kv_tokens < self.engine.longest:
            return (
                f"the engine's share of the device leaves room for {max(0, self.engine.kv_tokens)} tokens of KV cache, "
                f"a sequence has up to {self.engine.longest}: raise tensor_parallel_size or gpu_memory_utilization "
                "(mem_fraction_static) of actor_infer, or shorten response_length"
            )
        if self.total <= self.device_bytes:
            return None
        if self.resident and self.engine is not None and self.trainers:
            return self._not_resident(self.engine)
        phase = max(("training", "pushing", "generating"), key=lambda name: getattr(self, name))
        remedy = (
            "more tensor, pipeline or expert ranks, use_distributed_optimizer, optimizer_cpu_offload, "
            "recompute_granularity: full, fewer tokens per micro-batch"
            if phase != "generating"
            else "a smaller gpu_memory_utilization (mem_fraction_static) of actor_infer"
        )
        return f"{phase} takes {self.total / GB:.1f} of {self.device_bytes / GB:.0f} GB: {remedy}"

    def _not_resident(self, engine: EngineBytes) -> str:
        least, left = engine.reserved - engine.kv, self.device_bytes - self.beside_engine
        share = math.floor(100 * left / self.device_bytes) / 100
        smaller = (
            f"gpu_memory_utilization (mem_fraction_static) of actor_infer at most {share}, " if left > least else ""
        )
        parts = {"trainer": self.training, "engine": engine.reserved, "buckets": self.buckets}
        return (
            f"colocation=resident needs {self.total / GB:.1f} GB "
            f"({', '.join(f'{size / GB:.1f} {name}' for name, size in parts.items())}, {RESIDENT_MARGIN:.0%} margin), "
            f"there are {self.device_bytes / GB:.0f}: {smaller}colocation: turns with async_generation_ratio: 0, or "
            "devices of their own"
        )


def device_uses(config: RunConfig, device_bytes: int) -> list[DeviceUse]:
    """One entry per set of devices with the same roles; none for a config without devices. Raises ValueError for a
    model whose sizes are not known.
    """
    trainers = {
        name: (set(role.device_mapping), _trainer(config, role))
        for name, role in config.roles()
        if role.device_mapping and _is_megatron(role)
    }
    infer = config.actor_infer if isinstance(config, PipelineConfig) else None
    engine_devices = set(infer.device_mapping or ()) if infer is not None else set()
    groups: dict[tuple[str, ...], list[int]] = {}
    for device in sorted(engine_devices.union(*(devices for devices, _ in trainers.values()))):
        roles = [name for name, (devices, _) in trainers.items() if device in devices]
        groups.setdefault((*roles, *(["engine"] if device in engine_devices else [])), []).append(device)
    engine = _engine(infer, device_bytes) if infer is not None and engine_devices else None
    bucket_bytes = 2 * config.weight_sync.bucket_size_mb * (1 << 20) if isinstance(config, PipelineConfig) else 0
    return [
        DeviceUse(
            devices=tuple(devices),
            trainers=tuple((name, trainers[name][1]) for name in roles if name != "engine"),
            engine=engine if "engine" in roles else None,
            # Two: the one that is pulled and the one being filled (`transport/links.py`).
            buckets=bucket_bytes if {"actor_train", "engine"} & set(roles) else 0,
            device_bytes=device_bytes,
            resident=isinstance(config, PipelineConfig) and config.colocation == "resident",
        )
        for roles, devices in groups.items()
    ]


def require_fit(config: RunConfig, device_bytes: int) -> None:
    """Raises ValueError naming devices, phase and remedy if the memory does not fit. A model whose sizes are not known
    here is not checked.
    """
    if any(_model_or_none(role) is None for _, role in config.roles() if role.device_mapping):
        return
    problems = [(use, use.problem) for use in device_uses(config, device_bytes) if use.problem is not None]
    if problems:
        lines = [f"devices {span(use.devices)}: {problem}" for use, problem in problems]
        raise ValueError("; ".join(lines) + " (roll-async show --memory has the whole table)")


def span(devices: Sequence[int]) -> str:
    """`0-15` or `0,2,4`."""
    first, last = devices[0], devices[-1]
    if last - first == len(devices) - 1:
        return f"{first}-{last}" if last > first else str(first)
    return ",".join(str(device) for device in devices)


def _is_megatron(role: WorkerConfig) -> bool:
    return isinstance(role.strategy_args.strategy_config, MegatronTrainConfig | MegatronInferConfig)


def _model_or_none(role: WorkerConfig) -> HfConfig | None:
    return known_config(role.model_args.model_name_or_path)


def _model(role: WorkerConfig) -> HfConfig:
    found = _model_or_none(role)
    if found is None:
        raise ValueError(
            f"the sizes of {role.model_args.model_name_or_path} are not known here: download the model and name its "
            "folder, or any folder with its config.json"
        )
    return found


def _trainer(config: RunConfig, role: WorkerConfig) -> RankMemory:
    assert role.device_mapping
    return rank_memory(_model(role), MegatronSettings.of(config, role), len(role.device_mapping))


def _engine(role: WorkerConfig, device_bytes: int) -> EngineBytes:
    engine, model = role.engine, _model(role)
    ranks, stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
    settings = MegatronSettings(
        model_folder="",
        dtype=role.model_args.dtype,
        parallel=ParallelSizes(tensor=ranks, pipeline=stages, expert_tensor=ranks),  # experts are cut as well
    )
    weights = rank_memory(model, settings, ranks * stages).weights  # as of Megatron ranks of the same sizes
    if engine.quantization == "fp8":  # a byte a value instead of two
        weights //= 2
    reserved = int(engine.memory_share * device_bytes)
    kv = reserved - weights - ENGINE_WORK_BYTES
    per_token = _kv_bytes_per_token(model, ranks) // stages
    return EngineBytes(
        weights=weights,
        reserved=reserved,
        kv=max(0, kv),
        kv_tokens=max(0, kv) // per_token,
        longest=engine.context_tokens or 0,
    )


def _kv_bytes_per_token(model: HfConfig, ranks: int) -> int:
    """On one rank, all layers."""
    layers = model.integer("num_hidden_layers")
    if "kv_lora_rank" in model:
        # Latent attention: one latent for all heads, whole on every rank.
        return layers * _KV_BYTES * (model.integer("kv_lora_rank") + model.integer("qk_rope_head_dim"))
    layout = HeadLayout.of(model)
    # Keys and values. With fewer KV heads than ranks several ranks keep the same head.
    return 2 * layers * _KV_BYTES * max(1, layout.num_groups // ranks) * layout.head_size
