"""The items of the documents this project started from: docs_roll/seeds.md says where each acts and which test sees it.

    python tools/seeds.py [--write] [PAGE]

Checks that every item is there once, and that every file, name, key and test of the page exists; prints the counts by
document and state; --write puts them at the top of the page. Exits 1 on any fault.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.config.loading.names import alias_table
from roll_async.config.schema import AgenticConfig, RLVRConfig
from roll_async.config.yaml.paths import keys

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs_roll" / "seeds.md"
DOCUMENTS = {
    "S0": ("Async DAPO with Interruption Mechanism", 105),
    "S1": ("Fully Asynchronous PPO Training System (Fully Async Policy)", 193),
    "S2": ("Recipe: Decoupled Clip and Dynamic Sampling Policy Optimization (DAPO)", 108),
    "S3": ("Guide to Asynchronous Training in ROLL", 134),
}
"""Prefix of the items: title, number of items."""
STATES = ("acts", "partly", "unseen", "no")
COUNTS_HEAD = "| document | items | " + " | ".join(STATES) + " |"
KEY = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One item of the page."""

    id: str
    state: str
    places: tuple[str, ...]
    """`path`, `path:name` or a config key."""
    tests: tuple[str, ...]
    """`path::test_name`"""
    reason: str
    """What stands beside the tests: why not, or why only in part."""

    @property
    def document(self) -> str:
        return self.id.partition(".")[0]


def rows_of(page: str) -> Iterator[Row]:
    """The rows of all tables, in the order of the page. A line that begins like a row and has other than five cells
    comes as a row without state.
    """
    for line in page.splitlines():
        if not re.match(r"\| S\d+\.\d+ ", line):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        number, _, state, where, seen = cells if len(cells) == 5 else (cells[0], "", "", "", "")
        named = re.findall(r"`([^`]*)`", seen)
        tests = tuple(name for name in named if "::" in name)
        reason = re.sub(r"`[^`]*::[^`]*`", "", seen).strip(" ,;")
        places = tuple(re.findall(r"`([^`]*)`", where))
        yield Row(id=number, state=state, places=places, tests=tests, reason=reason)


def faults(page: str, root: Path = ROOT) -> list[str]:
    """What is wrong with the page, one line each."""
    rows = list(rows_of(page))
    found = [f"{i}: {times} rows" for i, times in Counter(row.id for row in rows).items() if times > 1]
    there = {row.id for row in rows}
    wanted = {f"{prefix}.{n}" for prefix, (_, count) in DOCUMENTS.items() for n in range(1, count + 1)}
    found += [f"{i}: no row" for i in sorted(wanted - there)] + [f"{i}: no such item" for i in sorted(there - wanted)]
    for row in rows:
        found += [f"{row.id}: {fault}" for fault in _of_state(row)]
        found += [f"{row.id}: {fault}" for place in row.places if (fault := _of_place(place, root))]
        found += [f"{row.id}: {fault}" for test in row.tests if (fault := _of_test(test, root))]
    for path in re.findall(r"\]\(([^)#]+\.md)[^)]*\)", page):
        found += [] if (root / PAGE.parent.name / path).is_file() else [f"no page {path}"]
    if counts_on(page) != counts(rows):
        found.append("the counts are not those of the rows: python tools/seeds.py --write")
    return found


def _of_state(row: Row) -> Iterator[str]:
    if row.state not in STATES:
        yield f"'{row.state}' is none of {', '.join(STATES)}, or the row has not five cells"
    if row.state in ("acts", "partly", "unseen") and not row.places:
        yield f"{row.state}, and no place is named"
    if row.state == "acts" and not row.tests:
        yield "acts, and no test is named that sees it"
    if row.state == "unseen" and row.tests:
        yield "unseen, and a test is named"
    if row.state in ("partly", "unseen", "no") and not row.reason:
        yield f"{row.state}, and no reason is given"


def _of_place(place: str, root: Path) -> str:
    """The fault of `path`, `path:name` or a key; empty if there is none."""
    path, colon, name = place.partition(":")
    file = root / path
    if not file.exists():
        is_key = KEY.fullmatch(place)
        return "" if is_key and place in _keys() else f"{'no key' if is_key else 'no file'} {place}"
    if not colon:
        return ""
    text = file.read_text()
    if file.suffix == ".py" and re.fullmatch(r"\w+\.\w+", name):
        return "" if name in _qualified(text) else f"{path} defines no {name}"
    if file.suffix == ".py" and name.isidentifier():
        return "" if re.search(rf"\b{name}\b", text) else f"{path} does not have {name}"
    return "" if name in text else f"{path} does not have {name}"


def _of_test(test: str, root: Path) -> str:
    path, _, name = test.partition("::")
    if not (root / path).is_file():
        return f"no file {path}"
    functions = {name for name in _qualified((root / path).read_text()) if name.startswith("test_")}
    return "" if name in functions else f"{path} has no {name}"


@cache
def _keys() -> frozenset[str]:
    """Every key of both kinds of configs, and every other name that is taken for one."""
    both = {*keys(RLVRConfig), *keys(AgenticConfig)}
    return frozenset(both | alias_table("rlvr").keys() | alias_table("agentic").keys())


@cache
def _qualified(source: str) -> frozenset[str]:
    """Functions and classes at the top, methods and fields as `Class.name`."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(f"{node.name}.{inner.name}")
            elif isinstance(inner, ast.AnnAssign | ast.Assign):
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                names |= {f"{node.name}.{target.id}" for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def counts(rows: list[Row]) -> list[str]:
    """The table at the top of the page."""
    lines = [COUNTS_HEAD, "|---" * (2 + len(STATES)) + "|"]
    for prefix, (title, _) in DOCUMENTS.items():
        states = Counter(row.state for row in rows if row.document == prefix)
        lines.append(f"| {prefix}: {title} | {states.total()} | {' | '.join(str(states[s]) for s in STATES)} |")
    states = Counter(row.state for row in rows)
    lines.append(f"| all | {states.total()} | {' | '.join(str(states[s]) for s in STATES)} |")
    return lines


def counts_on(page: str) -> list[str]:
    """The table as the page has it."""
    lines = page.splitlines()
    first = lines.index(COUNTS_HEAD) if COUNTS_HEAD in lines else len(lines)
    return lines[first : first + len(DOCUMENTS) + 3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="the counts into the page")
    parser.add_argument("page", nargs="?", type=Path, default=PAGE)
    args = parser.parse_args()
    page = args.page.read_text()
    table = counts(list(rows_of(page)))
    if args.write:
        page = page.replace("\n".join(counts_on(page)), "\n".join(table))
        args.page.write_text(page)
    print("\n".join(table))
    wrong = faults(page)
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
