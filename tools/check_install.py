"""Whether the extras of pyproject.toml can be installed together: an engine's own requirements against ours.

    python tools/check_install.py [--engine vllm] [--version 0.33.0 ...]
    python tools/check_install.py --lock locks/linux-x86_64-cuda.txt [--resolve torch==2.13.0 vllm==0.32.0]

Asks the registry for the metadata of the newest engine inside our bounds (or of the versions given), nothing is
downloaded but that (0.01 MB, 20 s). For every package that both sides name there must be a version that both take.
--lock: the same of the pinned engine against every pin. --resolve makes the lock: everything that an install with the
engine, and with the versions named, would bring on this platform (pip's dry run, which downloads wheels whose metadata
the registry does not keep apart: 1 GB, some minutes).
Exit 0: there is, or the registry cannot be reached, which is said; 1: a conflict, named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60
RESOLVE_LIMIT_S = 1800
PLAIN = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_CONSTRAINT": ""}
"""A lock is of the registry, not of what a machine's own settings put before it (builds for its CPU, caps)."""


def ours(extra: str) -> list[Requirement]:
    """What an install with that extra asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(x) for x in (*project["dependencies"], *project["optional-dependencies"][extra])]


def theirs(package: str, specifier: str, limit_s: float = LIMIT_S) -> tuple[str, list[Requirement]] | None:
    """(version, requirements) of the newest that fits; None when the registry gives no answer. Raises ValueError when
    it knows the package, and no version that fits.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "-q"]
        try:
            done = subprocess.run(
                [*command, "--report", str(report), f"{package}{specifier}"],
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return None
        known = re.search(r"\(from versions: (.+)\)", done.stderr)
        if done.returncode and known is not None and known[1] != "none":
            raise ValueError(f"no version of {package} fits {specifier}; the newest is {known[1].split(', ')[-1]}")
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


def pins(lock: str) -> dict[str, str]:
    """Versions by canonical name of a lock's text."""
    found = [Requirement(line) for line in lock.splitlines() if line and not line.startswith("#")]
    return {canonical(r.name): str(r.specifier).removeprefix("==") for r in found}


def unmet(pinned: Mapping[str, str], requirements: Iterable[Requirement]) -> list[str]:
    """What is required here and pinned at another version, or not at all."""
    problems = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = pinned.get(canonical(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name}{requirement.specifier}: pinned {version or 'nowhere'}")
    return problems


def resolve(requirements: Sequence[str]) -> list[str]:
    """`name==version` of everything an install of these would bring, wheels only. Ends with pip's words."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "-q", "--report", str(report), *requirements],
            capture_output=True, text=True, timeout=RESOLVE_LIMIT_S, env={**os.environ, **PLAIN},
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        found = json.loads(report.read_text())["install"]
    return sorted(f"{canonical(x['metadata']['name'])}=={x['metadata']['version']}" for x in found)


def check_lock(path: Path, engine: str, versions: Sequence[str]) -> int:
    """Exit code."""
    mine = ours(engine)
    if versions:
        head = [line for line in path.read_text().splitlines() if line.startswith("#")] if path.is_file() else []
        path.write_text("\n".join([*head, *resolve([*map(str, mine), *versions])]) + "\n")
    pinned = pins(path.read_text())
    problems = unmet(pinned, mine)
    answer = theirs(engine, f"=={pinned[engine]}") if engine in pinned else None
    if answer is not None:
        problems += unmet(pinned, answer[1])
    said = "" if answer is not None else f" (not against {engine}'s own requirements: no answer within {LIMIT_S} s)"
    print(f"{path.name}: {'; '.join(problems) or 'fits'}{said}")
    return 1 if problems else 0


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--version", nargs="*", help="instead of the newest inside the bounds")
    parser.add_argument("--lock", type=Path, help="a lock file")
    parser.add_argument("--resolve", nargs="+", default=[], metavar="NAME==VERSION", help="make that lock anew")
    args = parser.parse_args()
    if args.lock is not None:
        return check_lock(args.lock, args.engine, args.resolve)
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
