"""What is not installed: an error where the roles run, a warning of a config that may be for another machine."""

import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from roll_async.commands.configs.validate import run_validate
from roll_async.commands.run import prepare
from roll_async.config.api import ConfigError, load
from roll_async.launch.checks import packages
from roll_async.launch.checks.packages import missing_packages

ROOT = Path(__file__).resolve().parents[3]
CPU, SEVEN = ROOT / "configs/rlvr_config_async_cpu.yaml", ROOT / "configs/rlvr_config_async.yaml"
WORLDS = ROOT / "configs/agentic_frozen_lake_async_cpu.yaml"
LOOKED_FOR = (
    "vllm", "sglang", "wandb", "swanlab", "trackio", "mlflow", "pyarrow", "reasoning_gym", "mcp", "flash_attn",
    "transformer_engine",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch):
    """Of the packages that are looked for."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    monkeypatch.setattr(packages, "SGLANG_ON_CPU", "nowhere")
    for name in LOOKED_FOR:  # another test of this process may have imported it, or put a stub there
        monkeypatch.delitem(sys.modules, name, raising=False)


def missing(path, *overrides, **more) -> dict[str, str]:
    return dict(missing_packages(load(path, overrides), **more))


def test_each_package_is_named_with_its_key_and_the_line_that_installs_it(tmp_path):
    tools = "custom_envs.FrozenLake.tools=[{tool_id: calculator}, {tool_id: mcp, tool_args: {url: a}}]"
    found = {
        **missing(CPU, "tracking.track_with=wandb", "validation.data_args.file_name=a.parquet"),
        **missing(WORLDS, "custom_envs.FrozenLake.env_type=reasoning_gym", "tracking.track_with=mlflow", tools),
    }
    assert found.keys() == {
        "actor_infer.strategy_args.strategy_name", "tracking.track_with", "validation.data_args.file_name",
        "custom_envs.FrozenLake.env_type", "custom_envs.FrozenLake.tools.1.tool_id",
    }  # fmt: skip
    assert found["tracking.track_with"] == "mlflow is not installed here: pip install mlflow"
    assert 'pip install "roll_async[reasoning-gym]"' in found["custom_envs.FrozenLake.env_type"]
    engine = found["actor_infer.strategy_args.strategy_name"]
    assert "vllm is not installed here: pip install " in engine and "or use strategy_name: hf_infer" in engine
    assert missing(SEVEN)["actor_infer.strategy_args.strategy_name"].endswith('pip install "roll_async[sglang]"')
    assert "actor_infer.strategy_args.strategy_name" not in missing(CPU, engines=False)
    plain = ("actor_infer.strategy_args={strategy_name: hf_infer}", "tracking.track_with=stdout")
    assert missing(CPU, *plain) == {}
    flash = missing(CPU, *plain, "actor_infer.model_args.attn_implementation=fa2")
    assert flash["actor_infer.model_args.attn_implementation"].endswith("here: pip install flash-attn")
    engine = "actor_train.strategy_args.strategy_config.transformer_impl"
    assert "transformer-engine-cu13" in missing(CPU, *plain, f"{engine}=transformer_engine")[engine]


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_each_of_several_trackers_is_looked_for_and_named_with_its_extra(name):
    engine = "actor_infer.strategy_args={strategy_name: hf_infer}"
    found = missing_packages(load(CPU, [engine, f"tracking.track_with=[stdout, mlflow, {name}]"]))
    assert found == [
        ("tracking.track_with", "mlflow is not installed here: pip install mlflow"),
        ("tracking.track_with", f'{name} is not installed here: pip install "roll_async[{name}]"'),
    ]


def test_a_package_in_a_folder_that_the_roles_environment_names_is_there(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    sglang = "actor_infer.strategy_args={strategy_name: sglang}"
    assert "actor_infer.strategy_args.strategy_name" in missing(CPU, sglang)
    found = missing(CPU, sglang, f"actor_infer.system_envs={{PYTHONPATH: {tmp_path}}}")
    assert "actor_infer.strategy_args.strategy_name" not in found


def test_sglang_on_cpu_is_found_in_its_own_folder_or_named_with_the_line_that_puts_it_there(tmp_path, monkeypatch):
    sglang = "actor_infer.strategy_args={strategy_name: sglang}"
    line = missing(CPU, sglang)["actor_infer.strategy_args.strategy_name"].partition(": ")[2]
    assert line.startswith("pip install --no-deps --target ") and line in (ROOT / "docs_roll/engines.md").read_text()
    pins = " ".join((ROOT / "Makefile").read_text().partition("SGLANG := ")[2].partition("\n#")[0].split())
    assert line.endswith(pins.replace("\\ ", "").strip())
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    monkeypatch.setattr(packages, "SGLANG_ON_CPU", str(tmp_path))
    assert "actor_infer.strategy_args.strategy_name" not in missing(CPU, sglang)
    assert "actor_infer.strategy_args.strategy_name" in missing(SEVEN), "on devices it lies among the other packages"


def test_a_package_apex_that_is_not_nvidia_s_is_refused_before_a_rank_starts(tmp_path, monkeypatch):
    hf = "actor_infer.strategy_args={strategy_name: hf_infer}"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "actor_train.strategy_args.strategy_name" not in missing(CPU, hf)
    (tmp_path / "apex" / "lib").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("raise SyntaxError\n")
    found = missing(CPU, hf)["actor_train.strategy_args.strategy_name"]
    assert "is not NVIDIA's Apex" in found and "pip uninstall apex" in found
    assert "actor_train.strategy_args.strategy_name" not in missing(CPU, hf, engines=False)
    (tmp_path / "apex" / "optimizers").mkdir()
    assert "actor_train.strategy_args.strategy_name" not in missing(CPU, hf)


def test_a_run_of_this_machine_is_refused_by_validate_too_and_one_with_devices_is_warned(capsys, monkeypatch):
    assert run_validate([str(CPU), "tracking.track_with=wandb"]) == 2
    said = capsys.readouterr().out
    assert ": error C204: tracking.track_with: wandb is not installed here: pip install" in said
    assert run_validate([str(SEVEN), "tracking.track_with=wandb"]) == 0
    said = capsys.readouterr().out
    assert ": warning W14: tracking.track_with: wandb is not installed here" in said and "\nok: " in said
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert run_validate([str(CPU), "tracking.track_with=wandb"]) == 0
    with pytest.raises(ConfigError) as raised:  # the driver's own packages are needed here in any case
        prepare(["--config", str(CPU), "tracking.track_with=wandb"], "rlvr")
    assert "C204: tracking.track_with: wandb" in str(raised.value) and "strategy_name" not in str(raised.value)


def test_every_line_names_an_extra_that_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    source = (ROOT / "roll_async/launch/checks/packages.py").read_text()
    named = {*re.findall(r"roll_async\[([a-z0-9-]+)\]", source), *(n.replace("_", "-") for n in packages._EXTRAS)}
    assert named <= set(extras) and "sglang" in named
    assert find_spec("yaml")  # the fixture hides packages from the check alone
