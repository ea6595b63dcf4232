"""Layouts of both sides through the launcher: after every push each engine is on the policy of the trainer."""

import json
import shutil

import pytest

pytest.importorskip("ray")
pytest.importorskip("megatron.core")

from roll_async.checkpoint.hf_names.moe import TINY_EXPERTS as EXPERTS

MEGATRON = "actor_train.strategy_args.strategy_config"
HF = "actor_infer.strategy_args={strategy_name: hf_infer}"
SPREAD = "rewards={length: {type: tests.cluster.length_reward.LengthReward}}"
HALF = "actor_train.training_args.per_device_train_batch_size=16"
"""Samples of a data-parallel rank, of two."""


def agrees(launcher, *overrides, steps=2, routed=False):
    """Synchronous steps, each on the policy that the engines were pushed.

    Of a model with experts (`routed`) the mean over the tokens is bounded, not the largest ratio: among the 5,000
    choices of two steps one may be so near a tie that rounding decides it (router logits of the third expert come
    within 1e-6 of the second's about once in 200 runs), which moves the tokens of one answer by up to 30 %. Weights of
    the step before move the mean by 0.04.
    """
    code, output = launcher.run("async_generation_ratio=0", f"max_steps={steps}", SPREAD, *overrides, timeout=900)
    assert code == 0, output
    metrics = launcher.metrics()
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    for m in metrics:
        assert m["staleness/max"] == 0 and m["groups/failed"] == 0
        assert routed or abs(m["correction/rho_max"] - 1) < 1e-3
        assert m["correction/lag_0/abs_log_rho"] < 5e-3 and m.get("weights/lag_zero_alarm", 0) == 0
        assert m["weights/canary_alarms"] == 0 and m["weights/canary_difference"] < 1e-4
    assert metrics[-1]["weights/canary_moved"] > 0
    return metrics


@pytest.fixture(scope="module")
def model_of(demo_assets, tmp_path_factory):
    """Writes a random model of two layers with the tokenizer of the demo."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    demo = json.loads((demo_assets / "model" / "config.json").read_text())
    same = ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id", "max_position_embeddings")

    def write(family, **more):
        folder = tmp_path_factory.mktemp("model")
        for file in (demo_assets / "model").iterdir():
            if "token" in file.name or file.name.endswith(".jinja"):
                shutil.copy(file, folder)
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(
            **{name: demo.get(name) for name in same},
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            initializer_range=0.1,
            dtype="float32",
            **more,
        )
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
        return folder

    return write


def test_experts_on_two_ranks_and_the_hugging_face_engine(launcher, model_of):
    agrees(
        launcher,
        f"pretrain={model_of('Qwen3Moe', **EXPERTS, head_dim=16, norm_topk_prob=True)}",
        "actor_train.world_size=2",
        f"{MEGATRON}.expert_model_parallel_size=2",
        HALF,
        HF,
        routed=True,
    )


def test_experts_of_two_pipeline_stages_and_vllm(launcher, model_of):
    pytest.importorskip("vllm")
    agrees(
        launcher,
        f"pretrain={model_of('Qwen3Moe', **EXPERTS, head_dim=32, norm_topk_prob=True)}",
        "actor_train.world_size=2",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        routed=True,
    )


def test_tensor_and_pipeline_parallel_trainers_and_two_replicas(launcher, model_of):
    metrics = agrees(
        launcher,
        f"pretrain={model_of('Qwen2')}",
        "actor_train.world_size=4",
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        HF,
        "actor_infer.world_size=2",
    )
    assert metrics[-1]["rollout/engines"] == 2
