"""What a reader must hold at once, as figures of the package: `python -m tools.figures`."""

from __future__ import annotations

import argparse
import ast
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "roll_async"


@cache
def trees() -> Mapping[Path, ast.Module]:
    """Every file of the package, parsed."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def figures() -> dict[str, float]:
    """By name. Lines are all lines of Python files; a comment is one at a line of code or above it."""
    sources = {path: path.read_text() for path in trees()}
    lines = sum(text.count("\n") for text in sources.values())
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    folders = Counter(path.parent for path in sources if path.name != "__init__.py")
    return {
        "lines": lines,
        "files": len(sources),
        "classes": len(classes),
        "dataclasses": sum(any("dataclass" in ast.unparse(d) for d in node.decorator_list) for node in classes),
        "protocols": sum(any(ast.unparse(base) == "Protocol" for base in node.bases) for node in classes),
        "functions per 1,000 lines": round(1000 * len(functions) / lines, 1),
        "comments per 1,000 lines": round(1000 * sum(map(_comments, sources)) / lines, 1),
        "class names with two meanings": sum(n > 1 for n in Counter(node.name for node in classes).values()),
        "circles of imports": len(circles()),
        "most files in a folder": max(folders.values()),
        "longest file": max(text.count("\n") for text in sources.values()),
    }


def _comments(path: Path) -> int:
    with path.open("rb") as source:
        found = [token for token in tokenize.tokenize(source.readline) if token.type == tokenize.COMMENT]
    return sum(not token.string.startswith(("# type:", "# noqa", "# fmt:", "# pyright:")) for token in found)


def circles() -> list[list[str]]:
    """Groups of files that import one another when they are loaded."""
    names = {_module(path): path for path in trees()}
    graph = {name: {found for found in _loads(trees()[path]) if found in names} for name, path in names.items()}
    return [sorted(group) for group in _strong_components(graph) if len(group) > 1]


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _loads(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported at the top of a file, other than for annotations."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _strong_components(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Nodes that reach one another (by two depth-first searches, Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: Mapping[str, set[str]], into: list[str]) -> None:
        stack = [(start, iter(sorted(edges[start])))]
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            following = next((n for n in rest if n not in seen), None)
            if following is None:
                into.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(edges[following]))))

    for name in sorted(graph):
        if name not in seen:
            visit(name, graph, order)
    back: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        back[name] |= set()
        for target in targets:
            back[target].add(name)
    seen.clear()
    found = []
    for name in reversed(order):
        if name not in seen:
            group: list[str] = []
            visit(name, back, group)
            found.append(set(group))
    return found


def main() -> int:
    """Print the figures, and the files that import one another."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, value in figures().items():
        print(f"{name:30} {value:>10,}")
    for group in circles():
        print("circle:", *group)
    return 0


if __name__ == "__main__":
    sys.exit(main())
