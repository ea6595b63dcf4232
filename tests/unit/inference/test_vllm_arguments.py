"""What vLLM's CPU build cannot compute is refused before its first token, by name."""

import json

import pytest

from roll_async.inference.vllm_arguments import _check_head_size


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, True),
        ({"hidden_size": 64, "num_attention_heads": 2}, False),
        ({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 48}, True),
        ({"hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 8}, False),
    ],
)
def test_a_head_size_without_a_kernel_is_refused_with_the_sizes_that_have_one(tmp_path, config, refused):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **config}))
    if not refused:
        _check_head_size(str(tmp_path))
        return
    with pytest.raises(ValueError, match=r"heads of 32, 64, .* only, this model's are of (16|48); use .*hf_infer"):
        _check_head_size(str(tmp_path))
