"""What surrounds the package: one version, what is shipped, extras, and the commands that checks of a change run."""

import re
import tomllib
from pathlib import Path

import yaml

import roll_async
from roll_async.config.yaml.compose import CHECKOUT, SHIPPED

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_stands_in_one_place():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "roll_async.__version__"}
    assert "version" in PROJECT["project"]["dynamic"] and re.fullmatch(r"\d+\.\d+\.\d+", roll_async.__version__)
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = [line.removeprefix("## ") for line in changes.splitlines() if line.startswith("## ")]
    assert released[0] == "Unreleased" and roll_async.__version__ == released[1].split()[0]


def test_in_a_checkout_what_is_shipped_are_its_own_folders():
    assert (SHIPPED, CHECKOUT) == (ROOT / "configs", ROOT)
    links = {path.name: path.readlink() for path in (ROOT / "roll_async" / "shipped").iterdir()}
    assert links == {name: Path("..", "..", name) for name in ("configs", "examples", "tools")}


def test_there_is_an_extra_for_each_use_and_the_former_names_stay():
    extras = PROJECT["project"]["optional-dependencies"]
    uses, former = {"vllm", "sglang", "cpu", "agents", "view"}, {"vllm-cpu-deps", "service", "mcp", "data"}
    assert uses | former <= set(extras)
    assert extras["cpu"] == ["roll_async[vllm-cpu-deps]"] and "roll_async[mcp]" in extras["agents"]


def test_the_workflow_runs_the_commands_of_contributing():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    typed = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {"make lint PYTHON=python", "make test-all PYTHON=python"} <= set(typed)
    assert all("timeout-minutes" in job for job in jobs.values())


def test_a_bug_report_asks_for_the_text_of_the_doctor():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    (doctor,) = [field for field in form["body"] if field.get("id") == "doctor"]
    assert "roll-async doctor" in doctor["attributes"]["label"] and doctor["validations"]["required"] is True
