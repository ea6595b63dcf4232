"""Test cases of a programming task, in the forms that public data sets have them.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                    APPS, TACO, CodeContests: standard input and output
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}         the same, by calling a function
    [{"input": "1 2", "output": "3"}, ...]                         LiveCodeBench; with "testtype": "functional" a call
    ["assert add(1, 2) == 3", ...]                                 MBPP; also as plain text, one per line
    {"test": "def check(f): ...", "entry_point": "add"}            HumanEval
    {"pytest": "from solution import add\\ndef test_add(): ..."}   a test file; also as plain text with `def test_`
    [{"assert_code": "..."}]                                       ROLL: statements or a test file

`extra` may hold "fn_name" (or "entry_point") when the reference does not, and "test_cases" (ROLL's column) when the
reference is empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_async.rewards.sandbox.protocol import Kind

_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One program run and what it should bring."""

    kind: Kind
    stdin: str = ""
    expected: object = None
    """stdio: text; call: a JSON value; else unused."""
    function: str = ""
    arguments: list[object] = field(default_factory=list)
    test: str = ""


def parse_cases(ground_truth: str, extra: Mapping[str, str]) -> list[Case]:
    """Raises ValueError naming what is not understood, and for a task without cases."""
    text = ground_truth.strip()
    if text in ("", "[]", "null"):
        text = extra.get("test_cases", text).strip()
    found: object = _MISSING
    if text[:1] in ("{", "["):
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the reference looks like JSON and is not: {error}") from error
    function = extra.get("fn_name") or extra.get("entry_point") or ""
    if found is _MISSING:
        cases = _of_text(text)
    elif isinstance(found, dict):
        cases = _of_object(found, function)
    else:
        assert isinstance(found, list)
        cases = [case for item in found for case in _of_item(item, function)]
    if not cases:
        raise ValueError("the reference holds no test cases")
    return cases


def _of_text(text: str) -> list[Case]:
    if "def test_" in text:
        return [Case(kind="pytest", test=text)]
    lines = text.splitlines()
    if lines and all(line.startswith("assert ") or not line.strip() for line in lines):
        return [Case(kind="assert", test=line) for line in lines if line.strip()]
    if "assert" in text:  # statements of several lines belong together
        return [Case(kind="assert", test=text)]
    raise ValueError(f"the reference {text[:80]!r} holds no test cases; see docs_roll/rewards.md for the forms")


def _of_object(found: dict, function: str) -> list[Case]:
    if "pytest" in found:
        return [Case(kind="pytest", test=str(found["pytest"]))]
    if "asserts" in found:
        return [Case(kind="assert", test=str(item)) for item in found["asserts"]]
    if "test" in found:
        name = found.get("entry_point", function)
        return [Case(kind="assert", test=f"{found['test']}\n\ncheck({name})\n" if name else str(found["test"]))]
    if "inputs" not in found or "outputs" not in found:
        raise ValueError(f"test cases need inputs and outputs, asserts, test or pytest; found {', '.join(found)}")
    inputs, outputs, function = found["inputs"], found["outputs"], found.get("fn_name") or function
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    pairs = zip(inputs, outputs, strict=True)
    return [_call(function, i, o) if function else _stdio(i, o) for i, o in pairs]


def _of_item(item: object, function: str) -> list[Case]:
    if isinstance(item, str):
        return _of_text(item)
    if isinstance(item, dict) and "assert_code" in item:
        return _of_text(str(item["assert_code"]))
    if isinstance(item, dict) and isinstance(item.get("inputs"), list):
        return _of_object(item, function)
    if not isinstance(item, dict) or "input" not in item or "output" not in item:
        raise ValueError(f"a test case must be text or an object with input and output, got {str(item)[:80]}")
    if item.get("testtype", "functional" if function else "stdin") == "functional":
        if not function:
            raise ValueError("a functional test case needs fn_name in the row")
        # LiveCodeBench writes one JSON value per line and argument.
        arguments = [json.loads(line) for line in str(item["input"]).splitlines() if line.strip()]
        expected = json.loads(item["output"]) if isinstance(item["output"], str) else item["output"]
        return [Case(kind="call", function=function, arguments=arguments, expected=expected)]
    return [_stdio(item["input"], item["output"])]


def _stdio(given: object, expected: object) -> Case:
    return Case(kind="stdio", stdin=_lines(given), expected=_lines(expected))


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(function: str, given: object, expected: object) -> Case:
    arguments = given if isinstance(given, list) else [given]
    # APPS wraps each expected value of a call in a list of one.
    return Case(kind="call", function=function, arguments=list(arguments), expected=expected)
