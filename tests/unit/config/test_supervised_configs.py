"""Configs of sft and dpo: their kind, their keys, what they refuse."""

from dataclasses import replace

import pytest

from roll_async.commands.configs.plan import run_plan
from roll_async.commands.configs.validate import run_validate
from roll_async.config.api import ConfigError, dump, load, load_with_warnings
from roll_async.config.schema import DpoConfig, RLVRConfig, SftConfig
from roll_async.launch.checks.device_memory import device_uses
from roll_async.launch.checks.gate import check_supported
from tests.unit.config.supervised import TEXT, dpo_config, loaded, sft_config

ENGINE = "actor_infer={strategy_args: {strategy_name: vllm, strategy_config: {}}}"


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["pipeline=sft"], SftConfig),
        (["pipeline=dpo"], DpoConfig),
        (["trained_turns=last"], SftConfig),
        (["train_batch_size=4"], SftConfig),
        (["beta=0.2"], DpoConfig),
        (["beta=0.2", "train_batch_size=4"], DpoConfig),
    ],
)
def test_the_kind_is_told_by_its_keys(tmp_path, overrides, kind):
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)
    assert type(load_with_warnings(path, overrides).config) is kind


def test_with_engines_the_kind_is_as_before(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)
    assert type(load(path, [ENGINE, "prompt_length=4"])) is RLVRConfig


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_what_is_printed_loads_as_the_same_config_without_warnings(tmp_path, kind):
    found = loaded(kind, "eval_steps=2", "validation={data_args: {file_name: v.jsonl}}").config
    path = tmp_path / "again.yaml"
    path.write_text(dump(found))
    again = load_with_warnings(path)
    assert again.config == found and again.warnings == ()
    assert replace(found, seed=1) != found


def test_the_batch_is_that_of_accumulation_where_none_is_written():
    args = "actor_train.training_args={per_device_train_batch_size: 4, gradient_accumulation_steps: 3}"
    assert sft_config(args, "actor_train.world_size=2").train_batch_size == 24
    assert sft_config("train_batch_size=7").train_batch_size == 7


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("sft", [ENGINE], "C019: actor_infer: sft has no engines: remove the section"),
        ("sft", ["algorithm={}"], "C019: algorithm: is a key of rlvr and agentic configs"),
        ("sft", ["beta=0.1"], "C019: beta: is a key of dpo configs; this one is sft"),
        ("dpo", ["trained_turns=last"], "C019: trained_turns: is a key of sft configs; this one is dpo"),
        ("dpo", ["min_score=1"], "C019: min_score: is a key of sft configs"),
        ("sft", ["train_batch_siz=4"], "C001: train_batch_siz: unknown key; did you mean 'train_batch_size'"),
        ("sft", ["actor_train.router_replay=true"], "C020: actor_train.router_replay: has no effect on sft configs"),
        ("sft", ["actor_train.data_args.tag=x"], "C020: actor_train.data_args.tag: has no effect on sft configs"),
        ("dpo", ["fault.sample_retries=1"], "C020: fault.sample_retries: has no effect on dpo configs"),
        ("sft", ["actor_train.data_args=null"], "C006: actor_train.data_args: required"),
        ("sft", ["eval_steps=1"], "C145: validation: required by eval_steps=1"),
        ("dpo", ["label_smoothing=0.5"], r"C005: label_smoothing: 0.5 must be in \[0, 0.5\)"),
        ("dpo", ["beta=0"], "C005: beta: 0 must be > 0"),
        ("sft", ["train_batch_size=5", "actor_train.training_args={gradient_accumulation_steps: 2}"],
         "C121: train_batch_size: 5 is not per_device_train_batch_size 1"),
        ("dpo", ["actor_train.micro_batching=packed", "actor_train.max_tokens_per_microbatch=100"],
         "C106: actor_train.max_tokens_per_microbatch: 100 cannot hold the two rows of a pair, .*; use 128"),
        ("sft", ["actor_train.micro_batching=packed"], "C106: actor_train.max_tokens_per_microbatch: null cannot hold"),
        ("sft", ["actor_train.world_size=3",
                 "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2"], "C113: .*3 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_act_is_refused(kind, overrides, message):
    with pytest.raises(ConfigError, match=message):
        loaded(kind, *overrides)


def test_max_steps_beside_epochs_and_held_out_rows_without_validations_are_warned_of():
    found = loaded("sft", "num_train_epochs=2", "max_steps=3", "validation={data_args: {file_name: v.jsonl}}")
    assert [(w.id, w.key) for w in found.warnings] == [("W06", "validation"), ("W12", "max_steps")]


def test_commands_that_need_engines_refuse_them(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)
    with pytest.raises(ConfigError, match="pipeline: dpo: such a run has no engines"):
        load(path, ["beta=0.1"])


def test_pairs_of_the_loss_options():
    config = dpo_config("beta=0.4", "label_smoothing=0.1")
    assert (config.beta, config.label_smoothing) == (0.4, 0.1)


@pytest.mark.parametrize("name", ["sft_demo_cpu", "dpo_demo_cpu", "sft_7b", "dpo_7b"])
def test_shipped_configs_pass_the_gate_and_fit_their_devices(name, capsys):
    assert run_validate([name]) == 0 and f"ok: {name} ({name[:3]})" in capsys.readouterr().out
    assert run_plan([name]) == 0 and "in 1 optimizer step" in capsys.readouterr().out
    config = check_supported(name).config
    uses = device_uses(config, int(80e9))
    assert bool(uses) == name.endswith("_7b") and all(use.problem is None for use in uses)
