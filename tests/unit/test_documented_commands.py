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
    "README.md", "docs_roll/agentic.md", "docs_roll/fully_async.md", "examples/async_dapo/README.md",
    "examples/dapo/README.md", "docs_roll/docs/English/UserGuide/algorithms/offpolicy_setting.md",
    "docs_roll/docs/简体中文/使用指南/algorithms/offpolicy_setting.md",
)  # fmt: skip
PROGRAMS = ("python", "python3", "pip", "ray", "roll-async", "make", "curl")
STARTS = re.compile(r"^(export |bash |nohup |[A-Z_]+=\S* |python3? |pip |ray |roll-async |make )")
STAND_IN = f"""
import re, subprocess, sys, tomllib
from pathlib import Path

program, *args = sys.argv[1:]
ROOT = Path({str(ROOT)!r})


def typed(script, args):
    assert Path(script).is_file(), f"{{script}} does not exist"
    if Path(script).name in ("start_rlvr_pipeline.py", "start_agentic_pipeline.py", "fully_async_main.py"):
        from roll_async.config.lookup import resolve_config
        from roll_async.launch.gate import admit

        given = args if any(a.startswith("--config") for a in args) else ["--config", "fully_async_cpu.yaml", *args]
        path, overrides = resolve_config(given, None)
        admit(path, overrides)
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
    case "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"^[.]\\[(.*)\\]$", args[-1])
        assert all(e in extras for n in named for e in n.split(",")), f"pip: {{named}} of {{list(extras)}}"
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
        sys.exit(main(args) if args[0] in ("validate", "show", "plan") else main([args[0], "--help"]))
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_of_a_document_work_in_one_shell_as_typed(document, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "stand_in.py").write_text(STAND_IN)
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f'#!/bin/bash\nexec {sys.executable} {folder}/stand_in.py {name} "$@"\n')
        program.chmod(0o755)
    typed = commands(document)
    assert typed, f"{document} shows no command"
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "WANDB_API_KEY", "MODEL_PATH", "CONFIG")}
    env = {**kept, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = "set -e\n" + "\n".join(typed)
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=env, cwd=ROOT, timeout=patient(300)
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.count("typed ") >= len([line for line in typed if not line.startswith(("export", "nohup"))])
