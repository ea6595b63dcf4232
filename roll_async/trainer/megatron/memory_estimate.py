"""What a Megatron rank will hold on its device, in bytes, from sizes alone: no device, no Megatron, no weights.

Weights, gradients and optimizer state are counts, the same that `MegatronWorker.load_states` reports (a test compares
them). Activations and logits are estimates of the largest moment of a step. The fullest pipeline stage counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.families import family_for, is_tied
from roll_async.checkpoint.hf_names.table import Family, Transform, delta_layers
from roll_async.checkpoint.lora_targets import target_layers
from roll_async.checkpoint.tower import tower_shapes
from roll_async.checkpoint.transforms import HeadLayout
from roll_async.trainer.megatron.settings import MegatronSettings

_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
LOGITS_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
"""Of the logits of one piece, in the model's dtype; their gradient takes their place."""
CHUNK_BYTES = {"cuda": 128 << 20, "cpu": 2 << 20}
"""Of one float32 copy of some rows, where nothing is compiled; up to 3 are alive, 8 with truncated sampling. On the CPU
they fit a core's cache, and are memory the allocator has at hand: fresh pages cost like a pass.
"""
DELTA_CHUNK = 64
"""Positions that a gated delta net solves at once: a triangle of so many rows, and a state kept for so many."""
_LOGITS_BYTES, _CHUNK_BYTES = LOGITS_BYTES["cuda"], 3 * CHUNK_BYTES["cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on the device of one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def state(self) -> int:
        """What stays from step to step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """At the largest moment of a step."""
        return self.state + self.activations + self.logits


@dataclass(frozen=True, slots=True)
class Matrix:
    """This rank's part of a layer's parameters of one kind."""

    name: str
    """Megatron's name of the layer; adapters go by it."""
    rows: int
    columns: int
    is_expert: bool = False
    copies: int = 1

    @property
    def size(self) -> int:
        """Numbers."""
        return self.rows * self.columns * self.copies


@dataclass(frozen=True, slots=True)
class _Counts:
    """Numbers in parameters of one rank."""

    frozen: int = 0
    """In the model's dtype, without gradient."""
    trained: int = 0
    """In the model's dtype."""
    adapters: int = 0
    """float32."""
    trained_experts: int = 0
    adapters_of_experts: int = 0

    def __add__(self, other: _Counts) -> _Counts:
        return _Counts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def rank_memory(model: HfConfig, settings: MegatronSettings, world_size: int) -> RankMemory:
    """Of the fullest rank of a role. Raises ValueError for a model that has no entry in checkpoint/hf_names."""
    stages = [
        _stage_memory(model, settings, world_size, stage, _layers_of_stage(model, settings, stage))
        for stage in range(settings.parallel.pipeline)
    ]
    return max(stages, key=lambda stage: stage.total)


def num_parameters(model: HfConfig) -> int:
    """Of the whole model, without a value head."""
    settings = MegatronSettings(model_folder="")
    counts = _count(model, settings, stage=0, layers=range(model.integer("num_hidden_layers")))
    # Settings without an optimizer train nothing, so that all of it counts as frozen.
    return counts.frozen


def _layers_of_stage(model: HfConfig, settings: MegatronSettings, stage: int) -> list[int]:
    """Global layer numbers; an interleaved pipeline deals them out in chunks."""
    sizes = settings.parallel
    chunks = sizes.pipeline * (sizes.virtual_pipeline or 1)
    each = model.integer("num_hidden_layers") // chunks
    return [c * each + i for c in range(stage, chunks, sizes.pipeline) for i in range(each)]


def _stage_memory(
    model: HfConfig, settings: MegatronSettings, world_size: int, stage: int, layers: Sequence[int]
) -> RankMemory:
    sizes, width = settings.parallel, _DTYPE_BYTES[settings.dtype]
    counts = _count(model, settings, stage=stage, layers=layers)
    dense, experts = counts.trained + counts.adapters, counts.trained_experts + counts.adapters_of_experts
    adapters = counts.adapters + counts.adapters_of_experts
    weights = width * (counts.frozen + counts.trained + counts.trained_experts) + 4 * adapters
    gradients = optimizer = 0
    if settings.optimizer is not None:
        # Gradient buffers are float32, whatever the dtype of the model.
        gradients = 4 * (dense + experts)
        shards = expert_shards = 1
        if settings.optimizer.distributed:
            # Over data- and context-parallel ranks together.
            shards = world_size // (sizes.tensor * sizes.pipeline)
            expert_shards = max(1, world_size // (sizes.pipeline * sizes.expert * sizes.expert_tensor))
        moments, main = 8, 4 if width == 2 else 0  # adapters are float32: they have no second copy
        optimizer = (moments * dense + main * counts.trained) // shards
        optimizer += (moments * experts + main * counts.trained_experts) // expert_shards
        if settings.optimizer.cpu_offload:
            # In host memory; the step has it on the device when activations are gone (host_state.py).
            optimizer = 0
    activations, logits = _step_memory(model, settings, stage, layers)
    return RankMemory(weights=weights, gradients=gradients, optimizer=optimizer, activations=activations, logits=logits)


def _count(model: HfConfig, settings: MegatronSettings, *, stage: int, layers: Sequence[int]) -> _Counts:
    targets = target_layers(settings.lora_targets)
    total = _Counts()
    for matrix in matrices_of(model, settings, stage=stage, layers=layers):
        adapted = settings.lora_rank > 0 and matrix.name in (targets or _LINEAR) and matrix.name in _LINEAR
        halves = settings.lora_rank * (matrix.rows + matrix.columns) * matrix.copies if adapted else 0
        trains = settings.optimizer is not None and not settings.lora_rank
        total += _Counts(
            frozen=0 if trains else matrix.size,
            trained=matrix.size if trains and not matrix.is_expert else 0,
            trained_experts=matrix.size if trains and matrix.is_expert else 0,
            adapters=0 if matrix.is_expert else halves,
            adapters_of_experts=halves if matrix.is_expert else 0,
        )
    return total


_LINEAR = (
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "in_proj",
    "out_proj",
)


def fields_of(model: HfConfig) -> Mapping[str, object]:
    """Megatron's names and values of the model's family."""
    return family_for(model).fields(model)


def _integer(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name) or 0
    assert isinstance(value, int)
    return value


def _is_sparse(fields: Mapping[str, object], layer: int) -> bool:
    if not fields.get("num_moe_experts"):
        return False
    every = fields.get("moe_layer_freq", 1)
    return bool(every[layer]) if isinstance(every, list) else True


def matrices_of(model: HfConfig, settings: MegatronSettings, *, stage: int, layers: Sequence[int]) -> Iterator[Matrix]:
    """Everything with a gradient buffer on this rank."""
    sizes, hidden, fields = settings.parallel, model.integer("hidden_size"), fields_of(model)
    vocabulary = model.integer("vocab_size") // sizes.tensor
    tied = is_tied(model) and not settings.with_value_head
    last = stage == sizes.pipeline - 1
    if stage == 0:
        yield Matrix("embedding", vocabulary, hidden)
        if family_for(model).reads_images:
            yield Matrix("visual", sum(map(math.prod, tower_shapes(model).values())), 1)
    # LayerNorm has a bias beside its weight.
    of_norm = 2 if fields.get("normalization") == "LayerNorm" else 1
    if last:
        yield Matrix("final_layernorm", of_norm, hidden)
        if settings.with_value_head:
            yield Matrix("output_layer", 1, hidden)
        # A tied head on another stage than the embedding is a copy of its own.
        elif not tied or sizes.pipeline > 1:
            yield Matrix("output_layer", vocabulary, hidden)
    family = family_for(model)
    norms = 2 * (family.input_norms + family.output_norms)
    for layer in layers:
        yield Matrix("norms", of_norm * norms, hidden)
        if _has_delta(fields, layer):
            yield from _delta_net(model, sizes.tensor)
        else:
            yield from _attention(model, family, fields, sizes.tensor)
        if _is_sparse(fields, layer):
            yield from _experts(settings, fields, hidden)
        else:
            ffn = model.integer("intermediate_size") // sizes.tensor
            yield Matrix("linear_fc1", ffn * _inputs_of_mlp(fields), hidden)
            yield Matrix("linear_fc2", hidden, ffn)


def _has_delta(fields: Mapping[str, object], layer: int) -> bool:
    found = delta_layers(fields)
    return bool(found) and found[layer]


def _delta_net(model: HfConfig, ranks: int) -> Iterator[Matrix]:
    heads, hidden = HeadLayout.of(model).of_rank(ranks), model.integer("hidden_size")
    delta = heads.delta
    assert delta is not None
    yield Matrix("in_proj", sum(heads.rows(Transform.DELTA_INPUT)), hidden)
    yield Matrix("conv_weight", sum(heads.rows(Transform.DELTA_QKV)), model.integer("linear_conv_kernel_dim"))
    yield Matrix("bias", 2 * delta.num_values, 1)
    yield Matrix("norms", 1, delta.value_size)
    yield Matrix("out_proj", hidden, delta.values)


def _inputs_of_mlp(fields: Mapping[str, object]) -> int:
    """Projections that a dense MLP begins with: gate and up, or up alone."""
    return 2 if fields.get("gated_linear_unit", True) else 1


def _attention(model: HfConfig, family: Family, fields: Mapping[str, object], ranks: int) -> Iterator[Matrix]:
    hidden = model.integer("hidden_size")
    if fields.get("multi_latent_attention"):
        heads, rope = model.integer("num_attention_heads") // ranks, _integer(fields, "qk_pos_emb_head_dim")
        query, value = _integer(fields, "qk_head_dim"), _integer(fields, "v_head_dim")
        low, low_kv = _integer(fields, "q_lora_rank"), _integer(fields, "kv_lora_rank")
        if low:
            # Down projections are whole on every tensor rank (layer_spec.py).
            yield Matrix("linear_q_down_proj", low, hidden)
            yield Matrix("norms", 1, low)
            yield Matrix("linear_q_up_proj", heads * (query + rope), low)
        else:
            yield Matrix("linear_q_proj", heads * (query + rope), hidden)
        yield Matrix("linear_kv_down_proj", low_kv + rope, hidden)
        yield Matrix("kv_layernorm", 1, low_kv)
        yield Matrix("linear_kv_up_proj", heads * (query + value), low_kv)
        yield Matrix("linear_proj", hidden, heads * value)
        return
    layout = HeadLayout.of(model)
    queries = layout.rows()[0] // ranks
    gates = queries if fields.get("attention_output_gate") else 0
    rows = sum(layout.rows()) // ranks + gates
    yield Matrix("linear_qkv", rows, hidden)
    yield Matrix("linear_proj", hidden, queries)
    if fields.get("add_qkv_bias"):
        yield Matrix("bias", rows, 1)
    if fields.get("add_bias_linear"):
        yield Matrix("bias", hidden, 1)
    if fields.get("softmax_type"):
        yield Matrix("bias", layout.rows()[0] // layout.head_size // ranks, 1)
    if fields.get("qk_layernorm"):
        # Those of all heads together are whole on every tensor rank.
        yield Matrix("norms", 1, sum(layout.rows()[:2]) if family.projection_norms else 2 * layout.head_size)


def _experts(settings: MegatronSettings, fields: Mapping[str, object], hidden: int) -> Iterator[Matrix]:
    sizes, count = settings.parallel, _integer(fields, "num_moe_experts")
    ffn, own = _integer(fields, "moe_ffn_hidden_size") // sizes.expert_tensor, count // sizes.expert
    yield Matrix("router", count, hidden)
    biased = bool(fields.get("add_bias_linear"))
    # Those of gpt-oss, which have biases, take no adapters.
    yield Matrix("experts" if biased else "linear_fc1", 2 * ffn, hidden, True, own)
    yield Matrix("experts" if biased else "linear_fc2", hidden, ffn, True, own)
    if biased:
        yield Matrix("bias", count, 1)
        yield Matrix("bias", 2 * ffn + hidden, 1, True, own)
    shared = _integer(fields, "moe_shared_expert_intermediate_size") // sizes.tensor
    if shared:
        yield Matrix("linear_fc1", 2 * shared, hidden)
        yield Matrix("linear_fc2", hidden, shared)
        if fields.get("moe_shared_expert_gate"):
            yield Matrix("gate", 1, hidden)


# The largest moment of a step


def _tokens(settings: MegatronSettings, rows: int) -> int:
    """Of the largest micro-batch, on one context rank."""
    packed = settings.micro_batching != "fixed" and settings.max_tokens_per_microbatch is not None
    whole = (
        # A row longer than the budget is a micro-batch of its own.
        max(settings.max_tokens_per_microbatch or 0, settings.longest_row) if packed else rows * settings.longest_row
    )
    return whole // settings.parallel.context


def _step_memory(model: HfConfig, settings: MegatronSettings, stage: int, layers: Sequence[int]) -> tuple[int, int]:
    """(activations, logits) of a training step, or of scoring where that takes more."""
    sizes, width = settings.parallel, _DTYPE_BYTES[settings.dtype]
    is_last = stage == sizes.pipeline - 1 and not settings.with_value_head
    vocabulary = model.integer("vocab_size") // sizes.tensor
    scored, trained = (_tokens(settings, rows) for rows in (settings.scoring_rows, settings.micro_batch_rows))
    per_token = [_layer_activation(model, settings, layer) for layer in layers]
    hidden = model.integer("hidden_size") * width // (sizes.tensor if sizes.sequence_parallel else 1)
    scoring = (
        scored * (max(per_token) + 2 * hidden),
        is_last * (min(scored * vocabulary * width, _LOGITS_BYTES) + _CHUNK_BYTES),
    )
    if settings.optimizer is None:
        return scoring
    # 1F1B: a stage holds the activations of a micro-batch until it comes back through the later stages.
    in_flight = sizes.pipeline - stage
    stored = sum(per_token)
    if settings.recompute.get("recompute_granularity") == "full":
        every = settings.recompute.get("recompute_num_layers", 1)
        assert isinstance(every, int)
        if settings.recompute.get("recompute_method") == "block":
            # block: the first layers are computed again and keep their input; the others keep everything.
            stored = hidden * min(every, len(layers)) + sum(per_token[every:])
        else:
            # uniform: the input of each run of `every` layers.
            stored = hidden * -(-len(layers) // every)
    # The layer that is computed again has all its activations meanwhile.
    working = max(per_token) * (settings.recompute.get("recompute_granularity") == "full")
    training = (
        trained * (in_flight * stored + working),
        is_last * (min(trained * vocabulary * width, _LOGITS_BYTES) + _CHUNK_BYTES),  # their gradient takes their place
    )
    return max(scoring, training, key=sum)


def _layer_activation(model: HfConfig, settings: MegatronSettings, layer: int) -> int:
    """Bytes that one layer keeps of one token for its backward pass, with an attention that keeps no scores."""
    sizes, fields, hidden = settings.parallel, fields_of(model), model.integer("hidden_size")
    layout = HeadLayout.of(model)
    queries, keys, values = (rows // sizes.tensor for rows in layout.rows())
    wide = hidden // (sizes.tensor if sizes.sequence_parallel else 1)
    if _is_sparse(fields, layer):
        chosen = model.integer("num_experts_per_tok")
        ffn = chosen * _integer(fields, "moe_ffn_hidden_size") // sizes.expert_tensor
        ffn += _integer(fields, "moe_shared_expert_intermediate_size") // sizes.tensor
        dispatched = 2 * chosen * hidden
    else:
        ffn, dispatched = model.integer("intermediate_size") // sizes.tensor, 0
    if _has_delta(fields, layer):
        delta = layout.of_rank(sizes.tensor).delta
        assert delta is not None
        # Four of what is projected and convolved in the model's dtype; in float32 queries, keys and values of each
        # value head, what is made of them chunk by chunk, and three rows of a chunk's triangle.
        mixed, of_head = 2 * delta.keys + 2 * delta.values, 7 * delta.key_size + 6 * delta.value_size + 3 * DELTA_CHUNK
        kept = 4 * wide + 4 * mixed + (1 + _inputs_of_mlp(fields)) * ffn + dispatched
        return kept * _DTYPE_BYTES[settings.dtype] + 4 * delta.num_values * of_head
    gates = 2 * queries if fields.get("attention_output_gate") else 0
    # Inputs and outputs of two norms; queries, keys before and after rotation, values, output; gate and up, from which
    # the backward pass of a fused SwiGLU makes all else, and their product.
    kept = 4 * wide + 3 * queries + gates + 2 * keys + values + (1 + _inputs_of_mlp(fields)) * ffn + dispatched
    return kept * _DTYPE_BYTES[settings.dtype]
