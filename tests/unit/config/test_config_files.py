"""Shipped files, round trips, commands, look-up, and what importing costs."""

import dataclasses
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from roll_async.cli import main
from roll_async.commands.configs.validate import run_validate
from roll_async.config.api import ConfigError, dump, load, load_with_warnings
from roll_async.config.loading.lookup import find_config, resolve_config

REPOSITORY = Path(__file__).resolve().parents[3]
LISTED = f"shipped are: {', '.join(path.stem for path in sorted(REPOSITORY.glob('configs/*.yaml')))}"
SHIPPED = sorted([*REPOSITORY.glob("configs/*.yaml"), *REPOSITORY.glob("examples/**/*.yaml")])
SHIPPED = [path for path in SHIPPED if not path.stem.startswith(("sft_", "dpo_"))]  # test_supervised_configs.py
SEED_PATHS = (
    "configs/rlvr_config_async.yaml",
    "examples/qwen2.5-7B-rlvr_megatron/rlvr_config_async.yaml",
    "examples/qwen2.5-0.5B-agentic/agent_val_frozen_lake_async.yaml",
    "examples/qwen2.5-7B-rlvr-offpolicy/rlvr_config.yaml",
)
HEAVY = ("torch", "ray", "numpy", "vllm", "sglang", "megatron", "transformers")


