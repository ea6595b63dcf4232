"""`--device cpu` makes of every rlvr config one that this machine can start, and leaves its algorithm alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from roll_async.config.api import ConfigError, load, load_with_warnings
from roll_async.config.schema import RLVRConfig
from roll_async.launch.checks.gate import check_supported
from roll_async.launch.checks.on_cpu import cpu_overrides, take_device

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
RLVR = [path for path in sorted(CONFIGS.glob("*.yaml")) if isinstance(load_with_warnings(path).config, RLVRConfig)]


@pytest.mark.parametrize("path", RLVR, ids=lambda path: path.stem)
def test_every_config_passes_the_gate_without_its_devices(path):
    before, after = load(path), check_supported(path, cpu_overrides(path, [], "rlvr")).config
    assert all(role.device_mapping is None and role.num_ranks == 1 for _, role in after.roles())
    assert after.max_steps == 3 and set(after.rewards) == {"addition"}
    groups = replace(before.algorithm.filter_groups, gen_batch_size=after.algorithm.filter_groups.gen_batch_size)
    overlong = replace(before.algorithm.overlong_buffer, len=after.algorithm.overlong_buffer.len)
    assert after.algorithm == replace(before.algorithm, filter_groups=groups, overlong_buffer=overlong)
    assert after.async_generation_ratio == before.async_generation_ratio
    assert after.actor_train.training_args.learning_rate == before.actor_train.training_args.learning_rate
    sampling, wanted = after.actor_infer.generating_args, before.actor_infer.generating_args
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (wanted.temperature, wanted.top_p, wanted.top_k)
    models = {role.model_args.model_name_or_path for _, role in after.roles()}
    assert models == {"./output/demo_assets/model"}


def test_what_the_user_overrides_comes_later():
    path = CONFIGS / "rlvr_config_async.yaml"
    own = ["max_steps=7", "actor_infer.strategy_args={strategy_name: hf_infer}"]
    config = load(path, [*cpu_overrides(path, own, "rlvr"), *own])
    assert config.max_steps == 7 and config.actor_infer.strategy_args.strategy_name == "hf_infer"


def test_an_engine_that_is_not_installed_here_is_hf_infer(monkeypatch):
    from roll_async.launch.checks import on_cpu

    path, key = CONFIGS / "rlvr_config_async.yaml", "actor_infer.strategy_args.strategy_name"
    for lacking, engine in (([(key, "sglang is not installed here")], "hf_infer"), ([], "sglang")):
        monkeypatch.setattr(on_cpu, "missing_packages", lambda config, lacking=lacking: lacking)
        assert load(path, cpu_overrides(path, [], "rlvr")).actor_infer.strategy_args.strategy_name == engine


def test_no_other_device_can_be_named_and_agents_have_configs_of_their_own():
    assert take_device(["--config", "a", "--device", "cpu", "b=1"]) == (["--config", "a", "b=1"], True)
    assert take_device(["--device=cpu"]) == ([], True) and take_device(["a=1"]) == (["a=1"], False)
    for args in (["--device", "cuda"], ["--device"]):
        with pytest.raises(ConfigError, match="only cpu; devices are named by device_mapping"):
            take_device(args)
    with pytest.raises(ConfigError, match="is for rlvr configs; agents have"):
        cpu_overrides(CONFIGS / "agent_val_frozen_lake_async.yaml", [], "agentic")
