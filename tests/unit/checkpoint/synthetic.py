"""Checkpoints of every family made from a config and shapes alone: no transformers, no Megatron."""

import json

import torch

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.folders.safetensors_files import SafetensorsWriter, TensorSpec
from roll_async.checkpoint.hf_names.families import FAMILIES, family_of
from roll_async.checkpoint.hf_names.table import shape_of
from roll_async.checkpoint.tower import tower_shapes

BASE = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "routed_scaling_factor": 2.5, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS = {a: next(iter(family.tiny.values())) for family in FAMILIES for a in family.architectures}


def config_of(architecture, **changes):
    if family_of(architecture).reads_images:
        sizes = {"hidden_size": 8, "intermediate_size": 12, "depth": 2, "out_hidden_size": BASE["hidden_size"]}
        changes = {"vision_config": {**sizes, "patch_size": 2}, **changes}
    return {**BASE, **CONFIGS[architecture], "architectures": [architecture], **changes}


def shape_of_tensor(name, config):
    """From the last parts of the name, as transformers builds it."""
    c = config
    hidden, heads, size = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    module = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
    inner = c["intermediate_size"]
    if ".experts." in name and "block_sparse" not in name or "shared_experts" in name:
        inner = c.get("moe_intermediate_size", inner)
    elif "shared_expert." in name:
        inner = c["shared_expert_intermediate_size"]
    experts = c.get("n_routed_experts") or c.get("num_local_experts") or c.get("num_experts")
    latent = c.get("qk_nope_head_dim", 0) + c.get("qk_rope_head_dim", 0)
    shapes = {
        "embed_tokens": (c["vocab_size"], hidden), "lm_head": (c["vocab_size"], hidden),
        "q_proj": (heads * (latent or size), hidden), "o_proj": (hidden, heads * c.get("v_head_dim", size)),
        "qkv_proj": ((heads + 2 * c["num_key_value_heads"]) * size, hidden),
        "k_proj": (c["num_key_value_heads"] * size, hidden), "v_proj": (c["num_key_value_heads"] * size, hidden),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
        "w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner), "gate_up_proj": (2 * inner, hidden),
        "sinks": (heads,), "router": (experts, hidden),
        "gate": (experts, hidden), "e_score_correction_bias": (experts,), "shared_expert_gate": (1, hidden),
        "q_norm": (size,), "k_norm": (size,), "q_a_layernorm": (c.get("q_lora_rank"),),
        "q_a_proj": (c.get("q_lora_rank"), hidden), "q_b_proj": (heads * latent, c.get("q_lora_rank")),
        "kv_a_layernorm": (c.get("kv_lora_rank"),),
        "kv_a_proj_with_mqa": (c.get("kv_lora_rank", 0) + c.get("qk_rope_head_dim", 0), hidden),
        "kv_b_proj": (heads * (c.get("qk_nope_head_dim", 0) + c.get("v_head_dim", 0)), c.get("kv_lora_rank")),
    }  # fmt: skip
    # gpt-oss: a matrix of one expert has no `weight`, and is [in, out].
    stacked = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden), "gate_up_proj_bias": (2 * inner,)}
    if ".experts." in name and not name.endswith(".weight"):
        return stacked.get(module, (hidden,))
    if "linear_num_key_heads" in c:
        values, width = c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
        keys, inner = c["linear_num_key_heads"] * c["linear_key_head_dim"], values * c["linear_value_head_dim"]
        delta = {
            "in_proj_qkv": (2 * keys + inner, hidden), "in_proj_z": (inner, hidden), "in_proj_b": (values, hidden),
            "in_proj_a": (values, hidden), "in_proj_qkvz": (2 * keys + 2 * inner, hidden),
            "in_proj_ba": (2 * values, hidden), "conv1d": (2 * keys + inner, 1, width), "A_log": (values,),
            "dt_bias": (values,), "norm": (c["linear_value_head_dim"],), "out_proj": (hidden, inner),
        }  # fmt: skip
        if ".linear_attn." in name:
            return delta[module]
        shapes["q_proj"] = (2 * heads * size, hidden)  # and the gates of its heads
    shape = shapes.get(module, (hidden,))
    return shape[:1] if name.endswith(".bias") else shape


def tensors_of(config, dtype=torch.bfloat16):
    """HF name -> random tensor: all that a model of this config has."""
    read = HfConfig(config, "config.json")
    family = family_of(read.architecture())
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    fields = family.fields(read)
    for match in family.parameters(shape_of(config["num_hidden_layers"], fields)):
        is_head = match.name == "output_layer.weight"
        if not config["tie_word_embeddings"] if is_head else match.row.is_needed(fields):
            for name in match.hf_names:
                kept = torch.float32 if match.row.float32 else dtype
                tensors[name] = torch.randn(shape_of_tensor(name, config), generator=generator).to(kept)
    if family.reads_images:
        tensors |= {
            name: torch.randn(shape, generator=generator).to(dtype) for name, shape in tower_shapes(read).items()
        }
    return tensors


def write(folder, config, tensors):
    """A Hugging Face folder in one file, with a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": "none"}')
    write_file(folder / "model.safetensors", tensors)
    return folder


def write_file(path, tensors):
    specs = [TensorSpec(name=name, shape=tuple(x.shape), dtype=x.dtype) for name, x in tensors.items()]
    with SafetensorsWriter(path, specs) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
