"""What vLLM's CPU build cannot compute is refused before its first token, by name."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from roll_async.config.api import load
from roll_async.config.schema import VllmConfig
from roll_async.inference.settings import EngineSettings, NodeSpan
from roll_async.inference.vllm.arguments import _arguments, _check_attention, _check_span, in_this_process


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


SEVEN_B = Path(__file__).resolve().parents[3] / "configs" / "rlvr_config_async.yaml"
KEYS = {
    "gpu_memory_utilization": (0.61, {"gpu_memory_utilization": 0.61}),
    "block_size": (64, {"block_size": 64}),
    "max_model_len": (20_000, {"max_model_len": 20_000}),
    "max_num_seqs": (77, {"max_num_seqs": 77}),
    "max_num_batched_tokens": (4321, {"max_num_batched_tokens": 4321}),
    "enforce_eager": (True, {"enforce_eager": True}),
    "enable_prefix_caching": (False, {"enable_prefix_caching": False}),
    "tensor_parallel_size": (2, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    "pipeline_parallel_size": (2, {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}),
    "load_format": ("dummy", {"load_format": "dummy"}),
    "quantization": ("fp8", {"quantization": "fp8"}),
}
"""Key of strategy_config to a value that the base has not, and the arguments that it changes."""
ELSEWHERE = {"core_in_process", "extra"}
OF_THE_ROLE = {
    "seed=7": {"seed"},
    "actor_infer.model_args.dtype=fp32": {"dtype"},
    "actor_infer.model_args.model_name_or_path=other": {"model"},
    "actor_infer.generating_args.stop_strings=[x]": {"skip_tokenizer_init"},
}


def arguments_of(*overrides):
    config = load(SEVEN_B, overrides)
    return _arguments(EngineSettings.of(config, replica=0, restart=0))


def changed(before, after):
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.mark.slow
def test_every_key_of_vllm_changes_its_argument_and_no_other():
    """From the file to what the engine is started with: to cut a key anywhere on the way turns its line red."""
    assert {*KEYS, *ELSEWHERE} == {f.name for f in fields(VllmConfig)}
    config = "actor_infer.strategy_args.strategy_config"
    plain = ("actor_infer.strategy_args={strategy_name: vllm, strategy_config: {tensor_parallel_size: 1}}",)
    before = arguments_of(*plain)
    for key, (value, wanted) in KEYS.items():
        after = arguments_of(*plain, f"{config}.{key}={json.dumps(value)}")
        assert changed(before, after) == wanted.keys() and {n: after[n] for n in wanted} == wanted, key
    for override, wanted in OF_THE_ROLE.items():
        assert changed(before, arguments_of(*plain, override)) == wanted, override


def test_the_rest_of_vllms_keys_reach_the_replica():
    config = "actor_infer.strategy_args.strategy_config"
    on_cpu = "configs/rlvr_config_async_cpu.yaml"

    def settings(*overrides):
        return EngineSettings.of(load(SEVEN_B.parents[1] / on_cpu, overrides), replica=0, restart=0)

    assert in_this_process(settings()) and not in_this_process(settings(f"{config}.core_in_process=false"))
    assert settings(f"{config}.extra={{swap_space: 2}}").extra == {"swap_space": 2}
