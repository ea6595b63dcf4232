"""One-line faults in the asynchronous core, one by one, against the tests that should see them.

    python tools/mutate.py --list                    # the catalogue
    python tools/mutate.py --only rollout --sample 20 --seed 1

The catalogue is made from the source: a comparison turned round, a condition negated, `and` for `or`, a number off by
one, a call left out, a value not returned. Each is written into a copy of the package; the tests run against it with a
time limit. Output: one JSON line per mutant, then how many were seen. A survivor is a missing test, or it is equivalent
and belongs into EQUIVALENT with its reason.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "roll_async/rollout": ["tests/unit/rollout"],
    "roll_async/buffer": ["tests/unit/buffer", "tests/unit/rollout/test_rollouter.py"],
    "roll_async/weight_sync/synchronizer.py": ["tests/unit/weight_sync"],
    "roll_async/pipelines/rlvr.py": ["tests/unit/pipelines"],
    "roll_async/trainer/learner.py": ["tests/unit/trainer"],
    "roll_async/inference/engine_host.py": ["tests/unit/inference/test_engine_host.py"],
}
"""Part of the package to the tests that should see its faults."""
EQUIVALENT: dict[str, str] = {}
"""Mutant (`FILE:LINE:KIND`) to why nothing can see it."""
_LIMIT_S = 120
_TURNED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
           ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One fault."""

    file: str
    line: int
    kind: str
    source: str
    """The whole file with it."""

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.kind}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All faults of a file."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        for kind, new in _faults(node):
            yield Mutant(
                file=str(path.relative_to(ROOT)), line=node.lineno, kind=kind, source=_replaced(text, node, new)
            )


def _faults(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _TURNED:
        yield "turned", ast.Compare(node.left, [_TURNED[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield "plus/minus", ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
    elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
        yield "left out", ast.Pass()
    elif isinstance(node, ast.AugAssign):
        yield "not counted", ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "returns None", ast.Return(ast.Constant(None))


def _replaced(text: str, node: ast.AST, new: ast.AST) -> str:
    lines = text.splitlines(keepends=True)
    start, end = node.lineno - 1, node.end_lineno - 1
    head = lines[start].encode()[: node.col_offset].decode()
    tail = lines[end].encode()[node.end_col_offset :].decode()
    written = ast.unparse(ast.fix_missing_locations(new))
    written = f"({written})" if isinstance(new, ast.expr) else written
    return "".join([*lines[:start], head + written + tail, *lines[end + 1 :]])


def catalogue() -> list[tuple[Mutant, list[str]]]:
    """Every mutant with its tests; one per line of source, the first kind that applies."""
    found = []
    for part, tests in TESTS.items():
        paths = [ROOT / part] if part.endswith(".py") else sorted((ROOT / part).glob("*.py"))
        for path in paths:
            by_line = {mutant.line: mutant for mutant in mutants_of(path)}
            found += [(mutant, tests) for _, mutant in sorted(by_line.items()) if mutant.name not in EQUIVALENT]
    return found


def is_seen(mutant: Mutant, tests: list[str], copy: Path) -> bool:
    """Whether a test fails with it."""
    target = copy / mutant.file
    original = target.read_text()
    target.write_text(mutant.source)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, timeout=_LIMIT_S
        )
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True  # it hangs, which a user would notice too
    finally:
        target.write_text(original)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="", help="part of the file's path")
    parser.add_argument("--sample", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = [(mutant, tests) for mutant, tests in catalogue() if options.only in mutant.file]
    if options.list:
        for mutant, _ in found:
            print(mutant.name)
        return 0
    chosen = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Path(folder)
        for name in ("roll_async", "tests", "configs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for mutant, tests in chosen:
            seen = is_seen(mutant, tests, copy)
            survivors += [] if seen else [mutant.name]
            print(json.dumps({"name": mutant.name, "seen": seen}), flush=True)
    print(json.dumps({"mutants": len(chosen), "of": len(found), "survivors": survivors}))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
