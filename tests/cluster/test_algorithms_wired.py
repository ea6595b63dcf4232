"""Every policy loss, advantage estimator and source of log-probs: three steps of the CPU demo on real parts."""

import math
import os
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("megatron.core")
pytest.importorskip("vllm")

from roll_async.algorithms.advantages import ADVANTAGES
from roll_async.algorithms.policy_losses import POLICY_LOSSES
from roll_async.cluster.runtime import ray_runtime
from roll_async.config.api import load
from roll_async.sweep import Sweep

STEPS = 3
AGENTIC = {"agentic_reinforce", "step_reinforce", "gigpo"}
"""Estimators over the turns of an episode: the config refuses them outside agentic pipelines."""
CRITIC = (
    "algorithm.adv_estimator=gae",
    "critic={world_size: 1, model_args: {dtype: fp32},"
    " training_args: {learning_rate: 1.0e-3, per_device_train_batch_size: 32},"
    " strategy_args: {strategy_name: megatron_train,"
    " strategy_config: {transformer_impl: local, use_distributed_optimizer: false}}}",
)
SMALL = (
    "rollout_batch_size=8",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.per_device_train_batch_size=32",
    "actor_train.training_args.gradient_accumulation_steps=1",
    f"max_steps={STEPS}",
    "eval_steps=0",
    "save_steps=0",
    "ledger.enable=false",
    "rewards={addition: {type: spread_reward.digit_parity, num_workers: 1}}",  # a barely trained model is never right
)


@pytest.fixture(scope="module")
def run(demo_assets, tmp_path_factory, request):
    output = tmp_path_factory.mktemp("wired")

    def config(name, overrides, file="rlvr_config_async_cpu"):
        places = (
            f"pretrain={demo_assets}/model",
            f"actor_train.data_args.file_name={demo_assets}/train.jsonl",
            f"validation.data_args.file_name={demo_assets}/validation.jsonl",
            f"output_dir={output}",
            f"exp_name={name}",
        )
        return load(f"configs/{file}.yaml", (*places, *SMALL, *overrides), "rlvr")

    inherited = os.environ.get("PYTHONPATH")
    request.addfinalizer(lambda: os.environ.update(PYTHONPATH=inherited) if inherited else os.environ.pop("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), inherited)))
    with (
        ray_runtime(num_processes=5, env={"HF_HUB_OFFLINE": "1"}) as runtime,
        Sweep(config("roles", CRITIC), runtime) as sweep,
    ):

        def go(name, *overrides, file="rlvr_config_async_cpu"):
            metrics = sweep.run(config(name, overrides, file), timeout_s=120)
            assert [m["step"] for m in metrics] == [1, 2, 3]
            assert all(math.isfinite(v) for m in metrics for v in m.values())
            assert max(m["trainer/grad_norm"] for m in metrics) > 0, "no step moved the weights"
            return metrics

        yield go


@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_every_policy_loss_trains_on_stale_samples(run, variant):
    metrics = run(f"loss_{variant}", f"algorithm.pg_variant={variant}", "async_generation_ratio=2")
    assert metrics[-1]["staleness/max"] >= 1, "nothing was off-policy"
    assert metrics[-1]["correction/rho_min"] < 0.999, "old weights and new ones sampled alike"


@pytest.mark.parametrize("estimator", [name for name in ADVANTAGES if name not in AGENTIC | {"gae"}])
def test_every_estimator_without_a_critic_trains(run, estimator):
    metrics = run(f"advantage_{estimator}", f"algorithm.adv_estimator={estimator}")
    assert any(m["advantages/std"] > 0 for m in metrics)


def test_gae_trains_actor_and_critic(run):
    metrics = run("gae", *CRITIC)
    assert all(m["critic/grad_norm"] > 0 for m in metrics)


@pytest.mark.parametrize("proximal", ["recompute", "interpolate", "behaviour"])
@pytest.mark.parametrize("variant", ["decoupled_ppo", "tis"])
def test_every_source_of_proximal_logprobs_trains(run, proximal, variant):
    run(
        f"{proximal}_{variant}",
        f"algorithm.pg_variant={variant}",
        f"algorithm.proximal_logprobs={proximal}",
        "async_generation_ratio=2",
    )


@pytest.mark.parametrize("variant", ["vanilla", "tis", "cispo", "topr", "kimi15"])
def test_the_shipped_offpolicy_configs_run_two_batches_ahead(run, variant):
    metrics = run(f"offpolicy_{variant}", file=f"rlvr_offpolicy_{variant}_cpu")
    assert 1 <= metrics[-1]["staleness/max"] <= 2