def show(capsys, *args: str) -> str:
    assert main(["show", *args]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_a_shipped_config_loads_and_round_trips(path, files, capsys):
    config = load(path)
    shown = show(capsys, str(path))
    again = files.text(shown, "shown.yaml")
    for code in path.parent.glob("*.py"):  # what a config names is found beside it
        shutil.copy(code, Path(again).parent)
    assert load(again) == config
    assert show(capsys, again) == shown
    assert load(files.text(dump(config), "dumped.yaml")) == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_no_key_of_a_shipped_config_is_without_effect(path):
    """Other warnings may stay: they speak of what the documents chose, such as a truncated distribution."""
    assert [str(w) for w in load_with_warnings(path).warnings if w.id == "W12"] == []


def test_the_seed_paths_are_shipped():
    assert set(SEED_PATHS) <= {str(p.relative_to(REPOSITORY)) for p in SHIPPED}


@pytest.mark.parametrize("path", SEED_PATHS[1:])
def test_an_example_is_an_include_and_no_copy(path):
    lines = [line for line in (REPOSITORY / path).read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 1 and lines[0].startswith("defaults: [../../configs/")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_numbers_in_the_comments_of_shipped_configs_are_true(path):
    """`# Derived: ... staleness bound 2 ... 8 servers ... 4 optimizer steps` must be what the keys give."""
    config, head = load(path), " ".join(line[1:] for line in path.read_text().splitlines() if line.startswith("#"))
    for phrase, value in (
        ("servers", config.num_servers),
        ("server", config.num_servers),
        ("optimizer steps", config.optimizer_steps_per_batch),
        ("optimizer step", config.optimizer_steps_per_batch),
        ("samples per step", config.samples_per_batch),
        ("trajectories per step", config.samples_per_batch),
    ):
        words = head.replace(",", " ").replace(";", " ").split()
        size = len(phrase.split())
        for i in range(1, len(words) - size + 1):
            if words[i : i + size] == phrase.split() and words[i - 1].isdecimal():
                assert int(words[i - 1]) == value, phrase
    for i, word in enumerate(head.replace(",", " ").replace(")", " ").split()):
        after = head.replace(",", " ").replace(")", " ").split()[i + 1 :]
        if word == "bound" and after and after[0].isdecimal():
            assert int(after[0]) == config.async_training.staleness.max_versions


ODD_TEXTS = [
    "yes", "1e-6", "012", "null", "~", "", " ", "a: b", "# c",
    "${x}", "$${x}", "\u00e9\u2028\U0001f600", "<<",
    "-", "'", '"', "a\nb\t", "[1]", "a, b", "0x10", "True", ".inf", "---",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD_TEXTS, ids=[ascii(t) for t in ODD_TEXTS])
def test_any_text_survives_the_round_trip(text, files, capsys):
    written = text.replace("${", "$${")
    path = files.rlvr({
        "exp_name": written,
        "tracking": {"tracker_kwargs": {"a": written, "l": [written, [written, {"k": written}], {}, []], "m": {}}},
        "actor_infer.generating_args.stop_strings": [written],
        "rewards": {"math_rule": {"tag_included": [written]}},
    })  # fmt: skip
    config = load(path)
    assert config.exp_name == text
    shown = show(capsys, path)
    assert shown.isascii()
    again = files.text(shown, "shown.yaml")
    assert load(again) == config
    assert show(capsys, again) == shown


def test_numbers_survive_the_round_trip(files):
    numbers = [1e-6, 1e22, 0.1, 1e-300, 123456789.123, 1, -5, (1 << 63) - 1, 5e-324, True, None]
    config = load(files.rlvr({"tracking": {"tracker_kwargs": {"n": numbers}}}))
    text = dump(config)
    assert "1.0e-06" in text
    again = load(files.text(text, "again.yaml")).tracking.tracker_kwargs["n"]
    assert [(type(v), v) for v in again] == [(type(v), v) for v in numbers]


@pytest.mark.slow
def test_long_keys_and_many_devices_survive_the_round_trip(files):
    edits = {
        "rollout_batch_size": 65_000, "num_return_sequences_in_group": 2,
        "actor_train.device_mapping": "range(0,65000)", "actor_train.training_args": {},
        "actor_infer.device_mapping": "range(0,65000)",
    }  # fmt: skip
    path = files.rlvr(edits)
    key = "k" * 3000
    text = f"defaults: [run]\ntracking:\n  tracker_kwargs:\n    ? {key}\n    : [{{a: 1}}]\n"
    config = load(files.text(text, "top.yaml"))
    assert config.tracking.tracker_kwargs == {key: [{"a": 1}]}
    assert load(files.text(dump(config), "again.yaml")) == config
    assert load(path).actor_train.device_mapping == tuple(range(65_000))


def test_the_pure_python_parser_reads_the_same():
    """PyYAML built without libyaml: slower, same result."""
    path = str(REPOSITORY / "configs/dapo_qwen2.5_32b.yaml")
    code = f"from roll_async.config.api import load, dump; print(dump(load({path!r})))"
    without = "import yaml; yaml.__with_libyaml__ = False; del yaml.CSafeLoader; "
    assert run_python(without + code) == run_python(code)


def test_roles_keep_only_what_has_an_effect(files):
    edits = {
        "reference": files.WORKER, "critic": files.CRITIC, "teacher": {"strategy_args": {"strategy_name": "hf_infer"}},
        "kl_loss_coef": 0.1, "adv_estimator": "gae", "distill_coef": 0.1,
        "algorithm": {"correction": {"rejections": [{"statistic": "k1", "aggregation": "token", "low": 0.5}]}},
        "actor_train.data_args": {"file_name": ["a.json", "b.parquet"], "prompt": "question"},
        "actor_train.data_args.domain_interleave_probs": {"math_rule": 1},
    }  # fmt: skip
    config = load(files.rlvr(edits))
    assert load(files.text(dump(config), "again.yaml")) == config
    assert config.actor_train.data_args.messages is None
    assert config.critic.model_args.model_name_or_path == config.reward_pretrain == "model"


def test_teachers_with_folders_and_addresses_come_back_from_the_file_that_is_written(files):
    worker = {"strategy_args": {"strategy_name": "megatron_infer"}, "model_args": {"model_name_or_path": "big"}}
    served = {"address": "http://host:8000/v1", "model": "far", "max_retries": 1}
    teachers = {"maths": worker, "a.b": worker, "far": served}
    config = load(files.rlvr({"distill_coef": 0.1, "teachers": teachers}))
    assert load(files.text(dump(config), "again.yaml")) == config
    assert [name for name, _ in config.roles()][-2:] == ["teachers.maths", "teachers.a.b"]
    assert config.teacher_names == ("maths", "a.b", "far") and list(config.teacher_servers) == ["far"]
    assert config.teachers["maths"].model_args.dtype == config.actor_train.model_args.dtype
    other = replace(config.teachers["a.b"], infer_batch_size=3)
    changed = config.with_roles({"actor_train": config.actor_train, "teachers.a.b": other})
    assert changed.teachers == {**config.teachers, "a.b": other} and changed.actor_train == config.actor_train


def test_worlds_have_variables_of_the_template_and_nothing_else_of_a_section_of_files(files):
    variables = {"enable_thinking": False, "tools": [{"a": None}]}
    config = load(files.agentic({"actor_train.data_args": {"template_kwargs": variables}}))
    assert config.template_kwargs == variables and config.actor_train.data_args.file_name == ()
    assert "file_name" not in dump(config) and load(files.text(dump(config), "again.yaml")) == config
    assert load(files.agentic()).template_kwargs == {}


def test_a_validation_has_the_variables_of_training_unless_it_has_its_own_or_another_template(files):
    held_out = {"file_name": "a.json"}
    sets = {
        "own": {"data_args": {**held_out, "template_kwargs": {"enable_thinking": True}}},
        "none": {"data_args": {**held_out, "template_kwargs": {}}},
        "other": {"data_args": {**held_out, "template": "chatml"}},
    }
    silent = {"enable_thinking": False}
    edits = {"actor_train.data_args": {**held_out, "template_kwargs": silent}, "eval_steps": 1}
    config = load(files.rlvr({**edits, "validation": {"data_args": held_out, "sets": sets}}))
    found = {name: dict(data.template_kwargs) for name, (_, data) in config.validation.data.items()}
    assert found == {"": silent, "own": {"enable_thinking": True}, "none": {}, "other": {}}
    assert config.template_kwargs == silent


def test_configs_are_frozen_slotted_and_documented(files):
    from tools.config_reference import field_docs

    config = load(files.rlvr())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    seen = set()

    def walk(part: object) -> None:
        if not dataclasses.is_dataclass(part) or type(part) in seen:
            return
        seen.add(type(part))
        assert not hasattr(part, "__dict__"), type(part)
        own = set(vars(type(part)).get("__annotations__", ()))
        docs = field_docs(type(part))
        assert own == set(docs) and all(docs.values()), type(part)
        for field in dataclasses.fields(part):
            walk(getattr(part, field.name))

    walk(config)
    assert len(seen) > 15


# ---- commands -----------------------------------------------------------------------------------------------------


def test_validate_reports_each_config_by_itself(files, capsys, monkeypatch):
    files.rlvr()
    files.text((files.folder / "run.yaml").read_text().replace('"pretrain"', '"pretrian"'), "bad.yaml")
    monkeypatch.chdir(files.folder)
    assert run_validate(["bad.yaml", "run.yaml", "none.yaml", "seed=4"]) == 2
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "bad.yaml:2: error C001: pretrian: unknown key; did you mean 'pretrain'?",
        "bad.yaml:1: error C006: pretrain: required and not set; give a Hugging Face name or a folder",
        "invalid: bad.yaml (2 errors)",
        "ok: run.yaml (rlvr)",
        f"none.yaml: error C008: (file): config 'none.yaml' is neither a file here nor a shipped config; {LISTED}",
        "invalid: none.yaml (1 error)",
    ]


def test_validate_takes_a_kind_and_paths_with_an_equals_sign(files, capsys, monkeypatch):
    files.rlvr()
    (files.folder / "a=b.yaml").write_text((files.folder / "run.yaml").read_text())
    monkeypatch.chdir(files.folder)
    assert run_validate(["./a=b.yaml", "--pipeline", "rlvr"]) == 0
    assert capsys.readouterr().out == "ok: ./a=b.yaml (rlvr)\n"
    assert run_validate(["run.yaml", "--pipeline=agentic"]) == 2
    assert "because the command fixes pipeline agentic" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args", [[], ["seed=1"], ["x.yaml", "--pipeline", "none"], ["--verbose", "x.yaml"], ["--pipeline"]]
)
def test_bad_usage_of_validate_is_exit_2(args, capsys):
    assert run_validate(args) == 2
    assert "usage: roll-async validate" in capsys.readouterr().out


