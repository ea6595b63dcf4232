"""The Dockerfiles, read: no Docker is needed. What they copy, install and run is there, and no process is root's."""

import re
import tomllib
from pathlib import Path

import pytest

from roll_async.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def instructions(path):
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_base_has_a_version_and_what_is_installed_and_run_is_no_roots(path):
    said = instructions(path)
    ((_, base), *rest) = said
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", base), "a version to the last digit"
    names = [name for name, _ in rest]
    assert names.index("USER") < names.index("COPY") < names.index("CMD") and ("USER", "roll") in rest
    after = rest[names.index("USER") :]
    assert not [text for name, text in after if name == "RUN" and "apt-get" in text]


def test_what_they_name_is_in_the_repository():
    said = {path.name: instructions(path) for path in FILES}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (install,) = [text for name, text in said["Dockerfile.cuda"] if name == "RUN" and "pip install" in text]
    wanted, lock = re.search(r"\[(.*)\]", install)[1].split(","), re.search(r"-c (\S+)", install)[1]
    assert set(wanted) <= extras.keys() and (ROOT / lock).is_file()
    assert ("CMD", '["roll-async", "doctor"]') in said["Dockerfile.cuda"] and "doctor" in COMMANDS
    targets = re.findall(r"make (\S+)", " ".join(text for _, text in said["Dockerfile.cpu"])) + ["demo"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{re.escape(target)}:", makefile, re.M) for target in {"setup", "demo"} & set(targets))
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "output"} <= set(ignored) and not {"locks", "configs", "tools"} & set(ignored)
