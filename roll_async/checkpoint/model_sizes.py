"""The sizes of a model that ranks must share evenly, from its config.json or, for well-known models, from a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from roll_async.checkpoint.hf_config import HfConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What a layout is checked against."""

    source: str
    """Named in messages."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    """0 = dense."""
    moe_intermediate_size: int = 0

    @classmethod
    def of(cls, config: HfConfig) -> ModelSizes:
        """Raises ValueError for a config.json without them."""
        heads = config.integer("num_attention_heads")
        experts = config.integer("num_experts", "num_local_experts", "n_routed_experts", default=0)
        return cls(
            source=config.source,
            num_hidden_layers=config.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config.integer("num_key_value_heads", default=heads),
            intermediate_size=config.integer("intermediate_size"),
            vocab_size=config.integer("vocab_size"),
            num_experts=experts,
            moe_intermediate_size=config.integer("moe_intermediate_size", default=0) if experts else 0,
        )


def sizes_of(model: str) -> ModelSizes | None:
    """Of a model folder, or of a well-known model by its name; None when neither tells. Raises ValueError for a
    config.json that cannot be read.
    """
    file = Path(model) / "config.json"
    if file.is_file():
        try:
            values = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is not readable as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file} holds no JSON object")
        return ModelSizes.of(HfConfig(values, str(file)))
    name = Path(model).name
    for suffix in ("", "-Instruct", "-Base"):
        row = _KNOWN.get(name.removesuffix(suffix))
        if row is not None:
            return _row(name, row)
    return None


def _row(name: str, row: tuple[int, ...]) -> ModelSizes:
    layers, heads, groups, intermediate, vocabulary, *experts = row
    return ModelSizes(
        source=name,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        num_experts=experts[0] if experts else 0,
        moe_intermediate_size=experts[1] if experts else 0,
    )


_KNOWN: dict[str, tuple[int, ...]] = {
    "Qwen2.5-0.5B": (24, 14, 2, 4864, 151936),
    "Qwen2.5-1.5B": (28, 12, 2, 8960, 151936),
    "Qwen2.5-3B": (36, 16, 2, 11008, 151936),
    "Qwen2.5-7B": (28, 28, 4, 18944, 152064),
    "Qwen2.5-14B": (48, 40, 8, 13824, 152064),
    "Qwen2.5-32B": (64, 40, 8, 27648, 152064),
    "Qwen2.5-72B": (80, 64, 8, 29568, 152064),
    "Qwen3-0.6B": (28, 16, 8, 3072, 151936),
    "Qwen3-1.7B": (28, 16, 8, 6144, 151936),
    "Qwen3-4B": (36, 32, 8, 9728, 151936),
    "Qwen3-8B": (36, 32, 8, 12288, 151936),
    "Qwen3-14B": (40, 40, 8, 17408, 151936),
    "Qwen3-32B": (64, 64, 8, 25600, 151936),
    "Qwen3-30B-A3B": (48, 32, 4, 6144, 151936, 128, 768),
    "Qwen3-235B-A22B": (94, 64, 4, 12288, 151936, 128, 1536),
    "Llama-3.1-8B": (32, 32, 8, 14336, 128256),
    "Llama-3.1-70B": (80, 64, 8, 28672, 128256),
    "Llama-3.2-1B": (16, 32, 8, 8192, 128256),
    "Llama-3.2-3B": (28, 24, 8, 8192, 128256),
}
"""Layers, attention heads, key-value heads, intermediate size, vocabulary; experts and their size."""
