"""Test cases of a programming task, in the forms that public data sets have them (docs_roll/rewards.md lists them with
their names). They stand in the reference, or in the columns of the row that the data set uses.

A form that is not known raises ValueError with what was found: such a row is refused when it is loaded.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_async.rewards.sandbox.assertions import Assertion, assertion_of, assertions_of_check, candidate_of
from roll_async.rewards.sandbox.protocol import Kind

COLUMNS = (
    "test_cases", "tests", "input_output", "private_test_cases", "public_test_cases", "private_tests", "public_tests",
    "functional", "test_list", "test",
)  # fmt: skip
"""Columns that may hold the cases of a row without a reference; the first that does counts, private and public ones
together."""
_MAX_DECODED_BYTES = 256 << 20
_STDIO_TYPES = ("stdin", "stdin_stdout", "stdio", "standard_input")
_CALL_TYPES = ("functional", "function_call", "call_based")


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
    setup: str = ""
    """values and assert: statements between the program and its test."""
    assertions: list[Assertion] = field(default_factory=list)
    """values only."""

    @property
    def expressions(self) -> list[str]:
        """values only: what is evaluated behind the program."""
        return [call for assertion in self.assertions for call in assertion.calls]


def parse_cases(ground_truth: str, extra: Mapping[str, str]) -> list[Case]:
    """Raises ValueError naming what is not understood, and for a task without cases."""
    text = ground_truth.strip()
    columns = [name for name in COLUMNS if extra.get(name, "").strip() not in ("", "[]", "null", "{}")]
    if columns and (text in ("", "[]", "null", "{}") or columns[0] not in ("test_cases", "tests")):
        # A reference beside tests of its own columns is the program that solves the task (HumanEval, MBPP, APPS).
        parts = [columns[0], *(c for c in columns[1:] if c.startswith(("private_test", "public_test")))]
        parts = parts if columns[0].startswith(("private_test", "public_test")) else parts[:1]
        cases = [case for name in parts for case in _of_reference(extra[name].strip(), extra)]
    else:
        cases = _of_reference(text, extra)
    if not cases:
        raise ValueError("the reference holds no test cases")
    return cases


def _of_reference(text: str, extra: Mapping[str, str]) -> list[Case]:
    function = extra.get("fn_name") or extra.get("entry_point") or _func_name(extra.get("metadata", ""))
    found = _json(text)
    if found is _NO_JSON:
        return _of_text(text, extra)
    if isinstance(found, dict):
        return _of_object(found, function, extra)
    if isinstance(found, list):
        return [case for item in found for case in _of_item(item, function, extra)]
    raise ValueError(f"the reference {text[:80]!r} holds no test cases; see docs_roll/rewards.md for the forms")


_NO_JSON = object()


def _json(text: str) -> object:
    """The JSON of a reference, also when it was packed twice, or as LiveCodeBench packs its private cases."""
    if text[:1] in ("{", "[", '"'):
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the reference looks like JSON and is not: {error}") from error
        except ValueError as error:
            raise ValueError("the reference has an integer of over 4300 digits: compare it in an assert") from error
        return _json(found.strip()) if isinstance(found, str) else found
    if text.startswith("eJ"):  # base64 of a zlib stream
        try:
            # Bounded: a short text can hold gigabytes.
            data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MAX_DECODED_BYTES)
            found = _PlainPickle(io.BytesIO(data)).load()
        except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError, IndexError) as error:
            raise ValueError(f"the reference is packed and cannot be read: {error}") from error
        return _json(found.strip()) if isinstance(found, str) else found
    return _NO_JSON


class _PlainPickle(pickle.Unpickler):
    """Text, numbers, lists, dictionaries; a pickle that asks for a class could run anything."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _func_name(metadata: object) -> str:
    """LiveCodeBench: `metadata` of the row or of the case, {"func_name": "add"}."""
    if isinstance(metadata, str):
        found = _json(metadata.strip()) if metadata.strip()[:1] in ("{", '"') else None
    else:
        found = metadata
    return str(found.get("func_name") or "") if isinstance(found, dict) else ""


def _of_text(text: str, extra: Mapping[str, str]) -> list[Case]:
    if "def test_" in text:
        return [Case(kind="pytest", test=text)]
    if "def check(" in text:
        return [_check(text, extra.get("entry_point", ""))]
    setup = _setup(extra)
    lines = text.splitlines()
    if lines and all(line.startswith("assert ") or not line.strip() for line in lines):
        return [_assertion(line, setup) for line in lines if line.strip()]
    if "assert" in text:  # statements of several lines belong together
        return [_assertion(text.strip(), setup)]
    raise ValueError(f"the reference {text[:80]!r} holds no test cases; see docs_roll/rewards.md for the forms")


