"""Trained roles of several ranks in a whole run: actor on two, critic on one, checkpoints that change their layout."""

import json

import pytest

pytest.importorskip("ray")
pytest.importorskip("megatron.core")

HF = "actor_infer.strategy_args={strategy_name: hf_infer}"


def actor(**parallel):
    config = json.dumps({"transformer_impl": "local", **parallel})
    return "actor_train.world_size=2", f"actor_train.strategy_args.strategy_config={config}"


def critic():
    role = {
        "model_args": {"dtype": "fp32"},
        "training_args": {
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 2,
        },
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {"transformer_impl": "local"}},
        "micro_batching": "packed",
        "max_tokens_per_microbatch": 1024,
        "world_size": 1,
    }
    return "algorithm.adv_estimator=gae", f"critic={json.dumps(role)}"


def test_actor_under_tensor_parallelism_and_critic_train_save_and_go_on_under_context_parallelism(launcher):
    code, output = launcher.run(
        *actor(tensor_model_parallel_size=2, sequence_parallel=True), *critic(), HF, "max_steps=3", "save_steps=2"
    )
    assert code == 0, output
    metrics = launcher.metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert metrics[0]["value/mean"] == 0  # the head starts at zero
    assert all(m["critic/loss"] > 0 and m["critic/grad_norm"] > 0 for m in metrics)
    assert metrics[2]["value/mean"] != 0
    for m in metrics:
        assert abs(m["correction/kl"]) < 0.2 and m["trainer/grad_norm"] > 0
    folder = launcher.output / "run" / "checkpoints"
    assert {p.name for p in folder.iterdir()} == {"step_00000002", "step_00000003"}
    assert {p.name for p in (folder / "step_00000003").iterdir()} == {"actor_train", "critic"}

    code, output = launcher.run(
        *actor(context_parallel_size=2, use_distributed_optimizer=True),
        *critic(),
        HF,
        "max_steps=4",
        "checkpoint.resume_from=latest",
    )
    assert code == 0, output
    last = launcher.metrics()[-1]
    assert last["step"] == 4
    assert last["value/mean"] != 0 and abs(last["correction/kl"]) < 0.2


def test_a_lora_run_anchors_on_its_own_base_and_pushes_merged_weights(launcher):
    reference = json.dumps({"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "megatron_infer"}})
    code, output = launcher.run(
        "actor_train.model_args.lora_rank=4",
        f"reference={reference}",
        "algorithm.kl_loss_coef=0.01",
        "async_generation_ratio=0",
        "actor_train.training_args.learning_rate=0.003",
        HF,
        "max_steps=3",
    )
    assert code == 0, output
    first, *rest = launcher.metrics()
    assert abs(first["policy/reference_kl"]) < 1e-6
    assert all(m["policy/reference_kl"] > 1e-7 for m in rest)
    # Synchronous: engine and trainer agree only if the engine got the weights with the adapters merged in.
    assert all(abs(m["correction/kl"]) < 1e-4 for m in (first, *rest))
