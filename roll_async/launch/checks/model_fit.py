"""Models against the config, from their files: what a model is, what it can hold, and how ranks share it. All that
does not fit is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from roll_async.checkpoint.folders.hf_config import HfConfig, read_json
from roll_async.checkpoint.hf_names.families import family_for
from roll_async.checkpoint.hf_names.table import Family
from roll_async.checkpoint.known_models import known_config
from roll_async.checkpoint.model_sizes import ModelSizes, embedding_rows, longest_context, pieces, tokenizer_rows
from roll_async.checkpoint.rotary import Rotary
from roll_async.config.engine_traits import ENGINE_TRAITS
from roll_async.config.schema import (
    MegatronInferConfig,
    MegatronTrainConfig,
    PipelineConfig,
    RLVRConfig,
    RunConfig,
    WorkerConfig,
)
from roll_async.config.versions import is_from
from roll_async.inference.backends import refuse_attention_on_cpu, refuse_images_unshown
from roll_async.launch.checks.inputs import models_of

Refusal = tuple[str, str]
"""(key, message)."""


def mismatches(config: RunConfig) -> Iterator[Refusal]:
    """Models that this version cannot train or the engine cannot run, rows and tokenizers that do not fit into them,
    and parallel sizes that do not divide them. A model on a hub is checked as far as a table of well-known ones tells.
    """
    if isinstance(config, PipelineConfig):
        yield from _blocks(config)
    for key, model in models_of(config).items():
        try:
            if _is_adapter(Path(model)):
                raise ValueError(_merge(model))
            found = known_config(model)
            if found is None:
                continue
            if (Path(model) / "config.json").is_file() and "architectures" in found:
                if isinstance(config, PipelineConfig) and config.actor_infer.model_args.model_name_or_path == model:
                    refuse_images_unshown(found, config.actor_infer.engine.traits)
                described_family(found)
                yield from _limits(config, key, model, found)
            sizes = ModelSizes.of(found)
        except ValueError as error:
            yield key, str(error)
            continue
        for role, worker in config.roles():
            if worker.model_args.model_name_or_path == model:
                yield from _shares(role, worker, sizes)
                yield from _padded(role, worker, found)


def _is_adapter(folder: Path) -> bool:
    """Whether PEFT wrote a folder, and no weights of a model are beside what it wrote."""
    weights = (file for name in ("model*.safetensors", "pytorch_model*.bin") for file in folder.glob(name))
    return (folder / "adapter_config.json").is_file() and not any(weights)


def _merge(adapter: str) -> str:
    """What an adapter is of, and the commands that make a model of it."""
    base = str(read_json(Path(adapter) / "adapter_config.json").get("base_model_name_or_path") or "BASE")
    made, source, fetch = adapter.rstrip("/"), base, ""
    if not Path(base).is_dir():
        source = f"{made}-base"
        fetch = f"hf download {base} --local-dir {source} && "
    return (
        f"{adapter} holds a LoRA adapter of {base}, not a model; merge it with: {fetch}roll-async convert {source} "
        f"{made}-megatron --adapter-path {adapter} && roll-async convert {made}-megatron {made}-merged, and name "
        f"{made}-merged"
    )


def described_family(model: HfConfig) -> Family:
    """The family of a model. Raises ValueError where none describes it: it could not be trained or pushed."""
    family = family_for(model)
    family.require_activation(model)
    latent = family.fields(model)
    if latent.get("q_lora_rank", 0) is None and is_from("megatron-core", "0.19"):
        why = "megatron-core 0.19 normalises queries that are not compressed (q_lora_rank: null)"
        raise ValueError(f'{model.source}: {why}; pip install "megatron-core<0.19"')
    Rotary.of(model, family.rotary_fraction)
    return family


def _limits(config: RunConfig, key: str, model: str, found: HfConfig) -> Iterator[Refusal]:
    """What the rows of a run ask of a model: its positions, its vocabulary, and its engine's attention."""
    vocabulary = found.integer("vocab_size")
    rows = min(vocabulary, embedding_rows(Path(model), vocabulary))
    needed = tokenizer_rows(config.pretrain)
    if needed > rows:
        message = f"the tokenizer of {config.pretrain} has ids up to {needed - 1}, {found.source} embeddings of {rows}"
        yield key, f"{message}; use the tokenizer that the model was made with, or resize the model's embeddings"
    taught = (r for r, w in config.roles() if w.model_args.model_name_or_path == model and r.startswith("teacher"))
    if role := next(taught, None):
        theirs = pieces(model)
        # Added tokens may differ: those of chats are in instructed models alone.
        if other := next((p for p, i in pieces(config.pretrain).items() if theirs and theirs.get(p) != i), None):
            message = f"token {other!r} has another id here than in {config.pretrain}, and a teacher scores ids"
            yield f"{role}.model_args.model_name_or_path", f"{message}; use a teacher with the policy's tokenizer"
    positions = longest_context(found)
    remedy = f"the model has {positions} positions ({found.source})"
    longest = config.longest_sequence
    if longest > positions:
        parts = "shorten prompt_length or response_length" if isinstance(config, RLVRConfig) else f"use {positions}"
        more = "or, if it was trained for more, raise max_position_embeddings there"
        yield "sequence_length", f"{longest} tokens, but {remedy}; {parts}, {more}"
    if not isinstance(config, PipelineConfig):
        return
    engine = config.actor_infer
    if engine.model_args.model_name_or_path != model:
        return
    n, traits = config.actor_infer.engine.context_tokens, config.actor_infer.engine.traits
    family, kept = family_for(found), traits.kept_positions
    if (why := traits.unserved.get(family.name)) is not None:
        serve = [name for name, other in ENGINE_TRAITS.items() if family.name not in other.unserved]
        remedy = f"use strategy_name: {serve[0]}" if serve else "no engine does: train it without one (sft, dpo)"
        yield key, f"{traits.title} cannot serve {found.architecture()} ({found.source}): {why}; {remedy}"
    if n is not None and n + kept > positions >= longest:  # where `longest` does not fit either, that was said
        own = f" and {kept} of {traits.title}'s own" if kept else ""
        most = positions - kept
        fits = f"use {most}" if most >= longest else f"use vllm, or shorten sequence_length to {most}"
        key = f"actor_infer.strategy_args.strategy_config.{traits.context_key}"
        yield key, f"{n} tokens{own}, but {remedy}; {fits}"
    if engine.device_mapping is None:
        refuse_attention_on_cpu(found, traits)
    window = family.fields(found).get("window_size")
    if not traits.sliding_windows and isinstance(window, tuple) and window[0] + 1 < longest:
        why = f"{traits.title} loses tokens outside of a sliding window; the model's is {window[0] + 1} positions"
        yield key, f"{why} ({found.source}), rows have {longest}; use strategy_name: vllm"


