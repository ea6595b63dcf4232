"""The commands of README and docs work as typed: a document's blocks run in one shell, with what it tells to export.

Programs are stand-ins that check what they are given: a launcher's config and overrides pass the gate, a script exists
and knows the options, an extra of pip is declared, a job's folder and environment exist and its command is checked.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md", "docs_roll/getting_started.md", "docs_roll/first_gpu_run.md", "docs_roll/zh/getting_started.md",
    "docs_roll/zh/first_gpu_run.md", "docs_roll/zh/own_reward.md", "docs_roll/agentic.md", "docs_roll/fully_async.md",
    "docs_roll/validation.md", "docs_roll/simulator.md", "docs_roll/cluster.md", "examples/my_project/README.md",
    "examples/async_dapo/README.md", "examples/dapo/README.md",
    "docs_roll/docs/English/UserGuide/algorithms/offpolicy_setting.md",
    "docs_roll/docs/简体中文/使用指南/algorithms/offpolicy_setting.md",
)  # fmt: skip
PROGRAMS = ("python", "python3", "pip", "ray", "roll-async", "make", "curl")
STARTS = re.compile(r"^(export |bash |nohup |[A-Z_]+=\S* |python3? |pip |ray |roll-async |make )")
STAND_IN = f"""
import re, subprocess, sys, tomllib
from importlib.metadata import metadata
from pathlib import Path

program, *args = sys.argv[1:]
ROOT = Path({str(ROOT)!r})


def typed(script, args):
    assert Path(script).is_file(), f"{{script}} does not exist"
    if Path(script).name in ("start_rlvr_pipeline.py", "start_agentic_pipeline.py", "fully_async_main.py"):
        from roll_async.config.loading.lookup import resolve_config
        from roll_async.launch.checks.gate import check_supported

        given = args if any(a.startswith("--config") for a in args) else ["--config", "fully_async_cpu.yaml", *args]
        path, overrides = resolve_config(given, None)
        check_supported(path, overrides)
        own = [o for o in overrides if "/home/me" in o]
        assert not (path.stem.endswith("_cpu") and own), f"the laptop demo gets files of the full run: {{own}}"
        return
    if Path(script).name == "job_env.py":
        sys.exit(subprocess.run([sys.executable, script, *args]).returncode)
    usage = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    text = usage.stdout if usage.returncode == 0 else Path(script).read_text()
    missing = [a for a in args if a.startswith("--") and a.partition("=")[0] not in text]
    assert not missing, f"{{script}} does not know {{missing}}"


match program:
    case "pip" if "--no-deps" in args:
        named = [a for a in args[1:] if not a.startswith("-")]
        others = [a for a in named if a not in (ROOT / "Makefile").read_text()]
        assert named and not others, f"other releases than those of the Makefile: {{others}}"
    case "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        name, _, wanted = args[-1].partition("[")
        if name == ".":
            assert Path("pyproject.toml").is_file(), "nothing to install here"
        else:
            extras = [e.replace("-", "_") for e in metadata(name).get_all("Provides-Extra")]
            ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
            assert any(re.match(rf"{{name}}\\b", line) for line in ours), f"{{name}} is not what is needed: {{ours}}"
        unknown = set(wanted.removesuffix("]").split(",")) - {{"", *extras}}
        assert not unknown, f"pip: {{unknown}} of {{list(extras)}}"
    case "ray":
        options = dict(zip(args, args[1:]))
        assert Path(options["--runtime-env"]).read_text() and Path(options["--working-dir"]).is_dir()
        script, *rest = args[args.index("--") + 2 :]
        typed(Path(options["--working-dir"]) / script, rest)
    case "make":
        assert re.search(rf"^{{args[0]}}:", (ROOT / "Makefile").read_text(), re.M), args
    case "curl":
        Path(args[args.index("-o") + 1]).write_text("") if "-o" in args else None
    case "roll-async":
        from roll_async.cli import COMMANDS, main

        assert args[0] in COMMANDS
        if code := main(args) if args[0] in ("validate", "show", "plan") else main([args[0], "--help"]):
            sys.exit(code)
    case "python" if args == ["-m", "build"]:
        assert "build-system" in tomllib.loads(Path("pyproject.toml").read_text()), "nothing to build here"
    case _:
        typed(args[0], args[1:])
print("typed", program, *args)
"""


def commands(document):
    """The lines of the document's shell blocks, continued ones joined, patterns for the reader (DIR, [X]) left out."""
    text = (ROOT / document).read_text()
    lines = []
    for language, body in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.M | re.S):
        if language in ("", "bash", "sh", "shell"):
            lines += [line.strip().removeprefix("$ ") for line in body.replace("\\\n", " ").splitlines()]
    lines += [
        line
        for line in re.findall(r"`((?:python3?|roll-async|bash|make) [^`]*)`", text)
        if line != "roll-async simulate"
    ]
    typed = [
        line for line in lines if STARTS.match(line) and not re.search(r"\b(DIR|NAME|FILE|CONFIG|SOURCE)\b(?!=)", line)
    ]
    # `...` is for the reader to fill in; the misspelt key is shown for its error.
    return [line.replace("=...", "=/home/me") for line in typed if "async_generation_ration" not in line]


