"""Settings that are checked and cannot be honoured are refused with key, value and remedy."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll_async.config.api import load
from roll_async.inference.settings import EngineSettings, NodeSpan
from roll_async.inference.sglang.arguments import engine_arguments
from roll_async.launch.checks.gate import unsupported

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MOE, CPU = CONFIGS / "qwen3_30b_a3b_moe.yaml", CONFIGS / "rlvr_config_async_cpu.yaml"
SMALL = SimpleNamespace(
    vocab_size=100, num_hidden_layers=1, num_key_value_heads=1, num_attention_heads=2, hidden_size=16
)
VLLM = "actor_infer.strategy_args.strategy_config"


def refused(*overrides):
    return "; ".join(unsupported(load(str(MOE), overrides)))


@pytest.mark.parametrize("setting", ["enable_prefix_caching=false", "pipeline_parallel_size=2"])
def test_router_replay_is_refused_where_vllm_cannot_record(setting):
    assert not refused()
    found = refused(f"{VLLM}.{setting}")
    assert found.startswith(f"{VLLM}.{setting}: vLLM records experts")
    assert found.endswith("change it, or set actor_train.router_replay: false")
    assert not refused(f"{VLLM}.{setting}", "actor_train.router_replay=false")


def test_router_replay_with_vllm_on_cpu_is_refused_before_the_engine_starts():
    (found,) = unsupported(load(str(CPU), ["actor_train.router_replay=true"]))
    assert found == (
        "actor_train.router_replay=true: vLLM records no experts on CPU, because what records them needs Triton; "
        "use strategy_name: hf_infer or sglang, or set actor_train.router_replay: false"
    )
    hf = "actor_infer.strategy_args={strategy_name: hf_infer}"
    assert not unsupported(load(str(CPU), ["actor_train.router_replay=true", hf]))


@pytest.mark.parametrize(("given", "taken"), [("auto", "sdpa"), ("sdpa", "sdpa"), ("fa2", "flash_attention_2")])
def test_the_hf_engine_attends_as_asked(given, taken):
    asked = (
        "actor_infer.strategy_args={strategy_name: hf_infer}",
        f"actor_infer.model_args.attn_implementation={given}",
    )
    config = load(str(CPU), asked)
    assert not unsupported(config)
    assert EngineSettings.of(config, replica=0, restart=0).attention == taken


def test_logits_of_less_precision_are_refused():
    found = refused("actor_train.logits_in_fp32=false")
    assert found == "actor_train.logits_in_fp32=false: log-probs always come from fp32 logits; remove it"


@pytest.mark.parametrize("strategy", ["vllm", "sglang"])
def test_a_quantized_engine_is_refused_on_cpu_and_not_ignored(strategy):
    args = f"actor_infer.strategy_args={{strategy_name: {strategy}, strategy_config: {{quantization: fp8}}}}"
    (problem,) = unsupported(load(str(CPU), (args,)))
    assert "strategy_config.quantization=fp8: the engines have no such kernels on CPU" in problem
    assert not refused(f"{VLLM}.quantization=fp8")


def test_every_key_of_sglang_reaches_the_engine():
    keys = {
        "max_running_requests": 33, "chunked_prefill_size": 512, "disable_cuda_graph": "true",
        "attention_backend": "flashinfer", "mem_fraction_static": 0.7, "tensor_parallel_size": 1,
        "disable_radix_cache": "true", "context_length": 1024, "load_format": "dummy",
    }  # fmt: skip
    keys = ", ".join(f"{key}: {value}" for key, value in keys.items())
    args = f"actor_infer.strategy_args={{strategy_name: sglang, strategy_config: {{{keys}}}}}"
    settings = EngineSettings.of(load(str(CPU), (args,)), replica=0, restart=0)
    arguments = engine_arguments(settings, SMALL)
    assert arguments["max_running_requests"] == 33 and arguments["chunked_prefill_size"] == 512
    assert arguments["attention_backend"] == "flashinfer" and arguments["disable_cuda_graph"]
    assert arguments["disable_radix_cache"] and arguments["context_length"] == 1026
    assert arguments["load_format"] == "dummy"
    on_gpu = engine_arguments(replace(settings, device="cuda"), SMALL)
    assert on_gpu["mem_fraction_static"] == 0.7


@pytest.mark.parametrize(("address", "written"), [("10.0.0.7", "10.0.0.7:29500"), ("fd00::7", "[fd00::7]:29500")])
def test_sglang_is_told_which_of_several_nodes_it_is(address, written):
    span = NodeSpan(num_nodes=2, node_rank=1, master_addr=address, master_port=29500)
    settings = EngineSettings(model_folder="m", dtype="bf16", device="cuda", max_model_len=8, span=span)
    arguments = engine_arguments(settings, SMALL)
    assert (arguments["nnodes"], arguments["node_rank"], arguments["dist_init_addr"]) == (2, 1, written)


def test_adapters_alone_are_refused_where_they_cannot_travel_and_for_layers_that_nobody_knows():
    for rank in (0, 4):
        found = refused("weight_sync.adapters=alone", f"actor_train.model_args.lora_rank={rank}")
        assert found.startswith("weight_sync.adapters=alone: ") and found.endswith("; use auto, which merges them")
    lora = ("actor_train.model_args.lora_rank=4", "weight_sync.adapters=alone")
    assert not unsupported(load(str(CPU), lora))
    (problem,) = unsupported(load(str(CPU), (*lora, "actor_train.model_args.lora_target=[q_proj]")))
    assert problem.startswith("model_args.lora_target: ")
