"""`roll-async show CONFIG --weights` and `roll-async simulate --weights`: what a weight push sends over which link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll_async.checkpoint.known_models import known_config
from roll_async.commands.configs.plan import weight_push
from roll_async.config.schema import MegatronTrainConfig, PipelineConfig
from roll_async.weight_sync.layout import EngineLayout
from roll_async.weight_sync.model_tensors import model_tensors
from roll_async.weight_sync.traffic import HfTensor, Links, Traffic, traffic

_GB = 1e9
_ENGINE_RANK_BYTES = 60e9
"""Weights on one device of an engine, at most: the rest of 80 GB is KV cache."""
_DEVICES = (16, 64, 256, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """One row of models."""

    title: str
    model: str
    """A name of `checkpoint/known_models.py`."""
    pipeline: int
    published: str = ""
    """On 256 devices."""


_CASES = (
    _Case(title="7B", model="Qwen2.5-7B", pipeline=1),
    _Case(title="32B", model="Qwen2.5-32B", pipeline=1),
    _Case(title="235B-A22B", model="Qwen3-235B-A22B", pipeline=4),
    _Case(title="671B", model="DeepSeek-V3", pipeline=8, published="2.4 to 2.8 s"),
    _Case(title="1T", model="Kimi-K2", pipeline=8, published="7.2 s"),
)


def simulated_weights(network_gb_s: float) -> list[str]:
    """A table of models and clusters that are not there: half of the devices train, half generate."""
    lines = [
        f"network {network_gb_s:g} GB/s per device each way, half of the devices train; published: other systems",
        "",
        "| model | devices | replicas x ranks | trainer rank sends | engine rank receives | seconds | "
        "one rank for all | published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    links = Links(network=network_gb_s * _GB)
    for case in _CASES:
        config = known_config(case.model)
        assert config is not None
        tensors = model_tensors(config)
        ranks = _engine_ranks(sum(t.num_bytes for t in tensors))
        for devices in _DEVICES:
            half = devices // 2
            if ranks > half:
                lines.append(f"| {case.title} | {devices} | an engine needs {ranks} devices | | | | | |")
                continue
            layout = EngineLayout(tensor=ranks, num_kv_heads=config.integer("num_key_value_heads"))
            pipeline = min(case.pipeline, half)
            push = _push(tensors, layout, trainer_ranks=half, pipeline=pipeline, replicas=half // ranks)
            sizes = f"{push.sent_most / _GB:.2f} GB | {push.received_most / _GB:.1f} GB | {push.seconds(links):.2f}"
            gathered = f"{push.gathered_bytes / _GB:,.0f} GB, {push.gathered_bytes / links.network:,.0f} s"
            published = case.published if devices == 256 else ""
            replicas = f"{push.replicas} x {ranks}"
            lines.append(f"| {case.title} | {devices} | {replicas} | {sizes} | {gathered} | {published} |")
    return lines


def _engine_ranks(model_bytes: int) -> int:
    ranks = 1
    while model_bytes / ranks > _ENGINE_RANK_BYTES:
        ranks *= 2
    return ranks


def _push(
    tensors: Sequence[HfTensor],
    layout: EngineLayout,
    *,
    trainer_ranks: int,
    pipeline: int,
    replicas: int,
    bucket_mib: int = 1024,
) -> Traffic:
    return traffic(
        tensors,
        layout,
        trainer_ranks=trainer_ranks,
        pipeline=pipeline,
        replicas=replicas,
        bucket_bytes=(bucket_mib << 20) * trainer_ranks,  # the config's size is of one rank
    )


def plan_of(config: PipelineConfig, links: Links) -> list[str]:
    """Bytes per link of one push of a config. Raises ValueError for a model whose sizes nobody knows."""
    actor = config.actor_train
    model = known_config(actor.model_args.model_name_or_path)
    if model is None:
        raise ValueError(
            f"the sizes of {actor.model_args.model_name_or_path} are not known: name a folder with its config.json"
        )
    strategy, tensor = actor.strategy_args.strategy_config, config.actor_infer.engine.tensor_parallel_size
    pipeline = strategy.pipeline_model_parallel_size if isinstance(strategy, MegatronTrainConfig) else 1
    tensors = model_tensors(model, 4 if actor.model_args.dtype == "fp32" else 2)  # bytes of a value
    push = _push(
        tensors,
        EngineLayout(tensor=tensor, num_kv_heads=model.integer("num_key_value_heads", default=1)),
        trainer_ranks=actor.num_ranks,
        pipeline=pipeline,
        replicas=config.num_servers,
        bucket_mib=config.weight_sync.bucket_size_mb,
    )
    each = actor.num_ranks // pipeline
    lines = [f"{name}: {value}" for name, value in weight_push(config)]
    lines += [
        f"model: {push.model_bytes / _GB:.2f} GB from {actor.num_ranks} trainer ranks to {push.replicas} replicas of "
        f"{tensor} ranks",
        "",
        "| from | to | links | GB over each |",
        "|---|---|---|---|",
    ]
    for stage, to_ranks in enumerate(push.per_link):
        lines += [
            f"| {each} ranks of stage {stage} | rank {rank} of replica 0 | {each} | {num_bytes / _GB:.3f} |"
            for rank, num_bytes in enumerate(to_ranks)
        ]
    if push.replicas > 1:
        hops = f"| a rank of a replica | the same rank of the next | {tensor * (push.replicas - 1)} |"
        lines.append(f"{hops} {push.received_most / _GB:.3f} at most |")
    gathered_s = push.gathered_bytes / links.network
    gathered = f"{push.gathered_bytes / _GB:,.1f} GB from one rank to all replicas: {gathered_s:.2f} s"
    return [
        *lines,
        "",
        f"at {links.network / _GB:g} GB/s per rank each way: {push.seconds(links):.2f} s; without a plan {gathered}",
    ]
