"""Mistral, and its mixture of experts Mixtral."""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, MLP, NORMS, OLD_BUFFERS, window_fields
from roll_async.checkpoint.hf_names.moe import MOE_NORMS, experts, router, routing_fields
from roll_async.checkpoint.hf_names.table import Family


def _mixtral_fields(config: HfConfig) -> dict[str, object]:
    return {
        **routing_fields(
            config,
            num_experts=config.integer("num_local_experts", "num_experts"),
            expert_size=config.integer("intermediate_size"),  # config.json has no size of experts alone
            normalised=True,
        ),
        **window_fields(config),
    }


FAMILIES = (
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *MLP),
        fields=window_fields,
        unused=OLD_BUFFERS,
        tiny={"mistral window": {"sliding_window": 12}},
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        rows=(
            *EMBEDDING, *MOE_NORMS, *ATTENTION, *router("block_sparse_moe.gate"),
            *experts("block_sparse_moe.experts", gate="w1", up="w3", down="w2"),
        ),
        fields=_mixtral_fields,
        unused=OLD_BUFFERS,
        tiny={"mixtral": {"num_local_experts": 4}},
    ),
)  # fmt: skip
