"""The task of three peers: a product, and a calculator as a tool. Nothing here but the standard library."""

import ast
import operator
import random

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def question(seed):
    """The same seed, the same expression."""
    rng = random.Random(seed)
    return f"{rng.randint(10, 99)}*{rng.randint(10, 99)}+{rng.randint(10, 99)}"


def answer(expression):
    """What the tool says, an error included."""
    try:
        return str(_value(ast.parse(str(expression)[:200], mode="eval").body))
    except (ValueError, SyntaxError, RecursionError) as error:
        return f"error: {type(error).__name__}"


def _value(node):
    match node:
        case ast.Constant(value=int() as number) if abs(number) < 10**9:
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only small integers, + - *")


def result(expression, said, calls):
    """Right is worth 1, a call 0.2: a model that has hardly learned anything differs within a group."""
    right = (said or "").strip() == answer(expression)
    return {"reward": float(right) + 0.2 * (calls > 0), "solved": right, "metrics": {"calls": calls}}
