"""One-line faults in the asynchronous core, agents and algorithms, one by one, against the tests that should see them.

    python tools/mutate.py --list                                  # the catalogue
    python tools/mutate.py --sample 100 --seed 1 --log mutants.jsonl [--part 1/4]
    python tools/mutate.py --sample 60 --files agents/ --quick --log mutants.jsonl
    python tools/mutate.py --table mutants.jsonl > docs_roll/mutants.md

The catalogue has two halves: the faults with a name (`named_mutants.py`), all of which are run, and those made from the
source, one per line and kind, of which `--sample` are drawn: a comparison turned round, `and` for `or`, a `not` left
out, plus for minus, a call or a count left out, a value not returned.

Each is written into a copy of the package whose tests are green without one, and the tests of its file run against it,
the nearest first, up to the first that fails; then those marked `slow`, and, where the simulator runs the file, some
of its worlds. `--quick` leaves the last two out, so what survives must be run again without it. A test process is
forked from one that has imported the libraries but nothing of the package. What takes more processor time than its
limit, or hangs, counts as seen. One JSON line per fault; exit code 1 when one survives that is not in EQUIVALENT.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from named_mutants import NAMED

ROOT = Path(__file__).resolve().parents[1]
UNIT = "tests/unit"
_ALGORITHMS = (f"{UNIT}/algorithms", f"{UNIT}/trainer/test_learner.py", f"{UNIT}/trainer")
TESTS: dict[str, tuple[str, ...]] = {
    "rollout/": (f"{UNIT}/rollout", f"{UNIT}/agents/test_groups.py"),
    "buffer/states.py": (f"{UNIT}/config/test_no_inert_key.py", f"{UNIT}/buffer"),
    "buffer/": (f"{UNIT}/buffer", f"{UNIT}/rollout/test_rollouter.py", f"{UNIT}/pipelines"),
    "weight_sync/push.py": (
        f"{UNIT}/weight_sync/test_synchronizer.py",
        f"{UNIT}/weight_sync/test_synchronizer_stages.py",
        f"{UNIT}/config/test_no_inert_key.py",
        f"{UNIT}/pipelines",
    ),
    "weight_sync/transport/links.py": (f"{UNIT}/weight_sync/test_links.py",),
    "weight_sync/": (f"{UNIT}/weight_sync/test_layout.py", f"{UNIT}/weight_sync"),
    "pipelines/checkpoint.py": (f"{UNIT}/checkpoint/test_run_checkpoints.py", f"{UNIT}/pipelines"),
    "pipelines/": (f"{UNIT}/pipelines", f"{UNIT}/simulator"),
    "trainer/": (f"{UNIT}/trainer/test_learner.py", f"{UNIT}/trainer"),
    "inference/engine_host.py": (f"{UNIT}/inference/test_engine_host.py",),
    "inference/": (f"{UNIT}/inference/test_vllm_progress.py",),
    "agents/gateway/": (
        f"{UNIT}/agents/test_gateway_body.py",
        f"{UNIT}/agents/test_gateway.py",
        f"{UNIT}/agents/test_serve_policy.py",
        f"{UNIT}/agents/test_remote.py",
        f"{UNIT}/agents",
    ),
    "agents/tools/": (f"{UNIT}/agents/test_groups.py", f"{UNIT}/envs/test_question_rows.py", f"{UNIT}/agents"),
    "agents/processes/external.py": (f"{UNIT}/agents/test_external.py", f"{UNIT}/agents"),
    "agents/processes/supervisor.py": (f"{UNIT}/agents/test_external.py",),
    "agents/processes/remote.py": (f"{UNIT}/agents/test_remote.py", f"{UNIT}/agents/test_serve_policy.py"),
    "agents/book.py": (f"{UNIT}/agents/test_groups.py", f"{UNIT}/launch/test_agent_parts.py"),
    "agents/processes/beside.py": (
        f"{UNIT}/agents/test_session.py",
        f"{UNIT}/agents/test_gateway.py",
        f"{UNIT}/agents",
    ),
    **{
        f"agents/{name}.py": (
            f"{UNIT}/agents/test_session.py",
            f"{UNIT}/agents",
            f"{UNIT}/simulator/test_agent_worlds.py",
        )
        for name in ("session", "rendering", "messages", "turn_handler", "policies")
    },
    "agents/": (f"{UNIT}/agents/test_groups.py", f"{UNIT}/agents", f"{UNIT}/simulator/test_agent_worlds.py"),
    "algorithms/advantages.py": (f"{UNIT}/algorithms/test_worked_advantages.py", *_ALGORITHMS),
    "algorithms/critic.py": (f"{UNIT}/algorithms/test_worked_losses.py", *_ALGORITHMS),
    "algorithms/policy_losses.py": (f"{UNIT}/algorithms/test_worked_losses.py", *_ALGORITHMS),
    "algorithms/group_variance.py": (f"{UNIT}/algorithms/test_group_filter_rule.py", f"{UNIT}/rollout"),
    "algorithms/logprobs.py": (f"{UNIT}/algorithms/test_token_logprobs.py", *_ALGORITHMS),
    "algorithms/masked.py": (f"{UNIT}/algorithms/test_masked_statistics.py", *_ALGORITHMS),
    "algorithms/overlong.py": (f"{UNIT}/algorithms/test_overlong_shaping.py", *_ALGORITHMS),
    "algorithms/rewards.py": (f"{UNIT}/algorithms/test_reward_shaping.py", *_ALGORITHMS),
    "algorithms/": _ALGORITHMS,
    "rewards/": (f"{UNIT}/rewards/test_llm_judge.py", "tests/service/test_service_client.py"),
    "observe/outside.py": (f"{UNIT}/agents/test_outside.py", f"{UNIT}/observe"),
    "commands/serve_policy.py": (f"{UNIT}/agents/test_serve_policy.py",),
}
"""First part of a file's path to the tests that should see its faults; the first that fits. The test file of the same
name runs before them.
"""
GENERATED_FROM = (
    "rollout/*.py", "rollout/dispatch/*.py", "rollout/filters/*.py", "buffer/*.py", "weight_sync/push.py",
    "weight_sync/layout.py", "weight_sync/digest.py",
    "pipelines/rlvr.py", "pipelines/wire.py", "pipelines/validation.py",
    "trainer/learner.py", "trainer/collate.py", "trainer/credit.py", "inference/engine_host.py",
    "inference/stop_strings.py", "agents/*.py", "agents/gateway/*.py", "agents/processes/*.py",
    "agents/tools/*.py", "algorithms/*.py",
)  # fmt: skip
_SIMULATED = ("rollout/", "buffer/", "weight_sync/", "pipelines/", "trainer/", "inference/", "agents/worlds.py",
              "agents/episode.py", "agents/session.py", "agents/turn_handler.py", "rollout/trace_tree.py")  # fmt: skip
"""What worlds of the simulator run."""
EQUIVALENT: dict[str, str] = {
    "algorithms/policy_losses.py: turned: tau = torch.where(terms.advantages > 0, positive, torch.full_like(ratio,"
    " options.tau_negative))": "where the advantage is 0 so are the loss and its gradient, whatever tau is",
    'agents/gateway/server.py: turned: return len(raw) <= _INLINE_BYTES and sum(map(raw.count, (b"{", b"[", b","))) <='
    " _INLINE_VALUES": "a body of exactly that size is the same request, read here or in another process",
    "agents/processes/beside.py: left out: process.stdout.close()": "the pipe is closed with the object, whose process"
    " has ended",
    "rollout/rounds.py: left out: running.clear()": "GeneratedTooMany stops twice, and the second time adds the"
    " same groups to a tally that nobody reads any more",
}
"""Fault, as `Mutant.name` without the number of its line, to why no test can see it."""
_LIBRARIES = ("aiohttp", "dataclasses_json", "hypothesis", "jinja2", "numpy", "pytest", "tokenizers", "torch",
              "transformers.tokenization_utils_fast", "yaml")  # fmt: skip
"""What every child needs."""
_CPU_LIMIT_S = 300
"""Of the processor, so that a busy machine makes no fault look as if it had been seen."""
_HANGS_S = 900
_WORLDS, _KILLED_WORLDS = 60, 15
_TURNED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
           ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One fault."""

    file: str
    """Under roll_async/."""
    line: int
    kind: str
    """Name of a named one, else what is wrong with the line."""
    text: str
    """The line as it should be."""
    source: str
    """The whole file with it."""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.kind}: {self.text}"


