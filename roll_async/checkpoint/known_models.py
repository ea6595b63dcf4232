"""Sizes of well-known models, as in their config.json, so that memory can be estimated before a download. The
config.json of a local folder has precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from roll_async.checkpoint.folders.hf_config import HfConfig, read_json

_SUFFIXES = ("-Instruct-2507", "-Thinking-2507", "-Instruct", "-Base", "-Thinking", "-Chat")


def _dense(architecture: str, sizes: Sequence[int], vocabulary: int, tied: bool, **more: int) -> dict[str, object]:
    """`sizes`: hidden, layers, heads, key-value heads, ffn."""
    hidden, layers, heads, groups, ffn = sizes
    return {
        "architectures": [architecture], "hidden_size": hidden, "num_hidden_layers": layers, "hidden_act": "silu",
        "num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": ffn,
        "vocab_size": vocabulary, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        **more,
    }  # fmt: skip


def _qwen2(*sizes: int, vocabulary: int = 152064, tied: bool = False) -> dict[str, object]:
    return _dense("Qwen2ForCausalLM", sizes, vocabulary, tied)


def _qwen2_5_vl(*sizes: int, vocabulary: int = 152064, tied: bool = False) -> dict[str, object]:
    model = _dense("Qwen2_5_VLForConditionalGeneration", sizes, vocabulary, tied)
    return {**model, "vision_config": {"hidden_size": 1280, "out_hidden_size": sizes[0]}}


def _qwen3(*sizes: int, tied: bool = False) -> dict[str, object]:
    return _dense("Qwen3ForCausalLM", sizes, 151936, tied, head_dim=128)


def _qwen3_moe(*sizes: int, expert: int) -> dict[str, object]:
    fields = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "decoder_sparse_step": 1}
    model = _dense("Qwen3MoeForCausalLM", sizes, 151936, False, head_dim=128)
    return {**model, **fields, "norm_topk_prob": True}


def _latent(layers: int, heads: int, dense: int, experts: int, vocabulary: int) -> dict[str, object]:
    """DeepSeek-V3's widths. `dense`: layers without experts."""
    model = _dense("DeepseekV3ForCausalLM", (7168, layers, heads, heads, 18432), vocabulary, False)
    return {
        **model, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": experts, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "first_k_dense_replace": dense,
    }  # fmt: skip


def _glm_moe(layers: int, experts: int) -> dict[str, object]:
    """GLM-4.5's widths of the smaller model."""
    model = _dense("Glm4MoeForCausalLM", (4096, layers, 96, 8, 10944), 151552, False, head_dim=128)
    return {
        **model, "attention_bias": True, "n_routed_experts": experts, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, object]:
    fields = {"head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128}
    return {**_dense("GptOssForCausalLM", (2880, layers, 64, 8, 2880), 201088, False, **fields), "attention_bias": True}


_MODELS: Mapping[str, Mapping[str, object]] = {
    # hidden, layers, heads, key-value heads, ffn
    "Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, vocabulary=151936, tied=True),
    "Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, vocabulary=151936, tied=True),
    "Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11008, vocabulary=151936, tied=True),
    "Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944),
    "Qwen2.5-14B": _qwen2(5120, 48, 40, 8, 13824),
    "Qwen2.5-32B": _qwen2(5120, 64, 40, 8, 27648),
    "Qwen2.5-72B": _qwen2(8192, 80, 64, 8, 29568),
    "Qwen2.5-VL-3B": _qwen2_5_vl(2048, 36, 16, 2, 11008, vocabulary=151936, tied=True),
    "Qwen2.5-VL-7B": _qwen2_5_vl(3584, 28, 28, 4, 18944),
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "Qwen3-4B": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288),
    "Qwen3-14B": _qwen3(5120, 40, 40, 8, 17408),
    "Qwen3-32B": _qwen3(5120, 64, 64, 8, 25600),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 4, 6144, expert=768),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 4, 12288, expert=1536),
    "DeepSeek-V3": _latent(61, 128, 3, 256, 129280),
    "Kimi-K2": _latent(61, 64, 1, 384, 163840),
    "GLM-4.5-Air": _glm_moe(46, 128),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "OLMo-2-1124-7B": _dense("Olmo2ForCausalLM", (4096, 32, 32, 32, 11008), 100352, False),
    "Phi-4": _dense("Phi3ForCausalLM", (5120, 40, 40, 10, 17920), 100352, False),
    "Seed-OSS-36B": _dense("SeedOssForCausalLM", (5120, 64, 80, 8, 27648), 155136, False, head_dim=128),
    "SmolLM3-3B": _dense("SmolLM3ForCausalLM", (2048, 36, 16, 4, 11008), 128256, True),
    "ERNIE-4.5-0.3B": _dense("Ernie4_5ForCausalLM", (1024, 18, 16, 2, 3072), 103424, True, head_dim=128),
    "Llama-3.1-8B": _dense("LlamaForCausalLM", (4096, 32, 32, 8, 14336), 128256, False),
    "Llama-3.1-70B": _dense("LlamaForCausalLM", (8192, 80, 64, 8, 28672), 128256, False),
    "Llama-3.2-1B": _dense("LlamaForCausalLM", (2048, 16, 32, 8, 8192), 128256, True),
    "Llama-3.2-3B": _dense("LlamaForCausalLM", (3072, 28, 24, 8, 8192), 128256, True),
}


def known_names(architectures: Sequence[str]) -> list[str]:
    """The well-known models of these architectures."""
    return [name for name, fields in _MODELS.items() if fields["architectures"] in ([a] for a in architectures)]


def known_config(name_or_path: str) -> HfConfig | None:
    """Of a local folder, or of a well-known model by the last part of its name; None for any other. Raises ValueError
    for a config.json that cannot be read.
    """
    file = Path(name_or_path) / "config.json"
    if file.is_file():
        return HfConfig(read_json(file), str(file))
    name = Path(name_or_path).name
    for suffix in ("", *_SUFFIXES):
        found = _MODELS.get(name.removesuffix(suffix))
        if found is not None:
            return HfConfig(found, name)
    return None
