"""The sizes of a model that ranks must share evenly."""

from __future__ import annotations

from dataclasses import dataclass

from roll_async.checkpoint.hf_config import HfConfig
from roll_async.checkpoint.known_models import known_config


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Sizes that a parallel layout must divide."""

    source: str
    """Name of the model in messages."""
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
    config = known_config(model)
    return None if config is None else ModelSizes.of(config)