def _setup(extra: Mapping[str, str]) -> str:
    """MBPP: `test_setup_code`, or `test_imports`, a list."""
    imports = extra.get("test_imports", "").strip()
    lines = json.loads(imports) if imports.startswith("[") else [imports]
    return "\n".join([*map(str, lines), extra.get("test_setup_code", "")]).strip()


def _assertion(statement: str, setup: str) -> Case:
    found = assertion_of(statement)
    if found is None:
        return Case(kind="assert", test=statement, setup=setup)
    return Case(kind="values", assertions=[found], setup=setup)


def _check(test: str, entry_point: str) -> Case:
    """HumanEval's and LeetCode's `check(candidate)`, with the name of the candidate or a call of `check` behind it."""
    calls = any(line.startswith("check(") for line in test.splitlines())
    if not entry_point and not calls:
        raise ValueError("a test `def check(candidate)` needs entry_point in the row, or a call of check at its end")
    candidate = entry_point or candidate_of(test)
    if candidate:
        found = assertions_of_check(test, candidate)
        if found is not None:
            return Case(kind="values", assertions=found)
    return Case(kind="assert", test=test if calls else f"{test}\n\ncheck({entry_point})\n")


def _of_object(found: dict, function: str, extra: Mapping[str, str]) -> list[Case]:
    function = found.get("fn_name") or found.get("entry_point") or _func_name(found.get("metadata")) or function
    if "pytest" in found:
        return [Case(kind="pytest", test=str(found["pytest"]))]
    if "asserts" in found:
        return [_assertion(str(item), _setup(extra)) for item in found["asserts"]]
    if "functional" in found:
        return _of_text(str(found["functional"]), {**extra, "entry_point": function})
    if "test" in found:
        test = str(found["test"])
        return [_check(test, function)] if "def check(" in test else _of_text(test, extra)
    if "test_cases" in found:
        return [case for item in found["test_cases"] for case in _of_item(item, function, extra)]
    inputs, outputs = (found.get(f"{name}s", found.get(name)) for name in ("input", "output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        names = ", ".join(map(str, found)) or "nothing"
        raise ValueError(f"test cases need inputs and outputs, asserts, functional, test or pytest; found {names}")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    pairs = zip(inputs, outputs, strict=True)
    return [_call(function, i, o) if function else _stdio(i, o) for i, o in pairs]


def _of_item(item: object, function: str, extra: Mapping[str, str]) -> list[Case]:
    if isinstance(item, str):
        return _of_text(item, extra)
    if isinstance(item, dict) and "assert_code" in item:
        return _of_text(str(item["assert_code"]), extra)
    if isinstance(item, dict) and (isinstance(item.get("inputs"), list) or "functional" in item):
        return _of_object(item, function, extra)
    if not isinstance(item, dict) or "input" not in item or "output" not in item:
        raise ValueError(f"a test case must be text or an object with input and output, got {str(item)[:80]}")
    function = item.get("fn_name") or _func_name(item.get("metadata")) or function
    kind = item.get("testtype") or item.get("type") or ("functional" if function else "stdin")
    if kind in _CALL_TYPES:
        if not function:
            raise ValueError("a functional test case needs fn_name or metadata.func_name in the row")
        return [_call(function, item["input"], item["output"])]
    if kind not in _STDIO_TYPES:
        raise ValueError(f"test case type {kind!r} is not one of {' | '.join(_STDIO_TYPES + _CALL_TYPES)}")
    return [_stdio(item["input"], item["output"])]


def _stdio(given: object, expected: object) -> Case:
    return Case(kind="stdio", stdin=_lines(given), expected=_lines(expected))


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(function: str, given: object, expected: object) -> Case:
    """Arguments as a list (APPS, which wraps the expected value in a list of one), or as text with one JSON value per
    line (LiveCodeBench, PRIME); the expected value then is JSON, too.
    """
    if isinstance(given, list):
        return Case(kind="call", function=function, arguments=list(given), expected=expected)
    if not isinstance(given, str):
        return Case(kind="call", function=function, arguments=[given], expected=expected)
    try:
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"input {given[:60]!r} of {function} must be one JSON value per line: {error}") from error
    try:
        value = json.loads(expected) if isinstance(expected, str) else expected
    except json.JSONDecodeError:
        value = expected  # text without quotes
    return Case(kind="call", function=function, arguments=arguments, expected=value)
