"""What an assertion says of values, evaluated outside the sandbox: literals, arithmetic, comparisons and a few
functions. Nothing else is understood, so that neither a test nor a value of a program can make it do more.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache

OUTSIDE_CALLS: dict[str, Callable[..., object]] = {
    "abs": abs, "bool": bool, "float": float, "int": int, "round": round, "math.isclose": math.isclose,
    "math.fabs": math.fabs,
}  # fmt: skip
"""Functions of what is partly the program's."""
_CONSTANT_CALLS: dict[str, Callable[..., object]] = {
    "dict": dict, "frozenset": frozenset, "list": list, "range": range, "set": set, "sorted": sorted, "tuple": tuple,
    "math.sqrt": math.sqrt,
}  # fmt: skip
_CALLS = {**OUTSIDE_CALLS, **_CONSTANT_CALLS}
_NAMES = {"math.pi": math.pi, "math.e": math.e, "math.inf": math.inf, "math.nan": math.nan, "math.tau": math.tau}
_BINARY: dict[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[..., object]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_MAX_BASE, _MAX_EXPONENT, _MAX_ITEMS = 10**18, 100_000, 10_000_000


def is_checkable(check: str, num_values: int) -> bool:
    """Whether `holds` understands it, with values v0 to v(num_values - 1)."""
    names = {f"v{number}" for number in range(num_values)}
    try:
        return _understood(ast.parse(check, mode="eval").body, names)
    except (SyntaxError, ValueError, RecursionError):
        return False


def constant(source: str) -> object:
    """The value of an expression without values of the program. Raises ValueError for one that is not understood."""
    try:
        return _value(_parsed(source), {})
    except (SyntaxError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not understood: {source[:80]}") from error


def holds(check: str, values: Sequence[object]) -> bool:
    """The truth of a checkable expression for these values. Raises TypeError, ValueError, ArithmeticError or
    RecursionError as the assertion would, for values that it does not fit.

    >>> holds("abs(v0 - 1.5) < 1e-06", [1.5])
    True
    """
    return bool(_value(_parsed(check), {f"v{number}": value for number, value in enumerate(values)}))


@lru_cache(maxsize=4096)
def _parsed(check: str) -> ast.expr:
    return ast.parse(check, mode="eval").body


def _understood(node: ast.expr, names: set[str]) -> bool:
    match node:
        case ast.Constant():
            return True
        case ast.Name(name):
            return name in names
        case ast.Attribute():
            return ast.unparse(node) in _NAMES
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements) | ast.BoolOp(ast.And(), elements):
            return all(_understood(element, names) for element in elements)
        case ast.Dict(keys, elements):
            return all(key is not None and _understood(key, names) for key in [*keys, *elements])
        case ast.UnaryOp(operation, operand):
            return type(operation) in _UNARY and _understood(operand, names)
        case ast.BinOp(left, operation, right):
            return type(operation) in _BINARY and _understood(left, names) and _understood(right, names)
        case ast.Compare(left, operations, others):
            operands = [left, *others]
            known = all(type(operation) in _COMPARE for operation in operations)
            # Values outside are copies: `is` says something only of None, True and False.
            identity = any(isinstance(operation, ast.Is | ast.IsNot) for operation in operations)
            if identity and any(
                not isinstance(operand, ast.Name) and not _is_singleton(operand) for operand in operands
            ):
                return False
            return known and all(_understood(operand, names) for operand in operands)
        case ast.Call(function, arguments, keywords):
            understood = all(_understood(value, names) for value in [*arguments, *(k.value for k in keywords)])
            return ast.unparse(function) in _CALLS and understood and all(k.arg is not None for k in keywords)
    return False


def _is_singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _value(node: ast.expr, names: dict[str, object]) -> object:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return names[name]
        case ast.Attribute():
            return _NAMES[ast.unparse(node)]
        case ast.List(elements):
            return [_value(element, names) for element in elements]
        case ast.Tuple(elements):
            return tuple(_value(element, names) for element in elements)
        case ast.Set(elements):
            return {_value(element, names) for element in elements}
        case ast.Dict(keys, elements):
            pairs = zip(keys, elements, strict=True)
            return {_value(key, names): _value(element, names) for key, element in pairs if key is not None}
        case ast.BoolOp(_, elements):
            return all(_value(element, names) for element in elements)
        case ast.UnaryOp(operation, operand):
            return _UNARY[type(operation)](_value(operand, names))
        case ast.BinOp(left, operation, right):
            return _arithmetic(operation, _value(left, names), _value(right, names))
        case ast.Compare(left, operations, others):
            return _compared(_value(left, names), operations, [_value(other, names) for other in others])
        case ast.Call(function, arguments, keywords):
            given = [_value(argument, names) for argument in arguments]
            named = {str(keyword.arg): _value(keyword.value, names) for keyword in keywords}
            return _CALLS[ast.unparse(function)](*given, **named)
    raise ValueError(f"not understood: {ast.unparse(node)[:80]}")


def _compared(left: object, operations: list[ast.cmpop], others: list[object]) -> bool:
    for operation, right in zip(operations, others, strict=True):
        if not _COMPARE[type(operation)](left, right):
            return False
        left = right
    return True


def _arithmetic(operation: ast.operator, left: object, right: object) -> object:
    """Nothing that grows without bound."""
    if isinstance(operation, ast.Pow) and (abs(left) > _MAX_BASE or abs(right) > _MAX_EXPONENT):  # type: ignore[arg-type, operator]
        raise ValueError(f"{left} ** {right} is too large")
    if isinstance(operation, ast.Mult):
        for items, times in ((left, right), (right, left)):
            if isinstance(items, str | bytes | list | tuple) and len(items) * times > _MAX_ITEMS:  # type: ignore[operator]
                raise ValueError(f"{len(items)} items {times} times are too many")
    # "%1000000000d" % 1 would be a gigabyte.
    if isinstance(operation, ast.Mod) and isinstance(left, str | bytes):
        raise TypeError("text is not formatted here")
    return _BINARY[type(operation)](left, right)
