"""Names and shapes of a model's tensors from its config.json, for arithmetic over models that are not there."""

from __future__ import annotations

from collections.abc import Iterator

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.families import is_tied
from roll_async.weight_sync.traffic import HfTensor

_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def model_tensors(config: HfConfig, element_bytes: int = 2) -> list[HfTensor]:
    """Raises ValueError for an architecture that is not described here."""
    family = config.architecture()
    if family not in _ATTENTION:
        raise ValueError(f"{config.source}: {family} is not one of {', '.join(_ATTENTION)}")
    return [HfTensor(name=n, shape=s, element_bytes=element_bytes) for n, s in _all(config, family)]


def _all(config: HfConfig, family: str) -> _Shapes:
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for i in range(config.integer("num_hidden_layers")):
        layer = f"model.layers.{i}"
        yield from ((f"{layer}.self_attn.{name}", shape) for name, shape in _ATTENTION[family](config))
        yield from ((f"{layer}.mlp.{name}", shape) for name, shape in _mlp(config, i))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not is_tied(config):
        yield "lm_head.weight", (vocabulary, hidden)


def _grouped_query(config: HfConfig) -> _Shapes:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head = config.integer("head_dim", default=hidden // heads)
    kv = config.integer("num_key_value_heads", default=heads) * head
    yield "q_proj.weight", (heads * head, hidden)
    yield "k_proj.weight", (kv, hidden)
    yield "v_proj.weight", (kv, hidden)
    yield "o_proj.weight", (hidden, heads * head)


def _qwen2(config: HfConfig) -> _Shapes:
    for name, shape in _grouped_query(config):
        yield name, shape
        if not name.startswith("o_"):  # Qwen2 has biases on q, k and v alone
            yield name.replace("weight", "bias"), shape[:1]


def _qwen3(config: HfConfig) -> _Shapes:
    yield from _grouped_query(config)
    head = config.integer("head_dim", default=128)
    yield "q_norm.weight", (head,)
    yield "k_norm.weight", (head,)


def _latent(config: HfConfig) -> _Shapes:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    query, latent = config.integer("q_lora_rank"), config.integer("kv_lora_rank")
    plain, rotary = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    value = config.integer("v_head_dim")
    yield "q_a_proj.weight", (query, hidden)
    yield "q_a_layernorm.weight", (query,)
    yield "q_b_proj.weight", (heads * (plain + rotary), query)
    yield "kv_a_proj_with_mqa.weight", (latent + rotary, hidden)
    yield "kv_a_layernorm.weight", (latent,)
    yield "kv_b_proj.weight", (heads * (plain + value), latent)
    yield "o_proj.weight", (hidden, heads * value)


_ATTENTION = {
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3,
    "LlamaForCausalLM": _grouped_query,
    "MistralForCausalLM": _grouped_query,
    "DeepseekV3ForCausalLM": _latent,
}


def _mlp(config: HfConfig, layer: int) -> _Shapes:
    hidden = config.integer("hidden_size")
    experts = config.integer("num_experts", "num_local_experts", "n_routed_experts", default=0)
    if not experts or layer < config.integer("first_k_dense_replace", default=0):  # DeepSeek's first layers are dense
        yield from _gated("", hidden, config.integer("intermediate_size"))
        return
    width, shared = config.integer("moe_intermediate_size"), config.integer("n_shared_experts", default=0)
    yield "gate.weight", (experts, hidden)
    if shared:
        yield "gate.e_score_correction_bias", (experts,)
        yield from _gated("shared_experts.", hidden, shared * width)
    for expert in range(experts):
        yield from _gated(f"experts.{expert}.", hidden, width)


def _gated(place: str, hidden: int, width: int) -> _Shapes:
    yield f"{place}gate_proj.weight", (width, hidden)
    yield f"{place}up_proj.weight", (width, hidden)
    yield f"{place}down_proj.weight", (hidden, width)
