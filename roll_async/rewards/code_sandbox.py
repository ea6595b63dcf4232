"""Generated programs, run against test cases in a sandbox."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping

from roll_async.rewards.answers import after_thinking
from roll_async.rewards.sandbox.cases import Case, parse_cases
from roll_async.rewards.sandbox.checks import holds
from roll_async.rewards.sandbox.confine import missing
from roll_async.rewards.sandbox.local import LocalSandbox
from roll_async.rewards.sandbox.protocol import ProgramResult, ProgramRun, Runner
from roll_async.rewards.sandbox.remote import RemoteSandbox
from roll_async.rewards.sandbox.values import decode
from roll_async.rewards.verdict import Verdict

_LINE_END = re.compile(r"\r\n?|\n")
_FENCE = re.compile(r"([ \t]*)(`{3,}(?=[^`]*\Z)|~{3,}(?=[^~^]*\Z))[ \t]*(.*)")
_LANGUAGE = re.compile(r"\W*(python3?|py)(?![\w-])", re.IGNORECASE)
_TOLERANCE = 1e-6
_RESERVE = 0.9
"""Share of the sample's time used for cases: the verdict must come before the pool gives the sample up."""


class CodeSandbox:
    """Score = 1 iff every case passes (`scoring` all), or the share of cases that pass (fraction).

    The program is the last fenced block after the thinking, Python ones first; without one the format is wrong. A
    program that is too slow, too big or tries what is forbidden has failed its case; only a sandbox that cannot work is
    an outage. With `all` the first failed case ends the run. Cases for which no time is left count as failed.

    Metrics: `passed`, the share of cases that passed among those that ran, and `cases`, how many there are.
    """

    def __init__(
        self,
        *,
        memory_mb: int = 1024,
        case_timeout_s: float = 6.0,
        timeout_s: float = 30.0,
        scoring: str = "all",
        isolation: str = "required",
        api_url: str | None = None,
        prelude: bool = True,
    ) -> None:
        if scoring not in ("all", "fraction"):
            raise ValueError(f"scoring {scoring!r} is not one of all | fraction")
        self._memory_mb, self._case_timeout_s, self._stop_early = memory_mb, case_timeout_s, scoring == "all"
        self._timeout_s, self._prelude = _RESERVE * timeout_s, prelude
        self._runner = _runner(api_url, isolation)

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        ends_s = time.monotonic() + self._timeout_s
        cases = parse_cases(ground_truth, extra)
        code = program_of(text)
        if code is None:
            return Verdict(score=0.0, acc=0.0, format=0.0, reason="no fenced block of code", metrics=_counts(0, cases))
        passed, reason = 0.0, ""
        for number, case in enumerate(cases, 1):
            share, problem = self._run(case, code, ends_s)
            passed += share
            if problem:
                reason = reason or f"case {number} of {len(cases)}: {problem}"
                if self._stop_early:
                    break
        acc = float(not reason)
        fraction = passed / len(cases)
        return Verdict(
            score=acc if self._stop_early else fraction, acc=acc, reason=reason, metrics=_counts(fraction, cases)
        )

    def _run(self, case: Case, code: str, ends_s: float) -> tuple[float, str]:
        """(share passed, problem) of one case."""
        left_s = ends_s - time.monotonic()
        if left_s <= 0.05:
            return 0.0, "no time left"
        outcome = self._runner.run(
            ProgramRun(
                kind=case.kind,
                code=code,
                stdin=case.stdin,
                function=case.function,
                arguments=case.arguments,
                test=case.test,
                setup=case.setup,
                expressions=case.expressions,
                prelude=self._prelude,
                timeout_s=min(self._case_timeout_s, left_s),
                memory_mb=self._memory_mb,
            )
        )
        return judge(case, outcome)


def program_of(text: str) -> str | None:
    """The last fenced block marked as Python, else the last one without a mark, after the thinking; one that only the
    end of the text closes where there is no other.
    """
    found = {}
    for mark, code, closed in _blocks(after_thinking(text)):
        if code.strip() and (not mark or _LANGUAGE.match(mark)):
            found[closed, bool(mark)] = code
    return found[max(found)] if found else None


