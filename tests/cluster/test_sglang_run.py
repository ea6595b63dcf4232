"""The launcher with SGLang on CPU: two tensor ranks on either side, half precision, no weights before a first push."""

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("ray")

STRATEGIES = (
    "actor_infer.strategy_args={strategy_name: sglang, strategy_config: {tensor_parallel_size: 2, load_format: dummy}}",
    "actor_infer.world_size=2",
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
