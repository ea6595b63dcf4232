"""Arithmetic that a model wrote, computed without evaluating code: numbers, + - * / // % **, parentheses."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

_MAX_LENGTH = 500
_MAX_BITS = 4096
_MAX_EXPONENT = 512
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


def compute(text: str) -> tuple[Fraction, list[Fraction]]:
    """(value, the numbers as written, in order). Exact. Raises ValueError saying what is wrong."""
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"longer than {_MAX_LENGTH} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    # ValueError: a null byte. MemoryError and RecursionError: brackets nested too deep.
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{text.strip()[:80]!r} is not an arithmetic expression") from None
    numbers: list[Fraction] = []
    try:
        return _value(tree.body, numbers), numbers
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def shown(value: Fraction) -> str:
    """As an integer where it is one, else with at most 10 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.10g}"
    except OverflowError:  # over 1.8e308
        return f"{value.numerator // value.denominator}"


def _value(node: ast.expr, numbers: list[Fraction]) -> Fraction:
    match node:
        # In Python True is an int.
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            # By its digits: Fraction(0.1) is the nearest binary number, not 1/10.
            found = Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
            numbers.append(found)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            found = -_value(inner, numbers)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            found = _value(inner, numbers)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            found = _power(_value(left, numbers), _value(right, numbers))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            found = _OPERATORS[type(op)](_value(left, numbers), _value(right, numbers))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
    if max(found.numerator.bit_length(), found.denominator.bit_length()) > _MAX_BITS:
        raise ValueError("the number is too large")
    return found


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _MAX_EXPONENT:
        raise ValueError(f"exponents are integers up to {_MAX_EXPONENT}")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    # Before it is computed: 9**9**9 alone would take all memory.
    if bits * abs(exponent.numerator) > _MAX_BITS:
        raise ValueError("the number is too large")
    return base ** int(exponent)