class Shell:
    """One bash whose programs are stand-ins; its home is the folder of the test."""

    def __init__(self, here: Path) -> None:
        self.here, self._programs = here, here / "bin"
        self._programs.mkdir()
        (self._programs / "stand_in.py").write_text(STAND_IN)
        for name in PROGRAMS:
            program = self._programs / name
            program.write_text(f'#!/bin/bash\nexec {sys.executable} {self._programs}/stand_in.py {name} "$@"\n')
            program.chmod(0o755)

    def type(self, lines: list[str], folder: Path) -> subprocess.CompletedProcess:
        """Line by line from a folder, until one fails."""
        left_out = ("RAY_ADDRESS", "WANDB_API_KEY", "MODEL_PATH", "CONFIG")
        env = {name: value for name, value in os.environ.items() if name not in left_out}
        env |= {"PATH": f"{self._programs}:{os.environ['PATH']}", "HOME": str(self.here), "PYTHONPATH": str(ROOT)}
        script = "set -e\n" + "\n".join(lines)
        return subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, env=env, cwd=folder, timeout=patient(300)
        )


@pytest.fixture
def shell(tmp_path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_of_a_document_work_in_one_shell_as_typed(document, shell):
    typed = commands(document)
    assert typed, f"{document} shows no command"
    done = shell.type(typed, (ROOT / document).parent if "my_project" in document else ROOT)
    assert done.returncode == 0, f"{typed}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.count("typed ") >= len([line for line in typed if not line.startswith(("export", "nohup"))])


CLONE, CONFIGS = "verl", "my_configs"
"""Links in the folder of a test: to the repository, and to a folder with a config of one's own."""
TYPED = {
    # Document and folder to its commands; {here} is the folder of the test.
    ("Async DAPO with Interruption Mechanism", CLONE): """
        pip install -e .
        pip install -U math-verify[antlr4_9_3]
        export WANDB_API_KEY=key
        export MODEL_PATH=/models/mine
        export VLLM_USE_V1=1
        export HOME_DIR={here}
        mkdir -p {here}/data/skywork_or1_1_5b_diff_sys
        mkdir -p {here}/data/aime24_sys
        python3 recipe/async_dapo/process_skywork.py --local_dir {here}/data/skywork_or1_1_5b_diff_sys
        python3 recipe/async_dapo/process_aime24.py --local_dir {here}/data/aime24_sys
        nohup python3 recipe/async_dapo/math_verify_service.py > /dev/null 2>&1 &
        bash recipe/async_dapo/test_7b.sh
    """,
    ("Fully Async Policy", f"{CLONE}/examples"): """
        python fully_async_main.py
        python fully_async_main.py --config-path {here}/my_configs --config-name my_config
    """,
    ("DAPO, data", f"{CLONE}/recipe/dapo"): "bash prepare_dapo_data.sh",
    ("DAPO", "."): """
        cd verl
        export RAY_ADDRESS="http://${RAY_IP:-localhost}:8265"
        export WORKING_DIR="${PWD}"
        export RUNTIME_ENV="./recipe/dapo/runtime_env.yaml"
        bash recipe/dapo/run_dapo_qwen2.5_32b.sh
        bash recipe/dapo/run_dapo_wo_ds_qwen2.5_32b.sh
        bash recipe/dapo/run_dapo_early_qwen2.5_32b.sh
    """,
    ("ROLL asynchronous training guide", f"{CLONE}/examples"): """
        python start_agentic_pipeline.py --config qwen2.5-0.5B-agentic/agent_val_frozen_lake_async.yaml
        python start_rlvr_pipeline.py --config qwen2.5-7B-rlvr_megatron/rlvr_config_async.yaml
        python start_rlvr_pipeline.py --config qwen2.5-7B-rlvr-offpolicy/rlvr_config.yaml
    """,
}
"""The commands of the documents this project started from, which take clusters and hours: start scripts go up to the
gate. Its greps are in `pipelines/test_published_numbers.py`; data scripts, service and launchers run for themselves in
`tests/service` and `tests/cluster`.
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(("document", "folder"), TYPED, ids=[document for document, _ in TYPED])
def test_the_commands_of_the_documents_work_as_typed_from_their_own_folder(document, folder, shell):
    typed = lines_of(document, folder, shell)
    done = shell.type(typed, shell.here / folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    quiet = ("export ", "nohup ", "mkdir ", "cd ")
    assert done.stdout.count("typed ") >= len([line for line in typed if not line.startswith(quiet)]), done.stdout


def lines_of(document, folder, shell):
    """The commands, with a clone and a config of one's own where they look for them."""
    (shell.here / CLONE).symlink_to(ROOT)
    (shell.here / CONFIGS).mkdir()
    base = os.path.relpath(ROOT / "configs" / "fully_async_cpu", shell.here / CONFIGS)
    own = "async_training: {staleness_threshold: 5, max_queue_size: 2000, generation_timeout: 60.0}\n"
    (shell.here / CONFIGS / "my_config.yaml").write_text(f"defaults: [{base}]\n{own}")
    typed = [line.strip() for line in TYPED[document, folder].replace("{here}", str(shell.here)).splitlines()]
    return [line for line in typed if line]


LAUNCHED = [(document, folder) for document, folder in TYPED if folder.endswith("examples")]


@pytest.mark.slow
@pytest.mark.parametrize(("document", "folder"), LAUNCHED, ids=[document for document, _ in LAUNCHED])
def test_the_start_scripts_themselves_find_the_configs_of_the_documents_from_their_own_folder(document, folder, shell):
    """Up to what is missing here: the model, data, packages of an engine."""
    for line in lines_of(document, folder, shell):
        program, *arguments = line.split()
        done = subprocess.run(
            [{"python": sys.executable}[program], *arguments, "pretrain=no/such/model"],
            capture_output=True, text=True, cwd=shell.here / folder, timeout=patient(60),
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        )  # fmt: skip
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert "pretrain: model folder no/such/model does not exist" in done.stderr, line
        assert set(re.findall(r"error (C\d+)", done.stderr)) == {"C204"}, "other things that are not there, no fault"