def test_warnings_do_not_change_the_exit(files, capsys):
    path = files.rlvr({"n_resp_per_prompt": 2})
    assert run_validate([path]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .endswith(
            "W01: num_return_sequences_in_group: 'n_resp_per_prompt' is another name of 'num_return_sequences_in_group'"
        )
    )
    assert main(["show", path]) == 0
    captured = capsys.readouterr()
    assert "W01" in captured.err and "W01" not in captured.out


def test_show_of_an_invalid_config_prints_nothing_on_stdout(files, capsys):
    assert main(["show", files.rlvr({"seed": "x"})]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "error C003: seed: " in captured.err
    assert main(["show"]) == 2
    assert main(["show", "a", "b"]) == 2


def test_show_ends_with_what_follows_from_the_keys(files, capsys):
    comments = show(capsys, files.rlvr({"async_generation_ratio": 1})).partition("# derived\n")[2]
    assert comments.splitlines() == [
        "# samples_per_group: 2", "# groups_per_batch: 4", "# samples_per_batch: 8", "# data_parallel_size: 4",
        "# mini_batch_size: 8", "# optimizer_steps_per_batch: 1", "# num_servers: 4", "# sync_window_groups: 4",
        "# staleness_bound: 1", "# is_async: true", "# colocated: false", "# num_nodes: 1",
    ]  # fmt: skip


def test_output_fits_any_terminal(files):
    path = files.rlvr({"exp\u00e9": 1})
    command = [sys.executable, "-m", "roll_async.cli", "validate", path]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (2, "")
    assert "C001: exp\\xe9: unknown key" in done.stdout


# ---- look-up ------------------------------------------------------------------------------------------------------


def test_the_working_directory_is_looked_at_first(files, monkeypatch):
    monkeypatch.chdir(files.folder)
    path, overrides = resolve_config(["--config", "rlvr_config_async", "seed=3"], "rlvr")
    assert path == REPOSITORY / "configs" / "rlvr_config_async.yaml" and overrides == ["seed=3"]
    files.text("{}", "rlvr_config_async.yaml")
    assert resolve_config(["--config", "rlvr_config_async"], "rlvr")[0] == Path("rlvr_config_async.yaml")
    files.text("{}", "rlvr_config_async")
    assert resolve_config(["--config=rlvr_config_async"], "rlvr")[0] == Path("rlvr_config_async")


@pytest.mark.parametrize("flags", [("--config-path", "--config-name"), ("--config_path", "--config_name")])
def test_a_folder_and_a_name_make_a_path(files, flags):
    files.text("{}", "sub/my.yaml")
    argv = [flags[0], str(files.folder / "sub"), f"{flags[1]}=my", "a.b=1"]
    assert resolve_config(argv, None) == (files.folder / "sub" / "my.yaml", ["a.b=1"])


@pytest.mark.parametrize("look_up", [find_config, lambda name: resolve_config(["--config", name], None)])
def test_a_config_that_is_nowhere_gets_the_near_name_of_a_shipped_one_or_the_list(files, monkeypatch, look_up):
    monkeypatch.chdir(files.folder)
    for name, hint in (("none", LISTED), ("rlvr_confg_async_cpu.yaml", "did you mean 'rlvr_config_async_cpu'?")):
        with pytest.raises(ConfigError) as caught:
            look_up(name)
        (found,) = caught.value.diagnostics
        assert found.message == f"config '{name}' is neither a file here nor a shipped config; {hint}"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["seed=1"],
        ["--config"],
        ["--config", "a", "--config-name", "b"],
        ["--config", "a", "--config", "b"],
        ["--what", "x"],
        ["run.yaml"],
    ],
)
def test_bad_usage_of_a_launcher_is_a_config_error(argv):
    with pytest.raises(ConfigError):
        resolve_config(argv, "agentic")


