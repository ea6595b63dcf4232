"""Which layers get adapters: names of Hugging Face's projections to those of Megatron's layers; and how PEFT names the
halves of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

ALL_LINEAR = "all-linear"
# Hugging Face names of what Megatron keeps in one layer: an adapter covers all of them or none.
_FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


ADAPTER_HALVES = ("lora_A", "lora_B")
"""A [rank, in] and B [out, rank] of a layer."""


def adapter_half(weight: str, half: str) -> str:
    """Name of half of the adapter of a weight: `LAYER.weight` to `LAYER.lora_A.weight`."""
    return f"{weight.removesuffix('.weight')}.{half}.weight"


def target_layers(targets: Sequence[str]) -> set[str] | None:
    """Megatron's layer names; None: every linear layer. Raises ValueError for unknown names and for a part of a fused
    layer.
    """
    if ALL_LINEAR in targets:
        return None
    layers = set()
    for layer, parts in _FUSED.items():
        named = [part for part in parts if part in targets]
        if named and len(named) < len(parts):
            fused = ", ".join(parts)
            raise ValueError(f"model_args.lora_target: Megatron keeps {fused} in one layer; name all of them or none")
        if named or layer in targets:
            layers.add(layer)
    unknown = set(targets) - {part for parts in _FUSED.values() for part in parts} - set(_FUSED)
    if unknown:
        known = ", ".join([ALL_LINEAR, *(part for parts in _FUSED.values() for part in parts)])
        raise ValueError(f"model_args.lora_target {sorted(unknown)[0]!r} is not one of {known}")
    return layers


def target_projections(targets: Sequence[str]) -> tuple[str, ...]:
    """Hugging Face names of the projections that get adapters, of a model whose linear layers are those above. Raises
    ValueError as `target_layers`.
    """
    layers = target_layers(targets)
    return tuple(part for layer, parts in _FUSED.items() if layers is None or layer in layers for part in parts)
