"""Configs of ROLL and verl: what the loader answers, and what `roll-async port` makes of them."""

import pytest
import yaml

from roll_async.cli import main
from roll_async.commands.configs.port import ported
from roll_async.config.api import ConfigError, load, load_with_warnings
from roll_async.config.loading.porting import AnotherPipeline
from roll_async.config.yaml.suggest import closest
from tests.unit.config.conftest import AGENTIC, RLVR, edited

WORKER_CLS = "roll.pipeline.rlvr.rewards"
OF_ROLL = edited(
    RLVR,
    {
        "hydra": {"run": {"dir": "."}},
        "logging_dir": "./logs",
        "resume_from_checkpoint": False,
        "checkpoint_config": {"type": "file_system", "output_dir": "./models"},
        "adv_estimator": "reinforce",
        "norm_mean_type": None,
        "dual_clip_loss": True,
        "pg_clip": 0.1,
        "add_token_level_kl": False,
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
        "difficulty_mask": True,
        "difficulty_low_threshold": 0.1,
        "actor_train.training_args.num_train_epochs": 3,
        "actor_train.data_args.dataset_dir": "data",
        "actor_train.model_args": {"attn_implementation": "sdpa", "model_type": None},
        "actor_infer.data_args": {"template": "qwen2_5"},
        "reference.strategy_args": {"strategy_name": "hf_infer", "strategy_config": None},
        "reference.device_mapping": "range(0,4)",
        "rewards": {
            "cross": {
                "worker_cls": f"{WORKER_CLS}.a.CrossThinkQARuleRewardWorker", "world_size": 3, "tag_included": ["q"],
            },
            "llm_judge": {
                "worker_cls": f"{WORKER_CLS}.b.LLMJudgeRewardWorker", "judge_prompt": "name", "tag_included": ["j"],
                "model_args": {"model_name_or_path": "judge"}, "device_mapping": "range(6,8)",
            },
        },
    },
)  # fmt: skip
CLIPS = {"dual_clip_loss": True, "pg_clip": 0.5, "pg_clip_low": 0.1, "pg_clip_high": 0.3}


def write(folder, tree, name="roll.yaml"):
    file = folder / name
    file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return file


def port_of(folder, edits, base=RLVR):
    """(values by path, row by key) of a ported config."""
    found, left = ported(write(folder, edited(base, edits)))
    assert not left
    return found, {change.key: f"{change.what} {change.why}" for change in found.changes}