# ---- what loading costs -------------------------------------------------------------------------------------------


def run_python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loading_works_where_heavy_libraries_can_not_be_imported():
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in HEAVY)
    command = (
        f"from roll_async.commands.configs.validate import run_validate\nsys.exit(run_validate([{str(SHIPPED[0])!r}]))"
    )
    code = f"import sys\n{blocked}\n{command}"
    assert "ok: " in run_python(code)


def test_loading_does_not_try_to_import_heavy_libraries():
    code = (
        "import sys\nfrom roll_async.config.api import load\n"
        "import roll_async.config.loading.lookup, roll_async.commands.configs.validate\n"
        f"load({str(SHIPPED[0])!r})\nprint(sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    assert run_python(code) == "[]\n"


@pytest.mark.parametrize("command", ["show", "plan", "validate"])
def test_a_look_at_a_config_imports_nothing_heavy(command):
    code = (
        f"import sys\nfrom roll_async.cli import main\nassert main([{command!r}, {str(SHIPPED[0])!r}]) == 0\n"
        f"print(sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    assert run_python(code).splitlines()[-1] == "[]"


def test_loading_reads_only_the_file_and_its_includes(tmp_path):
    path = REPOSITORY / "examples/qwen2.5-7B-rlvr-offpolicy/rlvr_config.yaml"
    code = (
        "import sys, os, socket\nfrom roll_async.config.api import load, dump\n"
        f"dump(load({str(path)!r}))\n"
        "opened = []\n"
        "sys.addaudithook(lambda e, a: opened.append((e, str(a[0]) if a else '')) if e.split('.')[0] in "
        "{'open', 'socket', 'subprocess', 'os'} else None)\n"
        f"load({str(path)!r})\nprint('\\n'.join(sorted({{f'{{e}} {{os.path.basename(a)}}' for e, a in opened}})))"
    )
    names = ["rlvr_config.yaml", "rlvr_config_async.yaml", "rlvr_offpolicy_tis.yaml"]
    assert run_python(code).split("\n")[:-1] == [f"open {name}" for name in names]


def test_the_warnings_come_with_the_config(files):
    loaded = load_with_warnings(files.rlvr({"clip_ratio_low": 0.1}))
    assert [d.id for d in loaded.warnings] == ["W01"]
    assert loaded.config == load(files.rlvr({"algorithm": {"pg_options": {"clip_low": 0.1}}}))
