"""Names and shapes from a config.json are those of the model that transformers builds from it."""

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.known_models import known_config
from roll_async.weight_sync.model_tensors import model_tensors

TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY |= {"intermediate_size": 48, "vocab_size": 100, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LATENT |= {"first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 4}


def of_transformers(config):
    """HF names to shapes. Fused experts of newer releases come apart as in their checkpoints."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            width = tensor.shape[1] // 2
            for expert in range(tensor.shape[0]):
                for part in ("gate_proj", "up_proj"):
                    found[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = (width, tensor.shape[2])
        elif name.endswith("experts.down_proj"):
            for expert in range(tensor.shape[0]):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = tuple(tensor.shape[1:])
        else:
            found[name] = tuple(tensor.shape)
    return found


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Qwen2", {"head_dim": 8}),
        ("Qwen2", {"head_dim": 8, "tie_word_embeddings": True}),
        ("Qwen3", {}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}),
        ("Llama", {}),
        ("DeepseekV3", LATENT),
    ],
)
def test_the_tensors_of_a_family_are_those_of_transformers(family, more):
    config = getattr(transformers, f"{family}Config")(**{**TINY, "tie_word_embeddings": False, **more})
    values = {**config.to_dict(), "architectures": [f"{family}ForCausalLM"]}
    mine = {t.name: t.shape for t in model_tensors(HfConfig(values, "tiny"))}
    theirs = of_transformers(config)
    if values["tie_word_embeddings"]:
        theirs.pop("lm_head.weight")
    assert mine == theirs


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-7B", 7.616),
        ("Qwen2.5-32B", 32.8),
        ("Qwen3-235B-A22B", 235.1),
        ("DeepSeek-V3", 671.0),
        ("Kimi-K2", 1026),
    ],
)
def test_well_known_models_have_the_parameters_that_their_makers_state(name, billions):
    parameters = sum(t.num_bytes for t in model_tensors(known_config(name), element_bytes=1))
    assert parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_an_architecture_that_is_not_described_is_refused_with_the_list():
    with pytest.raises(ValueError, match="OtherForCausalLM is not one of Qwen2ForCausalLM"):
        model_tensors(HfConfig({"architectures": ["OtherForCausalLM"]}, "here"))
