"""Assertions taken apart: the calls of the program run in the sandbox, the literals and what is done with both stay
outside. A program never sees what its values are compared with.

    assert abs(mean([1, 2]) - 1.5) < 1e-6    ->  calls ["mean([1, 2])"], check "abs(v0 - 1.5) < 1e-06"
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass

from roll_async.rewards.sandbox.checks import OUTSIDE_CALLS, constant, is_checkable

_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, slots=True)
class Assertion:
    """Expressions of the program's, as source, and what should hold of their values v0, v1, ..., as source."""

    calls: tuple[str, ...]
    check: str


def assertion_of(statement: str) -> Assertion | None:
    """`assert add(1, 2) == 3` -> calls ("add(1, 2)",), check "v0 == 3". None for any other statement, and where values
    of the program are compared with each other: it chooses both.
    """
    body = _body(statement)
    return _of_node(body[0], None) if body is not None and len(body) == 1 else None


def assertions_of_check(test: str, entry_point: str) -> list[Assertion] | None:
    """Those of HumanEval's `check(candidate)`, when it holds nothing else; None when it does. The candidate's name
    becomes the entry point's.
    """
    body = _body(test)
    found: list[Assertion] = []
    for node in body or []:
        if isinstance(node, ast.FunctionDef) and node.name == "check" and len(node.args.args) == 1:
            candidate = node.args.args[0].arg
            for statement in node.body:
                if isinstance(statement, ast.Pass) or _is_text(statement) or _is_true(statement):
                    continue
                assertion = _of_node(statement, candidate)
                if assertion is None:
                    return None
                calls = tuple(_renamed(call, candidate, entry_point) for call in assertion.calls)
                found.append(Assertion(calls, assertion.check))
        elif not (_is_text(node) or _is_metadata(node) or _calls_check(node)):
            return None
    return found or None


def candidate_of(test: str) -> str:
    """`Solution().add` of a test that ends in `check(Solution().add)`; empty for any other."""
    calls = [node.value for node in _body(test) or [] if isinstance(node, ast.Expr) and _calls_check(node)]
    arguments = calls[0].args if len(calls) == 1 and isinstance(calls[0], ast.Call) else []
    return ast.unparse(arguments[0]) if len(arguments) == 1 else ""


def _body(source: str) -> list[ast.stmt] | None:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return None


def _of_node(node: ast.stmt, function: str | None) -> Assertion | None:
    if not isinstance(node, ast.Assert):
        return None
    calls: list[str] = []
    try:
        test = node.test
        if _kind(test) == "call":  # any object is true or false, also one that cannot leave the sandbox
            test = ast.Call(func=ast.Name(id="bool", ctx=ast.Load()), args=[test], keywords=[])
            calls, check = [ast.unparse(test)], ast.Name(id="v0", ctx=ast.Load())
        else:
            check = _without_calls(test, calls)
        source = ast.unparse(check)
        names = {name for call in calls for name in _free_names(call)}
    except (_StaysInside, ValueError, RecursionError):
        return None
    if not calls or (function is not None and names != {function}) or not is_checkable(source, len(calls)):
        return None
    return Assertion(tuple(calls), source)


class _StaysInside(Exception):
    """The assertion cannot be checked outside."""


def _without_calls(node: ast.expr, calls: list[str]) -> ast.expr:
    """The expression with v0, v1, ... for the calls of the program, which are appended to `calls`."""
    match _kind(node):
        case "call":
            calls.append(ast.unparse(node))
            return ast.Name(id=f"v{len(calls) - 1}", ctx=ast.Load())
        case "constant":
            constant(ast.unparse(node))  # raises for what cannot be evaluated outside
            return node
    match node:
        case ast.Compare(left, ops, comparators):
            operands = [left, *comparators]
            if sum(_kind(operand) != "constant" for operand in operands) > 1:
                raise _StaysInside
            left, *rest = (_without_calls(operand, calls) for operand in operands)
            return ast.Compare(left, ops, rest)
        case ast.BoolOp(ast.And(), values):
            return ast.BoolOp(ast.And(), [_without_calls(_as_bool(value), calls) for value in values])
        case ast.UnaryOp(ast.Not(), operand):
            return ast.UnaryOp(ast.Not(), _without_calls(_as_bool(operand), calls))
        case ast.UnaryOp(operation, operand):
            return ast.UnaryOp(operation, _without_calls(operand, calls))
        case ast.BinOp(left, operation, right):
            return ast.BinOp(_without_calls(left, calls), operation, _without_calls(right, calls))
        case ast.Call(function, arguments, keywords):
            outside = [_without_calls(argument, calls) for argument in arguments]
            named = [ast.keyword(k.arg, _without_calls(k.value, calls)) for k in keywords]
            return ast.Call(function, outside, named)
    raise _StaysInside


def _as_bool(node: ast.expr) -> ast.expr:
    # Of an operand of `and` or `not` only its truth leaves the sandbox: the object may not be able to.
    if _kind(node) != "call":
        return node
    return ast.Call(func=ast.Name(id="bool", ctx=ast.Load()), args=[node], keywords=[])


def _kind(node: ast.expr) -> str:
    """call: a value of the program, alone or in a built-in (`sorted(f(x))`), or a part of it; constant: nothing of the
    program's in it; mixed: both, which are told apart outside.
    """
    if not _free_names(node) - {"math"}:
        return "constant"
    match node:
        case ast.Name():
            return "call"
        case ast.Subscript(value) | ast.Attribute(value):
            return _kind(value)
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            return "call" if all(_kind(element) == "call" for element in elements) else "mixed"
        case ast.ListComp(element, generators) if not any(generator.ifs for generator in generators):
            return _kind(element)
        case ast.Call(ast.Name(name), [argument, *rest], _) if name in _BUILTINS:
            if name in OUTSIDE_CALLS and (_kind(argument) != "call" or any(_kind(other) == "call" for other in rest)):
                return "mixed"
            if name in _SHAPES and (not rest or name == "round") and _kind(argument) == "call":
                return "call"
            raise _StaysInside  # all(f(i) == i for i in range(3)): the program would see what it is compared with
        case ast.Call(function):
            return "mixed" if ast.unparse(function) in OUTSIDE_CALLS else "call"
    return "mixed"


_SHAPES = frozenset(
    "abs bool dict float frozenset int len list max min next repr reversed round set sorted str sum tuple".split()
)
"""Built-ins whose value tells as much of the value of the program as that value itself."""


def _free_names(node: ast.expr | str) -> set[str]:
    """Names that are neither built in nor bound in the expression."""
    tree = ast.parse(node, mode="eval") if isinstance(node, str) else node
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - _BUILTINS
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names - bound - {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}


def _renamed(call: str, old: str, new: str) -> str:
    """`old` is the only name of the expression that is not built in."""
    tree = ast.parse(call, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == old:
            # unparse writes the id as it stands, also one that is an expression.
            node.id = f"({new})" if not new.isidentifier() else new
    return ast.unparse(tree)


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