def named() -> list[Mutant]:
    """The faults with a name."""
    found = []
    for name, file, right, wrong in NAMED:
        text = (ROOT / "roll_async" / file).read_text()
        before, _, _ = text.partition(right)
        line = before.count("\n") + 1
        source = text.replace(right, wrong, 1)
        found.append(Mutant(file=file, line=line, kind=name, text=text.splitlines()[line - 1].strip(), source=source))
    return found


def generated() -> list[Mutant]:
    """One fault per line and kind."""
    paths = [path for pattern in GENERATED_FROM for path in sorted((ROOT / "roll_async").glob(pattern))]
    found = {mutant.name: mutant for path in paths for mutant in _mutants_of(path)}
    return list(found.values())


def _mutants_of(path: Path) -> Iterator[Mutant]:
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        for kind, new in _faults(node):
            yield Mutant(
                file=str(path.relative_to(ROOT / "roll_async")),
                line=node.lineno,  # type: ignore[attr-defined]
                kind=kind,
                text=lines[node.lineno - 1].strip(),  # type: ignore[attr-defined]
                source=_replaced(text, node, new),
            )


def _faults(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _TURNED:
        yield "turned", ast.Compare(node.left, [_TURNED[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "without not", node.operand
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield "plus/minus", ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
    elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
        if not ast.unparse(node).startswith("logger."):  # what the log says is no fault of the core
            yield "left out", ast.Pass()
    elif isinstance(node, ast.AugAssign):
        yield "not counted", ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "returns None", ast.Return(ast.Constant(None))


def _replaced(text: str, node: ast.AST, new: ast.AST) -> str:
    lines = text.splitlines(keepends=True)
    start, end = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    head = lines[start].encode()[: node.col_offset].decode()  # type: ignore[attr-defined]
    tail = lines[end].encode()[node.end_col_offset :].decode()  # type: ignore[attr-defined]
    written = ast.unparse(ast.fix_missing_locations(new))
    written = f"({written})" if isinstance(new, ast.expr) else written
    return "".join([*lines[:start], head + written + tail, *lines[end + 1 :]])


def catalogue(sample: int, seed: int, files: str = "") -> list[Mutant]:
    """All faults with a name, and `sample` of the others, drawn by `seed`; of files whose path begins with `files`."""
    made = [mutant for mutant in generated() if mutant.file.startswith(files)]
    drawn = random.Random(seed).sample(made, min(sample, len(made)))
    return [*(mutant for mutant in named() if mutant.file.startswith(files)), *drawn]


def tests_of(file: str) -> list[str]:
    """The tests that should see a fault of this file, the nearest first."""
    path = Path(file)
    nearest = ROOT / UNIT / path.parent / f"test_{path.stem}.py"
    (others,) = [tests for part, tests in TESTS.items() if file.startswith(part)][:1]
    return [*([str(nearest.relative_to(ROOT))] if nearest.is_file() else []), *others]


def _in_a_child(copy: Path, tests: Sequence[str], *, quick: bool, worlds: bool) -> str:
    """Run these tests, and worlds, in a fork; what saw a fault, empty when nothing did."""
    told = copy / "seen_by"
    told.write_text("")
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(copy)
        log = os.open(copy / "output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        code = 1
        try:
            code = _run(tests, told, quick=quick, worlds=worlds and not quick)
        finally:
            os._exit(code)
    hangs_at, child = time.monotonic() + _HANGS_S, psutil.Process(pid)
    while time.monotonic() < hangs_at and sum(child.cpu_times()[:2]) < _CPU_LIMIT_S:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "" if status == 0 else told.read_text() or "it cannot be imported"
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"no end within {_CPU_LIMIT_S} s"


def _run(tests: Sequence[str], told: Path, *, quick: bool, worlds: bool) -> int:
    """In the child: 0 = nothing was seen."""
    import pytest

    class Watch:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                told.write_text(report.nodeid)

    for batch, marked in ((tests[:1], "not slow"), (tests[1:], "not slow"), ([] if quick else tests, "slow")):
        ended = batch and pytest.main(["-x", "-m", marked, "-p", "no:cacheprovider", *batch], plugins=[Watch()])
        if ended not in ([], pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return 1
    if not worlds:
        return 0
    logging.disable(logging.CRITICAL)
    from roll_async.simulator.scenario import random_killed_scenario, random_scenario
    from roll_async.simulator.world import simulate

    makers = [(random_scenario, _WORLDS), (random_killed_scenario, _KILLED_WORLDS)]
    for make, count in makers:
        for seed in range(count):
            told.write_text(f"{make.__name__}({seed})")
            if findings := simulate(make(seed)).findings:
                told.write_text(f"{make.__name__}({seed}): {findings[0][:60]}")
                return 1
    return 0


def seen_by(mutant: Mutant, copy: Path, *, quick: bool = False) -> str:
    """The test or world that notices it; empty = none."""
    target, original = copy / "roll_async" / mutant.file, ROOT / "roll_async" / mutant.file
    target.write_text(mutant.source)
    try:
        return _in_a_child(copy, tests_of(mutant.file), quick=quick, worlds=mutant.file.startswith(_SIMULATED))
    finally:
        shutil.copy2(original, target)  # with its time, so what was compiled of it is valid again


def check_green(tests: Sequence[str], copy: Path, *, quick: bool) -> None:
    """Raises RuntimeError when one of them fails without a fault: it would seem to see every one."""
    if found := _in_a_child(copy, tests, quick=quick, worlds=False):
        said = (copy / "output").read_text()[-4000:]
        raise RuntimeError(f"{found} fails without a fault:\n{said}")


def table(logs: Sequence[Path]) -> str:
    """Markdown of what runs found."""
    rows = {row["name"]: row for log in logs for row in map(json.loads, log.read_text().splitlines())}
    kinds: Counter[tuple[str, bool]] = Counter()
    for row in rows.values():
        kinds[row["file"].partition("/")[0], bool(row["seen_by"])] += 1
    lines = ["| folder | faults | seen | survived |", "|---|---|---|---|"]
    for folder in sorted({folder for folder, _ in kinds}):
        seen, left = kinds[folder, True], kinds[folder, False]
        lines.append(f"| {folder} | {seen + left} | {seen} | {left} |")
    lines += ["", "| fault | file | seen by |", "|---|---|---|"]
    for name, row in rows.items():
        # Without the line, which says nothing as soon as the file has changed: the text of a drawn one finds it.
        what = row["kind"] if row["named"] else f"{row['kind']}: `{row['text'].replace('|', chr(92) + '|')}`"
        found = f"`{row['seen_by']}`" if row["seen_by"] else f"nothing: {EQUIVALENT.get(name, 'TO DO')}"
        lines.append(f"| {what} | `{row['file']}` | {found} |")
    return "\n".join(lines)


def _copied(folder: Path) -> Path:
    for name in ("roll_async", "tests", "configs", "examples", "tools", "docs_roll"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="", help="part of the fault's name")
    parser.add_argument("--files", default="", help="how the paths of the faults' files begin, such as agents/")
    parser.add_argument("--quick", action="store_true", help="without slow tests and worlds")
    parser.add_argument("--sample", type=int, default=100, help="of the faults without a name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="1/1", help="I/N: every N-th fault, from the I-th")
    parser.add_argument("--log", type=Path, help="JSON lines are appended here, and what is in it is not run again")
    parser.add_argument("--table", type=Path, nargs="+", help="logs to a Markdown table")
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
        return 0
    part, parts = map(int, options.part.split("/"))
    chosen = [m for m in catalogue(options.sample, options.seed, options.files) if options.only in m.name][
        part - 1 :: parts
    ]
    if options.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    known = options.log.read_text().splitlines() if options.log and options.log.is_file() else []
    done = {json.loads(line)["name"] for line in known}
    names = {name for name, *_ in NAMED}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for library in _LIBRARIES:
        importlib.import_module(library)
    import torch

    torch.set_num_threads(1)
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = _copied(Path(folder))
        left = [m for m in chosen if m.name not in done]
        check_green(list(dict.fromkeys(test for m in left for test in tests_of(m.file))), copy, quick=options.quick)
        for mutant in left:
            started = time.monotonic()
            found = seen_by(mutant, copy, quick=options.quick)
            survivors += [] if found or mutant.name in EQUIVALENT else [mutant.name]
            row = {"name": mutant.name, "file": mutant.file, "line": mutant.line, "kind": mutant.kind,
                   "text": mutant.text, "named": mutant.kind in names, "seen_by": found,
                   "seconds": round(time.monotonic() - started, 1)}  # fmt: skip
            print(json.dumps(row), flush=True)
            if options.log is not None:
                with options.log.open("a") as log:
                    log.write(json.dumps(row) + "\n")
    print(json.dumps({"mutants": len(chosen), "survivors": survivors}))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
