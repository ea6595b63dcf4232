"""Dense families of Llama's rows: what is theirs is how they rotate, and where they have biases."""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, MLP, NORMS, OLD_BUFFERS, QKV_BIAS
from roll_async.checkpoint.hf_names.table import Family

_ROWS = (*EMBEDDING, *NORMS, *ATTENTION, *MLP)
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip


def _llama_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False, mlp_bias=False)
    return {}


def _helium_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False, mlp_bias=False)
    return {"rotary_interleaved": True}


def _ernie_fields(config: HfConfig) -> dict[str, object]:
    config.require(use_bias=False)
    return {"rotary_interleaved": True}


def _seed_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_out_bias=False, mlp_bias=False)
    return {"add_qkv_bias": config.flag("attention_bias", default=True)}


def _smollm_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False, mlp_bias=False, use_sliding_window=False)
    layers, every = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", default=4)
    turned = config.layers("no_rope_layers") or tuple(int((i + 1) % every != 0) for i in range(layers))
    return {"no_rope_freq": [int(not turns) for turns in turned[:layers]]}


FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        rows=_ROWS,
        fields=_llama_fields,
        unused=OLD_BUFFERS,
        tiny={"llama 2": {"num_key_value_heads": 4}, "llama 3": {"rope_parameters": _LLAMA3}},
    ),
    Family(
        name="smollm3",  # some layers do not rotate
        architectures=("SmolLM3ForCausalLM",),
        rows=_ROWS,
        fields=_smollm_fields,
        tied_by_default=True,
        tiny={"smollm3": {"no_rope_layer_interval": 2, "tie_word_embeddings": True}},
    ),
    Family(
        name="seed_oss",
        architectures=("SeedOssForCausalLM",),
        rows=(*_ROWS, *QKV_BIAS),
        fields=_seed_fields,
        tiny={"seed oss": {"head_dim": 32, "residual_dropout": 0.1}},
    ),
    Family(
        name="ernie4_5",  # neighbours are a pair, not the halves of a head
        architectures=("Ernie4_5ForCausalLM",),
        rows=_ROWS,
        fields=_ernie_fields,
        tied_by_default=True,
        tiny={"ernie 4.5": {"head_dim": 32, "tie_word_embeddings": True}},
    ),
    Family(
        name="helium",
        architectures=("HeliumForCausalLM",),
        rows=_ROWS,
        fields=_helium_fields,
        tiny={"helium": {"head_dim": 32, "hidden_size": 128}},  # heads fill the width
    ),
)
