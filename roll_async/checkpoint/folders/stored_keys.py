"""How Megatron's torch_dist checkpoints name parameters.

They hold whole tensors, whatever the layout of the ranks that wrote them, under the names of Transformer Engine
layers. Equal layers are stacked along a first axis: `decoder.layers.mlp.linear_fc2.weight` [L, hidden, ffn]. Where
layers differ (some dense, some with experts) each has its own key, `decoder.layers.3.mlp...`. Experts are stacked the
same way, after the layer axis, under `mlp.experts.experts`: [L, E, out, in], or [E, out, in] under a key with the
layer's number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roll_async.checkpoint.hf_names.table import Match, ModelShape

_NOT_PARAMETERS = re.compile(
    r"(.*\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine_state)\b.*|.*\._extra_state.*"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredKey:
    """Location of a parameter: `tensor[index]` of the stored tensor `key`."""

    key: str
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()
    """Sizes of the leading axes that `index` counts in."""


def is_parameter(key: str) -> bool:
    """Whether a stored key is a model parameter, not optimizer state, RNG or a layer's extra state."""
    return not _NOT_PARAMETERS.fullmatch(key)


def key_to_write(match: Match, shape: ModelShape) -> StoredKey:
    """The key that Megatron itself would use for this model."""
    return _key(match, match.te_name, shape, stacked=shape.layers_are_equal)


def keys_to_read(match: Match, shape: ModelShape) -> list[StoredKey]:
    """Every form in which a checkpoint may hold the parameter, likeliest first."""
    names = dict.fromkeys((match.te_name, match.name))  # one where both spellings agree
    return [_key(match, name, shape, stacked=stacked) for name in names for stacked in (True, False)]


def extra_states(stored: StoredKey) -> list[str]:
    """Names of the empty objects that Megatron's layers expect beside a weight (Transformer Engine keeps fp8 scales in
    them). Megatron does not load a checkpoint without them.
    """
    module, _, kind = stored.key.rpartition(".")
    # Embedding, output layer, router and tower are not modules of Transformer Engine.
    if kind not in ("weight", "layer_norm_weight") or re.search(r"embedding|output_layer|router|^visual", module):
        return []
    modules = [module]
    # Attention itself has a state but no weight: it is named with the layer after it.
    if module.endswith("self_attention.linear_proj"):
        modules.append(module.replace("linear_proj", "core_attention"))
    # Megatron's name of an object in a grid: its place, and the grid's sizes.
    offset, size = (".".join(str(x) for x in axes) for axes in (stored.index or (0,), stored.stack or (1,)))
    return [f"{name}._extra_state/shard_{offset}_{size}" for name in modules]


def _key(match: Match, name: str, shape: ModelShape, *, stacked: bool) -> StoredKey:
    if match.layer is None:
        return StoredKey(key=name)
    if match.expert is not None:
        # local_experts.3.linear_fc1.weight and linear_fc1.weight3 alike: the expert is an axis.
        name = re.sub(r"\.experts\.(local_experts\.\d+\.)?", ".experts.experts.", name)
        name = re.sub(r"(weight|bias)\d+$", r"\1", name)
    index, stack = (match.layer,), (shape.num_layers,)
    if stacked:
        name = name.replace(f"layers.{match.layer}.", "layers.", 1)
    else:
        index, stack = (), ()
    if match.expert is not None:
        index, stack = (*index, match.expert), (*stack, shape.num_experts)
    return StoredKey(key=name, index=index, stack=stack)