def _blocks(text: str) -> Iterator[tuple[str, str, bool]]:
    """(mark, code, whether it is closed before the end) of each fenced block, by the rules of CommonMark, but for
    fences at any depth, as in a list, and tildes, which open one only with Python behind them: else they underline.
    """
    opened, lines, indent = None, [], None
    for line in _LINE_END.split(text):
        fence = _FENCE.fullmatch(line)
        if opened is None:
            opened = fence if fence and (fence[2][0] == "`" or _LANGUAGE.match(fence[3])) else None
            lines, indent = [], None
        elif fence and not fence[3] and fence[2].startswith(opened[2]) and len(fence[1]) <= len(opened[1]) + 8:
            yield opened[3].strip(), "".join(lines), True
            opened = None
        else:
            # The fence's own as far as the code begins with it; what has less keeps nothing of it.
            if indent is None and line.strip():
                indent = os.path.commonprefix((opened[1], line))
            lines.append(line[len(os.path.commonprefix((indent or "", line))) :] + "\n")
    if opened is not None:
        yield opened[3].strip(), "".join(lines), False


def judge(case: Case, outcome: ProgramResult) -> tuple[float, str]:
    """(share passed, problem). The comparison happens here, outside the sandbox."""
    if case.kind == "pytest":
        return _pytest_share(outcome)
    if outcome.problem:
        return 0.0, outcome.problem
    if case.kind == "stdio":
        assert isinstance(case.expected, str)
        same = same_output(outcome.stdout, case.expected)
        return float(same), "" if same else f"wrote {_short(outcome.stdout)}, expected {_short(case.expected)}"
    if outcome.result is None:
        return 0.0, "it ended before the test did"
    if case.kind == "assert":
        return 1.0, ""
    if case.kind == "values":
        return _check_values(case, outcome.result.get("values"))
    value = outcome.result.get("value")
    # APPS wraps the expected value of a call in a list of one.
    wrapped = isinstance(case.expected, list) and len(case.expected) == 1 and same_value(value, case.expected[0])
    same = same_value(value, case.expected) or wrapped
    return float(same), "" if same else f"returned {_short(value)}, expected {_short(case.expected)}"


def _check_values(case: Case, values: object) -> tuple[float, str]:
    """What the assertions say, of values that hold no code of the program."""
    if not isinstance(values, list) or len(values) != len(case.expressions):
        return 0.0, "it ended before the test did"
    left = iter(values)
    for assertion in case.assertions:
        encoded = [next(left) for _ in assertion.calls]
        calls = ", ".join(assertion.calls)[:60]
        try:
            decoded = [decode(value) for value in encoded]
            if not holds(assertion.check, decoded):
                shown = ", ".join(map(_short, decoded))
                return 0.0, f"AssertionError: v0 = {calls} is {shown[:60]}, expected {assertion.check[:60]}"
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            return 0.0, f"{type(error).__name__}: {calls}: {str(error)[:100]}"
    return 1.0, ""


def same_output(written: str, expected: str) -> bool:
    """Equal line by line without white space at the ends; numbers with a decimal point within 1e-6."""
    lines, wanted = _stripped(written), _stripped(expected)
    if lines == wanted:
        return True
    return len(lines) == len(wanted) and all(_same_line(a, b) for a, b in zip(lines, wanted, strict=True))


def same_value(value: object, expected: object) -> bool:
    """Equal JSON values; floats within 1e-6, relative or absolute; true is not 1."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        # As floats, 2**53 + 1 would be 2**53, and 10**400 an error.
        exact = isinstance(value, int) and isinstance(expected, int)
        return value == expected if exact else _close(value, expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(same_value(a, b) for a, b in zip(value, expected, strict=True))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same_value(value[k], expected[k]) for k in value)
    return type(value) is type(expected) and value == expected


def _pytest_share(outcome: ProgramResult) -> tuple[float, str]:
    result = outcome.result or {}
    passed, total = result.get("passed"), result.get("total")
    if outcome.problem or not isinstance(passed, int) or not isinstance(total, int):
        return 0.0, outcome.problem or "it ended before the tests did"
    if not total:
        return 0.0, "no test was collected"
    return passed / total, "" if passed == total else f"{passed} of {total} tests passed"


def _same_line(line: str, expected: str) -> bool:
    words, wanted = line.split(), expected.split()
    return len(words) == len(wanted) and all(
        a == b or ("." in b and _same_number(a, b)) for a, b in zip(words, wanted, strict=True)
    )


def _same_number(word: str, expected: str) -> bool:
    try:
        return _close(float(word), float(expected))
    except ValueError:
        return False


def _close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _short(value: object) -> str:
    return repr(value)[:60]


def _counts(fraction: float, cases: list[Case]) -> dict[str, float]:
    return {"passed": fraction, "cases": float(len(cases))}


def _runner(api_url: str | None, isolation: str) -> Runner:
    if api_url is not None:
        return RemoteSandbox(api_url)
    problem = missing()
    if isolation == "required" and problem:
        raise ValueError(
            f"generated code cannot be contained here: {problem}; give sandbox.api_url, or accept weaker isolation "
            "with sandbox.isolation: best_effort (docs_roll/rewards.md)"
        )
    return LocalSandbox()
