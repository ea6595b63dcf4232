"""Tests of the form `assert f(args) == literal`, taken apart: the expression runs in the sandbox, the literal stays
outside. A program never sees what it is compared with.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass

_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, slots=True)
class Comparison:
    """An expression of the program's, as source, and the value it should have."""

    expression: str
    expected: object


def comparison_of(statement: str, function: str | None = None) -> Comparison | None:
    """`assert add(1, 2) == 3` -> ("add(1, 2)", 3). None for any other statement. With `function` the call may be made
    through that name only.
    """
    try:
        body = ast.parse(statement).body
    except (SyntaxError, ValueError, RecursionError):
        return None
    return _of_node(body[0], function) if len(body) == 1 else None


def comparisons_of_check(test: str, entry_point: str) -> list[Comparison] | None:
    """Those of HumanEval's `check(candidate)`, when it holds nothing else; None when it does. The candidate's name
    becomes the entry point's.
    """
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError):
        return None
    found: list[Comparison] = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "check" and len(node.args.args) == 1:
            candidate = node.args.args[0].arg
            for statement in node.body:
                if isinstance(statement, ast.Pass) or _is_text(statement):
                    continue
                comparison = _of_node(statement, candidate)
                if comparison is None:
                    if not _is_true(statement):
                        return None
                    continue
                found.append(_renamed(comparison, candidate, entry_point))
        elif not (_is_text(node) or _is_metadata(node) or _calls_check(node)):
            return None
    return found or None


def _of_node(node: ast.stmt, function: str | None) -> Comparison | None:
    if not isinstance(node, ast.Assert) or not isinstance(node.test, ast.Compare):
        return None
    compare = node.test
    if len(compare.ops) != 1 or not isinstance(compare.ops[0], ast.Eq | ast.Is):
        return None
    for call, literal in ((compare.left, compare.comparators[0]), (compare.comparators[0], compare.left)):
        if not isinstance(call, ast.Call):
            continue
        try:
            expected = ast.literal_eval(literal)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(compare.ops[0], ast.Is) and expected not in (True, False, None):
            continue
        names = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)} - _BUILTINS
        if function is not None and names != {function}:
            return None
        return Comparison(ast.unparse(call), expected)
    return None


def _renamed(comparison: Comparison, old: str, new: str) -> Comparison:
    """`old` is the only name of the expression that is not built in."""
    tree = ast.parse(comparison.expression, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = f"({new})" if not new.isidentifier() else new
    return Comparison(ast.unparse(tree), comparison.expected)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_true(node: ast.stmt) -> bool:
    """HumanEval has `assert True, "..."` in many tests."""
    return isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and bool(node.test.value)


def _is_metadata(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) and t.id == "METADATA" for t in node.targets)


def _calls_check(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