def errors_of(file, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load(file, **kwargs)
    return [str(d) for d in caught.value.diagnostics if d.is_error]


def test_a_config_of_roll_is_valid_once_it_is_ported_and_every_key_that_went_has_a_reason(tmp_path, capsys):
    file, new = write(tmp_path, OF_ROLL), tmp_path / "new.yaml"
    before = file.read_bytes()
    assert main(["validate", str(file)]) == 2
    capsys.readouterr()
    assert main(["port", str(file), "-o", str(new)]) == 0
    table = capsys.readouterr().out
    assert main(["validate", str(new)]) == 0 and main(["plan", str(new)]) == 0
    assert file.read_bytes() == before
    for line in (
        "renamed  resume_from_checkpoint: ",
        "changed  rewards.cross.type: now 'qa'",
        "changed  rewards.cross.num_workers: now 3",
        "dropped  hydra: ",
        "dropped  logging_dir: ",
        "dropped  actor_train.training_args.num_train_epochs: max_steps ends the run",
        "refused  rewards.llm_judge.judge_prompt: ",
    ):
        assert f"\n{line}" in f"\n{table}", line
    assert all(f"#   {line}" in new.read_text() for line in table.splitlines()[:-1])
    config = load(new)
    assert config.algorithm.pg_options.dual_clip == 1.2 and config.algorithm.difficulty_low == 0.1
    assert config.algorithm.kl_loss_coef == 0.01 and config.algorithm.token_kl_coef == 0
    assert config.rewards["llm_judge"].judge.model == "judge" and config.rewards["cross"].type == "qa"
    assert config.checkpoint.resume_from is None and config.checkpoint.output_dir == "./models"


def test_a_file_that_is_there_is_not_written_over(tmp_path, capsys):
    new = write(tmp_path, "mine", "new.yaml")
    assert main(["port", str(write(tmp_path, OF_ROLL)), "-o", str(new)]) == 2
    assert new.read_text() == "mine" and "File exists" in capsys.readouterr().err


def test_a_config_of_verl_is_ported_by_the_same_names(tmp_path):
    verl = {
        "data": {"max_prompt_length": 5, "shuffle": True},
        "actor_rollout_ref": {"actor": {"clip_ratio_high": 0.28}},
    }
    found, rows = port_of(tmp_path, {**verl, "prompt_length": 5})
    assert rows["data.max_prompt_length"] == "renamed is prompt_length" and rows["data.shuffle"].startswith("dropped")
    assert found.get("algorithm", "pg_options", "clip_high") == 0.28


@pytest.mark.parametrize(
    ("tree", "what"),
    [
        ({"beta": 0.1}, "DPO"),
        ({"sft_train": {}}, "fine-tuning"),
        ({"student": {}}, "distillation"),
        ({"actor_infer": {"strategy_args": {}}}, "a rollout without training"),
        ({"rewards": {"cv": {"worker_cls": "a.DetectionRewardWorker"}}}, "images"),
    ],
)
def test_another_pipeline_is_told_in_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, tree, what):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, tree)
    with pytest.raises(AnotherPipeline, match=what):
        ported(file)
    assert main(["port", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and list(tmp_path.iterdir()) == [file]


def test_a_numbered_key_or_list_in_an_include_hides_no_other_message(tmp_path):
    write(tmp_path, "world:\n  grid: {0: W, 1: F}\nitems: [{a: 1}]\n", "worlds.yaml")
    file = write(tmp_path, {"defaults": ["worlds@_here_"], **edited(AGENTIC, {"hydra": {}, "max_steps": "3"})})
    errors = errors_of(file)
    assert any("C002: hydra" in line for line in errors) and any("C003: max_steps" in line for line in errors)
    assert any("C001: items" in line for line in errors) and not any("C008" in line for line in errors)


def test_worlds_decide_that_a_config_is_agentic_and_prompt_files_do_not(tmp_path):
    file = write(tmp_path, edited(AGENTIC, {"actor_train.data_args": {"template": "qwen2_5"}}))
    (error,) = errors_of(file)
    assert error.endswith("is a key of rlvr configs; this one is agentic because custom_envs is set")
    assert ported(file)[0].kind == "agentic"


@pytest.mark.parametrize(("given", "resumed"), [(False, None), (True, "latest"), ("./folder", "./folder")])
def test_resuming_is_a_switch_in_roll_and_a_place_here(tmp_path, given, resumed):
    assert load(write(tmp_path, edited(RLVR, {"resume_from_checkpoint": given}))).checkpoint.resume_from == resumed


@pytest.mark.parametrize(
    ("role", "given", "edits", "warns"),
    [
        ("actor_train", "sdpa", {}, True),
        ("actor_train", "fa2", {}, False),
        ("actor_train", "fa2", {"actor_train.strategy_args.strategy_config.transformer_impl": "local"}, True),
        ("actor_infer", "fa2", {}, False),
        ("actor_infer", "sdpa", {}, True),
        ("actor_infer", "auto", {}, False),
    ],
)
def test_an_attention_kernel_that_cannot_act_is_a_warning(tmp_path, role, given, edits, warns):
    key = f"{role}.model_args.attn_implementation"
    loaded = load_with_warnings(write(tmp_path, edited(RLVR, {key: given, **edits})))
    assert [d.key for d in loaded.warnings if d.id == "W12"] == ([key] if warns else [])


@pytest.mark.parametrize(
    ("edits", "dual"),
    [({}, None), ({"dual_clip_loss": False}, None), ({"dual_clip_loss": True}, 1.4),
     (CLIPS, 2.0),
     ({**CLIPS, "use_pg_clip_range": True}, 1.2)],
)  # fmt: skip
def test_the_dual_clip_is_that_of_roll(tmp_path, edits, dual):
    assert port_of(tmp_path, {"adv_estimator": "grpo", **edits})[0].get("algorithm", "pg_options", "dual_clip") == dual


@pytest.mark.parametrize(
    ("edits", "in_loss", "in_reward"),
    [({"use_kl_loss": False, "kl_loss_coef": 0.1}, None, None), ({"use_kl_loss": True, "kl_loss_coef": 0.1}, 0.1, None),
     ({"add_token_level_kl": True}, None, 0.2), ({"add_token_level_kl": True, "init_kl_coef": 0.3}, None, 0.3),
     ({"add_token_level_kl": False, "init_kl_coef": 0.3}, None, None)],
)  # fmt: skip
def test_kl_counts_only_where_the_switch_of_roll_is_on(tmp_path, edits, in_loss, in_reward):
    reference = {"strategy_args": {"strategy_name": "megatron_infer"}, "device_mapping": "range(0,4)"}
    found, _ = port_of(tmp_path, {"reference": reference, **edits})
    assert found.get("algorithm", "kl_loss_coef") == in_loss and found.get("algorithm", "token_kl_coef") == in_reward


def test_cispo_keeps_the_lower_bound_of_roll(tmp_path):
    found, rows = port_of(tmp_path, {"pg_variant": "cispo"})
    assert found.get("algorithm", "pg_options", "cispo_epsilon_low") == 0.1
    assert "ROLL's default" in rows["algorithm.pg_options.cispo_epsilon_low"]
    found, _ = port_of(tmp_path, {"pg_variant": "cispo", "cispo_epsilon_low": 0.4})
    assert found.get("algorithm", "pg_options", "cispo_epsilon_low") == 0.4


@pytest.mark.parametrize(
    ("estimator", "given", "expected"),
    [("grpo", {"grouping": "traj_group_id", "method": "mean_std"}, {"adv_estimator": "grpo", "normalise_std": True}),
     ("grpo", {"grouping": "traj_group_id", "method": "mean"}, {"adv_estimator": "grpo", "normalise_std": False}),
     ("grpo", {"grouping": "batch", "method": "mean_std"}, {"adv_estimator": "reinforce", "norm_mean_type": "batch"}),
     ("grpo", {"grouping": "batch", "method": "identity"}, {"adv_estimator": "reinforce", "norm_std_type": "none"}),
     ("step_reinforce", {"grouping": "batch", "method": "mean"}, {"mean": "batch", "std": "none"}),
     ("gigpo", {"grouping": "traj_group_id", "method": "mean"}, {"normalise_std": False})],
)  # fmt: skip
def test_reward_normalization_becomes_the_estimator_and_its_options(tmp_path, estimator, given, expected):
    edits = {"adv_estimator": estimator, "reward_normalization": given}
    found, left = ported(write(tmp_path, edited(AGENTIC, edits)))
    algorithm = found.tree["algorithm"]
    assert {**algorithm, **algorithm.get("adv_options", {})}.items() >= expected.items() and not left


def test_worlds_of_roll_get_their_names_here_and_others_are_refused_by_name(tmp_path):
    worlds = {
        "Box": {
            "env_type": "sokoban",
            "env_manager_cls": "a.b.StepEnvManager",
            "env_config": {"dim_room": [7, 6], "x": 1},
        },
        "Rg": {"env_type": "rg:letter_counting"},
        "Shop": {"env_type": "webshop"},
        "Idle": {"env_type": "frozen_lake"},
    }
    managers = {"train_env_manager": {"tags": ["Box", "Rg", "Shop"]}, "val_env_manager": {"tags": ["Box"]}}
    found, rows = port_of(tmp_path, {"custom_envs": worlds, **managers}, AGENTIC)
    assert found.get("custom_envs", "Box") == {"env_type": "sokoban", "manager": "step", "env_config": {"size": 7}}
    assert found.get("custom_envs", "Rg", "env_type") == "reasoning_gym"
    assert set(found.tree["custom_envs"]) == {"Box", "Rg"} and found.get("train_env_manager", "tags") == ["Box", "Rg"]
    assert rows["custom_envs.Shop"].startswith("refused") and rows["custom_envs.Idle"] == "dropped no tags name it"
    assert rows["custom_envs.Box.env_config.x"] == "refused the world has no such setting"


def test_a_config_whose_only_world_is_not_there_is_not_valid_and_gets_no_other_world(tmp_path, capsys):
    file = write(tmp_path, edited(AGENTIC, {"custom_envs": {"Shop": {"env_type": "webshop"}}}))
    assert main(["port", str(file), "-o", str(tmp_path / "new.yaml")]) == 2
    assert "left to you: custom_envs.Shop.env_type: " in capsys.readouterr().out


def test_what_does_not_fit_is_changed_to_what_does(tmp_path):
    found, _ = port_of(
        tmp_path,
        {
            "eval_steps": 5,
            "actor_train.training_args.gradient_accumulation_steps": 64,
            "actor_train.device_mapping": "list([0,1,2,3])",
            "actor_train.model_args": {"lora_rank": 8, "lora_target": "q_proj,k_proj"},
            "actor_infer.model_args": {"lora_rank": 8, "lora_target": "q_proj,k_proj"},
            "actor_infer.strategy_args.strategy_config.max_model_len": 20,
            "actor_train.use_sequence_packing": True,
            "rewards": {"math_rule": {}, "odd": {"worker_cls": "a.Odd"}},
            "actor_train.data_args.domain_interleave_probs": {"math_rule": 0.4, "odd": 0.4},
            "tracker_kwargs": {"name": "${now:%Y}-run"},
        },
    )
    assert found.get("eval_steps") == 0 and found.get("actor_train", "device_mapping") == [0, 1, 2, 3]
    assert found.get("actor_train", "training_args", "gradient_accumulation_steps") == 2
    assert found.get("actor_train", "model_args", "lora_target") == ["q_proj", "k_proj"]
    assert found.get("actor_infer", "model_args", "lora_rank") is None
    assert found.get("actor_infer", "strategy_args", "strategy_config", "max_model_len") is None
    assert (
        found.get("actor_train", "micro_batching") == "packed"
        and found.get("tracking", "tracker_kwargs", "name") == "run"
    )
    assert found.get("actor_train", "data_args", "domain_interleave_probs") == {"math_rule": 1.0}


@pytest.mark.parametrize(
    ("name", "key"),
    [("model_type", "dtype"), ("reward_norm", "rewards"), ("judge_prompt", "prompt"), ("sleep_level", "weight_level")],
)
def test_another_word_is_no_typing_error(name, key):
    assert closest(name, [key]) is None
    assert closest("weight_levle", ["weight_level"]) == "weight_level"
