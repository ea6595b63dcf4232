"""Whether the extras of pyproject.toml can be installed together: an engine's own requirements against ours.

    python tools/check_install.py [--engine vllm] [--version 0.33.0 ...]

Asks the registry for the metadata of the newest engine inside our bounds (or of the versions given), nothing is
downloaded but that (0.01 MB, 20 s). For every package that both sides name there must be a version that both take.
Exit 0: there is, or the registry cannot be reached, which is said; 1: a conflict, named.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60


def ours(extra: str) -> list[Requirement]:
    """What an install with that extra asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(x) for x in (*project["dependencies"], *project["optional-dependencies"][extra])]


def theirs(package: str, specifier: str) -> tuple[str, list[Requirement]] | None:
    """(version, requirements) of the newest that fits; None when the registry gives no answer."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "-q"]
        try:
            done = subprocess.run(
                [*command, "--report", str(report), f"{package}{specifier}"], capture_output=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return None
        if done.returncode or not report.is_file():
            return None
        metadata = json.loads(report.read_text())["install"][0]["metadata"]
    return metadata["version"], [Requirement(x) for x in metadata.get("requires_dist", [])]


def conflicts(mine: list[Requirement], other: list[Requirement]) -> list[str]:
    """Packages that both name and no version satisfies both."""
    found = []
    needed = {canonical(r.name): r for r in other if r.marker is None or r.marker.evaluate({"extra": ""})}
    for requirement in mine:
        there = needed.get(canonical(requirement.name))
        if there is not None and not overlap(requirement.specifier, there.specifier):
            found.append(
                f"{requirement.name}: ours{requirement.specifier or ' any'}, theirs{there.specifier or ' any'}"
            )
    return found


def overlap(left: SpecifierSet, right: SpecifierSet) -> bool:
    """Whether a version satisfies both: one at, just above or just below a bound of either, or a very new one."""
    candidates = {Version("9999")}
    for bound in (*left, *right):
        base = Version(bound.version.removesuffix(".*"))
        release = base.release
        candidates |= {base, Version(".".join(map(str, (*release, 1))))}
        if any(release):
            last = max(i for i, x in enumerate(release) if x)
            candidates.add(Version(".".join(map(str, (*release[:last], release[last] - 1, 9999)))))
    return any(left.contains(v, prereleases=True) and right.contains(v, prereleases=True) for v in candidates)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--version", nargs="*", help="instead of the newest inside the bounds")
    args = parser.parse_args()
    mine = ours(args.engine)
    bound = next(r for r in mine if canonical(r.name) == args.engine).specifier
    failed = False
    for specifier in [f"=={v}" for v in args.version or ()] or [str(bound)]:
        answer = theirs(args.engine, specifier)
        if answer is None:
            print(f"{args.engine}{specifier}: not checked, the registry gave no answer within {LIMIT_S} s")
            continue
        version, requirements = answer
        problems = conflicts(mine, requirements)
        failed |= bool(problems)
        print(f"{args.engine} {version}: {'; '.join(problems) or 'fits'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
