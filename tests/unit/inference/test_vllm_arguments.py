"""What vLLM's CPU build cannot compute is refused before its first token, by name."""

import json
from dataclasses import replace

import pytest

from roll_async.inference.settings import EngineSettings, NodeSpan
from roll_async.inference.vllm_arguments import _arguments, _check_attention, _check_span


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, True),
        ({"hidden_size": 64, "num_attention_heads": 2}, False),
        ({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 48}, True),
    ],
)
def test_a_head_size_without_a_kernel_is_refused_with_the_sizes_that_have_one(tmp_path, config, refused):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **config}))
    if not refused:
        _check_attention(str(tmp_path))
        return
    with pytest.raises(ValueError, match=r"heads of 32, 64, .* only, this model's are of (16|48); use .*hf_infer"):
        _check_attention(str(tmp_path))


def test_latent_attention_is_refused(tmp_path):
    config = {"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 8}))
    with pytest.raises(ValueError, match=r"latent attention otherwise than Transformers.*use strategy_name: hf_infer"):
        _check_attention(str(tmp_path))


def test_a_replica_that_spans_nodes_is_started_in_vllms_own_way_on_cpu_with_one_rank_on_each():
    span = NodeSpan(num_nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=4711)
    settings = EngineSettings(
        model_folder="m", dtype="fp32", device="cpu", max_model_len=8, tensor_parallel_size=2, span=span
    )
    arguments = _arguments(settings)
    wanted = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 4711}
    assert {**arguments, **wanted, "distributed_executor_backend": "mp"} == arguments
    _check_span(settings)
    with pytest.raises(ValueError, match="4 ranks of one replica on 2 nodes: on CPU vLLM spans nodes with one rank"):
        _check_span(replace(settings, tensor_parallel_size=4))