def _blocks(config: PipelineConfig) -> Iterator[Refusal]:
    """Blocks of the KV cache that the engine's kernels do not have."""
    size, traits = config.actor_infer.engine.block_size, config.actor_infer.engine.traits
    if size is None:
        return
    device = "cpu" if config.actor_infer.device_mapping is None else "cuda"
    if size % (multiple := traits.block_multiples[device]):
        where = "CPU" if device == "cpu" else "GPUs"
        kernels = f"{traits.title}'s attention on {where} has blocks of multiples of {multiple}"
        yield "actor_infer.strategy_args.strategy_config.block_size", f"{size}: {kernels}; use {multiple}"


def _shares(role: str, worker: WorkerConfig, sizes: ModelSizes) -> Iterator[Refusal]:
    """Parallel sizes of a role that do not divide its model."""
    settings, key = worker.strategy_args.strategy_config, f"{role}.strategy_args.strategy_config"
    match settings:
        case MegatronTrainConfig() | MegatronInferConfig():
            yield from _megatron(sizes, settings, key)
            if role == "actor_train" and worker.router_replay and not sizes.num_experts:
                yield "actor_train.router_replay", f"true, but {sizes.source} has no experts; set it to false"
        case _:
            heads = sizes.num_attention_heads
            yield from _uneven(
                f"{key}.tensor_parallel_size", settings.tensor_parallel_size, sizes, num_attention_heads=heads
            )
            if settings.pipeline_parallel_size > sizes.num_hidden_layers:
                message = f"{settings.pipeline_parallel_size} exceeds the {sizes.num_hidden_layers} layers of"
                yield f"{key}.pipeline_parallel_size", f"{message} {sizes.source}; use 1"


def _padded(role: str, worker: WorkerConfig, model: HfConfig) -> Iterator[Refusal]:
    """Rows that would not carry the three axes of images' positions."""
    trains = isinstance(worker.strategy_args.strategy_config, MegatronTrainConfig | MegatronInferConfig)
    if trains and "vision_config" in model and worker.micro_batching != "packed":
        message = f"{worker.micro_batching}, but {model.source} reads images, whose positions have three axes"
        yield f"{role}.micro_batching", f"{message}; set it to packed, with max_tokens_per_microbatch"


def _megatron(sizes: ModelSizes, settings: MegatronTrainConfig | MegatronInferConfig, key: str) -> Iterator[Refusal]:
    tp, pp, ep = (
        settings.tensor_model_parallel_size,
        settings.pipeline_model_parallel_size,
        settings.expert_model_parallel_size,
    )
    chunks = (settings.virtual_pipeline_model_parallel_size or 1) if isinstance(settings, MegatronTrainConfig) else 1
    yield from _uneven(
        f"{key}.tensor_model_parallel_size", tp, sizes,
        num_attention_heads=sizes.num_attention_heads, num_key_value_heads=sizes.num_key_value_heads,
        intermediate_size=sizes.intermediate_size, vocab_size=sizes.vocab_size,
    )  # fmt: skip
    layers = sizes.num_hidden_layers
    if layers % pp:
        yield from _uneven(f"{key}.pipeline_model_parallel_size", pp, sizes, num_hidden_layers=layers)
    elif layers % (pp * chunks):
        yield from _uneven(
            f"{key}.virtual_pipeline_model_parallel_size", chunks, sizes, num_hidden_layers_per_stage=layers // pp
        )
    if not sizes.num_experts:
        if ep > 1:
            yield f"{key}.expert_model_parallel_size", f"{ep}, but {sizes.source} has no experts; use 1"
        return
    yield from _uneven(f"{key}.expert_model_parallel_size", ep, sizes, num_experts=sizes.num_experts)
    etp = settings.expert_tensor_parallel_size
    yield from _uneven(
        f"{key}.expert_tensor_parallel_size", etp, sizes, moe_intermediate_size=sizes.moe_intermediate_size
    )
    if tp > 1 and not settings.sequence_parallel:
        message = f"false, but {sizes.source} has experts and tensor_model_parallel_size is {tp}; set it to true"
        yield f"{key}.sequence_parallel", message


def _uneven(key: str, ranks: int, sizes: ModelSizes, **counts: int) -> Iterator[Refusal]:
    broken = [f"{name} {count}" for name, count in counts.items() if count % ranks]
    if broken:
        # A divisor of the configured size divides the devices, too.
        fitting = [n for n in range(1, ranks) if not ranks % n and not any(count % n for count in counts.values())]
        yield key, f"{ranks} does not divide {' and '.join(broken)} of {sizes.source}; use {fitting[-1]}"
