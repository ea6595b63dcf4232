"""The launcher with SGLang on CPU: two tensor ranks on either side, half precision, no weights before a first push; and
the ways of weights into its ranks as the suite for GPUs takes them. One after the other: each starts its own ranks.
"""

import json

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("ray")

from test_gpu_suite import suite

STRATEGIES = (
    "actor_infer.strategy_args={strategy_name: sglang, strategy_config: {tensor_parallel_size: 2, load_format: dummy}}",
    "actor_infer.world_size=1",
    "actor_infer.model_args.dtype=fp16",
    "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2",
    "actor_train.strategy_args.strategy_config.sequence_parallel=true",
    "actor_train.world_size=2",
)


@pytest.mark.slow
def test_a_run_with_sglang_trains_on_what_its_ranks_sampled_from_pushed_weights(sglang_on_cpu, launcher):
    code, output = launcher.run(*STRATEGIES, "max_steps=2", timeout=420)
    assert code == 0, output
    steps = launcher.metrics()
    assert len(steps) == 2
    for step in steps:
        assert step["correction/k3"] < 1e-3, "the trainer finds the log-probs of an engine in half precision"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sglang_ipc", "sglang_nccl"])
def test_sglang_s_ranks_take_their_way_on_a_cpu(sglang_on_cpu, name):
    done = suite("--only", name, "--device", "cpu", "--limit", "500", timeout=520)
    assert done.returncode == 0, done.stdout + done.stderr
    _, line = (json.loads(x) for x in done.stdout.splitlines())
    assert line["ok"] and "skipped" not in line and 0 < line["value"] < line["budget"]
