"""The wheel, installed outside of the checkout: what a user has who never saw the repository. Nothing is downloaded."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import roll_async
from tests.patience import patient

pytest.importorskip("setuptools")
pytest.importorskip("megatron.core")

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "actor_infer.strategy_args={strategy_name: hf_infer}"
SOURCES = ("roll_async", "configs", "examples", "tools")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools leaves folders where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, "-w", str(folder), str(folder / "source")], capture_output=True, text=True, timeout=patient(300)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """`bin` of an environment with the wheel and, by their folder alone, the libraries of the tests' own environment:
    its .pth files, one of which may name a checkout, are not read there.
    """
    venv = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=patient(120))
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=patient(120))
    return venv / "bin"


def typed(installed, folder, *words, timeout=120):
    """(exit code, what is said) of a command of the environment, in a folder outside of the checkout."""
    left_out = ("PYTHONPATH", "RAY_ADDRESS", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    done = subprocess.run(
        [str(installed / words[0]), *words[1:]],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=env, timeout=patient(timeout),
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow
def test_it_holds_every_file_of_the_package_the_configs_and_the_agents_that_they_name(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"roll_async/shipped/configs/{path.name}" for path in ROOT.glob("configs/*.yaml")}
    assert configs and configs <= names
    makers = {f"roll_async/shipped/tools/make_{name}_assets.py" for name in ("agentic", "gsm8k")}
    assert {"roll_async/py.typed", "roll_async/shipped/examples/agents/calculator_agent.py"} | makers <= names
    files = [path for path in ROOT.glob("roll_async/**/*") if path.is_file() and path.suffix != ".pyc"]
    package = {str(path.relative_to(ROOT)) for path in files if "shipped" not in path.parts}
    assert len(package) > 100 and package <= names, "of other files than Python's: package-data of pyproject.toml"
    others = {name.partition("/")[0] for name in names} - {"roll_async"}
    assert others == {f"roll_async-{roll_async.__version__}.dist-info"}


@pytest.mark.slow
def test_its_commands_work_where_no_checkout_is(installed, tmp_path):
    version = f"roll-async {roll_async.__version__}\n"
    assert typed(installed, tmp_path, "roll-async", "--version") == (0, version)
    assert typed(installed, tmp_path, "python", "-m", "roll_async", "--version") == (0, version)
    code = "import roll_async, sys; print(roll_async.__file__, *sys.path, sep='\\n')"
    path = typed(installed, tmp_path, "python", "-c", code)[1].splitlines()
    assert path[0].startswith(str(installed.parent)) and str(ROOT) not in path
    names, without = ("rlvr_config_async_cpu", "agentic_calculator_cpu"), (ENGINE, "tracking.track_with=[stdout]")
    code, said = typed(installed, tmp_path, "roll-async", "validate", *names, *without)
    assert code == 0, said
    code, said = typed(installed, tmp_path, "roll-async", "doctor", names[0], ENGINE, "pretrain=./none")
    assert code == 2 and "model folder ./none" in said and "the check itself failed" not in said
    code, said = typed(installed, tmp_path, "roll-async", "doctor", "sft_word_problems_cpu", *without[1:])
    assert code == 2 and "make it with: roll-async demo --assets-only word_problems\n" in said, said
    assert typed(installed, tmp_path, "roll-async", "demo", "--assets-only", "word_problems", timeout=200)[0] == 0
    code, said = typed(installed, tmp_path, "roll-async", "doctor", "sft_word_problems_cpu", *without[1:])
    assert code == 0, said


@pytest.mark.slow
@pytest.mark.long
def test_the_demo_runs_shortened_where_no_checkout_is(installed, tmp_path):
    code, said = typed(installed, tmp_path, "roll-async", "demo", "--small", "max_steps=2", ENGINE, timeout=400)
    assert code == 0 and "making demo assets" in said and "step 2/2" in said, said
    run = tmp_path / "output" / "addition_demo"
    assert (run / "hf" / "config.json").is_file()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    code, said = typed(installed, tmp_path, "roll-async", "demo", "--small", "--assets-only")
    assert (code, said) == (0, "demo assets are complete in ./output/demo_assets\n")
