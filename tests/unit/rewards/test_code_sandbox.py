"""Generated programs in the real sandbox: forms of test cases and verdicts. Escapes: tests/cluster."""

# ruff: noqa: E501 - one row form per line

import asyncio
import base64
import json
import pickle
import re
import subprocess
import sys
import time
import zlib

import pytest

from roll_async.config.schema_rollout import RewardConfig, SandboxConfig
from roll_async.rewards.code_sandbox import CodeSandbox, program_of, same_output, same_value
from roll_async.rewards.sandbox.cases import parse_cases
from roll_async.rewards.sandbox.confine import missing
from roll_async.rewards.sandbox.prelude import with_prelude
from roll_async.rewards.sandbox.protocol import ProgramRun
from roll_async.rewards.sandbox.remote import RemoteSandbox
from roll_async.rewards.serving.router import RewardRouter
from roll_async.schema import RewardStatus
from tests.patience import patient

ADD = "def add(a, b):\n    return a + b"
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return (a, b)"
SUM = "a, b = map(int, input().split())\nprint(a + b)"


def fenced(code):
    return f"Here:\n```python\n{code}\n```\nDone."


@pytest.fixture(scope="module")
def sandbox():
    reward = CodeSandbox(case_timeout_s=30, timeout_s=120, isolation="best_effort")  # a busy machine is no verdict
    yield reward
    reward._runner.close()


@pytest.mark.parametrize(
    ("code", "truth", "extra"),
    [
        (SUM, {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}, {}),
        (SUM, [{"input": "1 2", "output": "3", "testtype": "stdin"}], {}),
        (ADD, {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, {}),
        (SOLUTION, [{"input": "1\n[2]", "output": "[1,[2]]"}], {"fn_name": "add"}),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 2"], {}),
        (ADD, "assert add(1, 2) == 3\nassert add(0, 0) == 0", {}),
        (ADD, {"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"}, {}),
        ("print('main')\nif __name__ == '__main__':\n    raise SystemExit(3)\n" + ADD, ["assert add(1, 2) == 3"], {}),
        ("import threading\nthreading.Thread(target=lambda: print(3)).start()", {"inputs": [""], "outputs": ["3"]}, {}),
        (ADD, "[]", {"test_cases": json.dumps([{"assert_code": "\nassert add(1, 2) == 3\n"}])}),
        ("import sys\nprint(3)\nsys.exit()", {"inputs": [""], "outputs": ["3"]}, {}),
    ],
)  # fmt: skip
def test_a_right_program_passes_in_every_form_of_case(sandbox, code, truth, extra):
    verdict = sandbox(fenced(code), truth if isinstance(truth, str) else json.dumps(truth), extra)
    assert (verdict.score, verdict.acc, verdict.format, verdict.reason) == (1, 1, 1, "")
    assert verdict.metrics["passed"] == 1 and verdict.metrics["cases"] >= 1


CHECK = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3, 'x'\n    assert True\n"
LOOP = CHECK + "    for i in range(3):\n        assert candidate(i, i) == 2 * i\n"
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps([{"input": "1\n2", "output": "3"}])))).decode()
MEAN = "def mean(xs): return sum(xs) / len(xs)"
TYPED = "def add(a: List[int], b: int) -> int:\n    return deque([sum(a) + b])[0]"
FORMS = {
    "LiveCodeBench, metadata of the row": (ADD, "", {"public_test_cases": '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]', "private_test_cases": '[{"input": "5\\n2", "output": "7", "testtype": "functional"}]', "metadata": '{"func_name": "add"}'}, 2),
    "LiveCodeBench, packed": (ADD, "", {"private_test_cases": PACKED, "metadata": '{"func_name": "add"}'}, 1),
    "DeepCoder, metadata of the case": (ADD, [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}], {}, 1),
    "PRIME, JSON lines": (ADD, {"inputs": ["1\n2", "2\n2"], "outputs": ["3", "4"], "fn_name": "add"}, {}, 2),
    "SYNTHETIC-1": (ADD, {"language": "python", "test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]}, {}, 1),
    "SYNTHETIC-1 stdio": (SUM, [{"type": "stdin_stdout", "input": "1 2", "output": "3"}], {}, 1),
    "LeetCode": (ADD, {"functional": CHECK + "\n\ncheck(add)"}, {}, 1),
    "LeetCode, method": ("class Solution:\n" + ADD.replace("def add(", "  def add(self, ").replace("    ret", "   ret"), "", {"test": CHECK, "entry_point": "Solution().add"}, 1),
    "HumanEval columns": (ADD, "", {"test": CHECK, "entry_point": "add", "canonical_solution": "x"}, 1),
    "HumanEval columns beside a solution": (ADD, "    return a + b", {"test": LOOP, "entry_point": "add"}, 1),
    "MBPP columns": (ADD, "def add(a, b): ...", {"test_list": '["assert add(1, 2) == limit"]', "test_setup_code": "limit = 3"}, 1),
    "MBPP imports": (ADD, "", {"test_list": '["assert math.isclose(add(1, 2), 3)"]', "test_imports": '["import math"]'}, 1),
    "TACO column": (SUM, "", {"input_output": '{"inputs": ["1 2"], "outputs": ["3"]}'}, 1),
    "CodeContests": (SUM, "", {"public_tests": '{"input": ["1 2"], "output": ["3"]}', "private_tests": '{"input": ["2 2"], "output": ["4"]}'}, 2),
    "packed twice": (SUM, json.dumps('{"inputs": ["1 2"], "outputs": ["3"]}'), {}, 1),
    "types without import": (TYPED, ["assert add([1], 2) == 3"], {}, 1),
    "a future import": ("from __future__ import annotations\n" + TYPED, ["assert add([1], 2) == 3"], {}, 1),
    "tuples and sets": ("def f(): return (1, {2}, {3: 'x'}, 1.5, None, b'a')", ["assert f() == (1, {2}, {3: 'x'}, 1.5, None, b'a')"], {}, 1),
    "numbers of any length": ("def f(): return len(str(10 ** 5000)) + int('9' * 5000) % 2", ["assert f() == 5002"], {}, 1),
    "an integer of any length": ("def f(): return -10 ** 5000", ["assert f() == -10 ** 5000", "assert f() + 1 > f()"], {}, 2),
    "closeness": (MEAN, ["assert abs(mean([1, 2]) - 1.5) < 1e-6", "assert math.isclose(mean([1, 2]), 1.5, rel_tol=0.01)"], {}, 2),
    "HumanEval, closeness and truth": (MEAN, "", {"test": "def check(candidate):\n    assert abs(candidate([1, 2]) - 1.5) < 1e-6\n    assert candidate([1, 3]) and not candidate([0])\n    assert [candidate([n]) for n in (1, 2)] == [1, 2]", "entry_point": "mean"}, 1),
    "counters are dictionaries": ("def f(): return Counter('aab')", ["assert f() == {'a': 2, 'b': 1}"], {}, 1),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_public_data_sets_are_read_as_they_are(sandbox, form):
    code, truth, extra, num_cases = FORMS[form]
    truth = truth if isinstance(truth, str) else json.dumps(truth)
    verdict = sandbox(fenced(code), truth, extra)
    assert (verdict.score, verdict.reason, verdict.metrics["cases"]) == (1, "", num_cases)
    wrong = "print(0)\ndef add(*args): return 0\ndef f(): return [1]\nclass Solution:\n  def add(self, *a): return 0"
    assert sandbox(fenced(wrong), truth, extra).score == 0


ANY = "".join(f"\n def __{name}__(s, *o): return s" for name in ("sub", "abs", "lt", "ge"))
SPOOF = "class {kind}:\n __module__ = '{module}'\n def __str__(s): return '{text}'\ndef f(x): return {kind}()"


@pytest.mark.parametrize(
    ("code", "truth", "extra"),
    [
        ("class E:\n def __eq__(s, o): return True\ndef add(*a): return E()", ["assert add(1, 2) == 3"], {}),
        ("class E:\n def __eq__(s, o): return True\ndef add(*a): return E()", "", {"test": CHECK, "entry_point": "add"}),
        ("class E(int):\n def __eq__(s, o): return True\ndef add(*a): return E(4)", ["assert 3 == add(1, 2)"], {}),
        ("class E(list):\n def __eq__(s, o): return True\ndef add(*a): return E([4])", ["assert add(1) == [3]"], {}),
        ("x = 1", ["assert gcd(4, 6) == 2"], {}),
        ("x = 1", {"inputs": [[4, 6]], "outputs": [2], "fn_name": "gcd"}, {}),
        ("def add(a, b): return (3,)", ["assert add(1, 2) == [3]"], {}),
        ("x = 1", "from solution import gcd\ndef test_gcd():\n    assert gcd(4, 6) == 2", {}),
        (f"class E:{ANY}\ndef f(x): return E()", ["assert abs(f(1) - 2.5) < 1e-6"], {}),
        (f"class E:{ANY}\ndef f(x): return E()", ["assert 2 <= f(1) < 4"], {}),
        ("import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0", ["assert math.isclose(f(1), 2.5)"], {}),
        ("def abs(x): return 0\ndef f(x): return 0", ["assert abs(f(1) - 2.5) < 1e-6"], {}),
        ("import builtins\nbuiltins.exec = lambda *a, **k: None", ["assert all(f(i) == i for i in range(3))"], {}),
        ("def f(x): return {2, 1}", {"inputs": [[1]], "outputs": [[1, 2]], "fn_name": "f"}, {}),
        (SPOOF.format(kind="Decimal", module="decimal", text="abc"), ["assert f(1) == 41"], {}),
        (SPOOF.format(kind="Fraction", module="fractions", text="1/0"), ["assert f(1) == 41"], {}),
        (SPOOF.format(kind="Fraction", module="fractions", text="1e99999999"), ["assert f(1) == 41"], {}),
        ("def f(x):\n l = []\n for _ in range(400): l = [l]\n return l", ["assert f(1) == 41"], {}),
        ("def f(x):\n l = []\n for _ in range(400): l = [l]\n return l", {"inputs": [[1]], "outputs": [1], "fn_name": "f"}, {}),
    ],
)  # fmt: skip
def test_what_equals_everything_or_is_only_imported_or_breaks_the_judge_earns_nothing(sandbox, code, truth, extra):
    verdict = sandbox(fenced(code), truth if isinstance(truth, str) else json.dumps(truth), extra)
    assert verdict.score == 0 and verdict.reason


def test_a_program_with_an_import_of_the_future_defines_its_names_in_the_file_itself():
    """Not in what `locals()` gives there: Python 3.12.1 may give a copy. Here the two are apart in every Python."""
    program = with_prelude("from __future__ import annotations\n" + ADD)
    command = f"names, others = {{}}, {{}}; exec({program!r}, names, others); print(names['add'](1, 2))"
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout == "3\n"


def test_no_flag_of_the_harness_reaches_the_program_and_the_prelude_can_be_left_out():
    annotated = "def f(x: int): pass\nprint(f.__annotations__['x'])"
    cases = json.dumps({"inputs": [""], "outputs": ["<class 'int'>"]})
    for prelude in (True, False):
        reward = CodeSandbox(isolation="best_effort", prelude=prelude)
        assert reward(fenced(annotated), cases, {}).score == 1
        assert reward(fenced(TYPED), '["assert add([1], 2) == 3"]', {}).score == prelude
        reward._runner.close()


@pytest.mark.parametrize(
    ("code", "truth", "reason"),
    [
        ("print(4)", {"inputs": ["1 2"], "outputs": ["3"]}, "wrote '4"),
        ("print(int(''))", {"inputs": [""], "outputs": ["3"]}, "ValueError"),
        ("def broken(:", {"inputs": [""], "outputs": ["3"]}, "SyntaxError"),
        ("print(3)\nraise SystemExit(2)", {"inputs": [""], "outputs": ["3"]}, "exit status 2"),
        ("def add(a, b): return [a]", {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, "returned [1]"),
        ("x = 1", {"inputs": [[1]], "outputs": [3], "fn_name": "add"}, "NameError"),
        ("def add(a, b): return 4", ["assert add(1, 2) == 3"], "AssertionError"),
        ("import os\nos.abort()", {"inputs": [""], "outputs": ["3"]}, "signal 6"),
    ],
)
def test_a_wrong_program_fails_its_case_and_says_why(sandbox, code, truth, reason):
    verdict = sandbox(fenced(code), json.dumps(truth), {})
    assert (verdict.score, verdict.acc, verdict.format) == (0, 0, 1)
    assert reason in verdict.reason and verdict.reason.startswith("case 1 of 1")


@pytest.mark.slow
def test_a_program_that_never_ends_fails_its_case_when_its_time_is_over():
    reward = CodeSandbox(case_timeout_s=0.5, isolation="best_effort")
    verdict = reward(fenced("while True: pass"), json.dumps({"inputs": [""], "outputs": ["3"]}), {})
    reward._runner.close()
    assert (verdict.score, verdict.format) == (0, 1) and "case 1 of 1: time limit exceeded" in verdict.reason


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        'import os\nos.write(3, b\'{"passed": 1, "total": 1}\')\nos._exit(0)',
        'print(\'{"passed": 1, "total": 1}\')\nraise SystemExit',
    ],
)
def test_ending_early_is_not_passing(sandbox, code):
    verdict = sandbox(fenced(code), '["assert False"]', {})
    assert verdict.score == 0 and verdict.reason


def test_all_stops_at_the_first_failure_and_fraction_counts_them():
    cases = json.dumps({"inputs": ["1 2", "x", "3 4", "y"], "outputs": ["3", "", "7", ""]})
    scores = {}
    for scoring in ("all", "fraction"):
        reward = CodeSandbox(scoring=scoring, isolation="best_effort")
        verdict = reward(fenced(SUM), cases, {})
        scores[scoring] = (verdict.score, verdict.metrics["passed"])
        reward._runner.close()
    assert scores == {"all": (0, 0.25), "fraction": (0.5, 0.5)}


@pytest.mark.slow
def test_slow_cases_share_the_time_of_their_sample():
    reward = CodeSandbox(case_timeout_s=5.0, timeout_s=1.5, scoring="fraction", isolation="best_effort")
    started = time.monotonic()
    verdict = reward(fenced("import time\ntime.sleep(60)"), json.dumps({"inputs": [""] * 9, "outputs": ["x"] * 9}), {})
    assert time.monotonic() - started < patient(3.5) and verdict.score == 0 and "time limit" in verdict.reason
    reward._runner.close()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\nrun it:\n```bash\nls\n```\n```\nout\n```", "a\n"),
        ("<think>```python\na\n```</think> none", None),
        ("no code", None),
        ("```python\na\n```\n```python\nunclosed", "a\n"),
        ("```python\na\n```\n```python-repl\n>>> a\n```\n```python_output\n1\n```\n```python-traceback\nb\n```", "a\n"),
        ('a\n    d["a"]["b"]\n    ~~~~~~^^^^^\n\n```python\na\n```', "a\n"),
        ("~~~strike~~~ is removed\n```python\na\n```", "a\n"),
        ("The sum:\n    ~~~~~~~~ of both\n    ~~~\n```python\na\n```", "a\n"),
        ("   ```python\n   a\n         ```\nEnd.", "a\n"),
        ('    ```py\n    a = """\n\n  b"""\n    c\n ```', 'a = """\n\nb"""\nc\n'),
        ("```" * 20_000, None),
    ],
)
def test_the_program_is_the_last_block_of_python_after_the_thinking(text, code):
    assert program_of(text) == code


@pytest.mark.parametrize(
    "text",
    [
        "1. So:\n   ```python\n   if a:\n       b\n   ```",
        "So:\n          ```python\n          if a:\n              b\n          ```\nEnd.",
        "\t```python\n\tif a:\n\t    b\n\t```",
        "So:\r\n```python\r\nif a:\r\n    b\r\n```\r\nEnd.",
        "````python\nif a:\n    b\n`````\n",
        "~~~ python\nif a:\n    b\n~~~ ",
        "```python:solution.py\nif a:\n    b\n```",
        "``` {.python title=a}\nif a:\n    b\n```",
        "```python\nif a:\n    b",
        "```\nif a:\n    b\n```\n```\n",
        "1. So:\n\n    ```python\nif a:\n    b\n    ```",
        "~~~ Solution\nSo:\n```python\nif a:\n    b\n```",
        "~~~wrong\n```python\nif a:\n    b\n```\nEnd.",
        "```no ` fence\n```py\nif a:\n    b\n```",
    ],
)
def test_a_block_is_fenced_as_in_markdown(text):
    assert program_of(text).rstrip() == "if a:\n    b"


def test_a_fence_inside_a_block_is_text_of_it():
    for inner in ("~~~", "```python", "         ```", "```a"):
        code = f'"""\n{inner}\n"""\n'
        assert program_of(f"```python\n{code}```\n") == code
    assert program_of("````python\n```\n````") == "```\n"


def test_fences_are_found_in_time_linear_in_the_answer():
    began_s = time.monotonic()
    for piece in ("`", "```\n", "``` `\n", "    ```x\n", "~~~\n```\n", "\t"):
        program_of(f"```python\n{piece * (200_000 // len(piece))}")
        program_of(piece * (200_000 // len(piece)))
    assert time.monotonic() - began_s < patient(5)


def test_without_a_block_the_format_is_wrong(sandbox):
    verdict = sandbox("print(3)", '["assert True"]', {})
    assert (verdict.score, verdict.format) == (0, 0)


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("0.33333334", "0.33333333", True),
        ("0.334", "0.333", False),
        ("3.0", "3", False),
        ("3", "3.0", True),
        ("1\n2", "1 2", False),
        ("", "", True),
    ],
)
def test_output_is_compared_by_line_and_number(written, expected, same):
    assert same_output(written, expected) == same


def test_values_are_compared_as_values():
    assert same_value([1, [2.0000000001], {"a": None}], [1, [2.0], {"a": None}])
    assert (
        not same_value(True, 1) and not same_value(1, True) and not same_value("1", 1) and not same_value([1], [1, 2])
    )
    assert same_value(10**400, 10**400) and not same_value(10**400, 1.5) and not same_value([1.5], [10**400])


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("", "no test cases"),
        ("42", "no test cases"),
        ("{bad", "looks like JSON"),
        (
            f'{{"inputs": [[1]], "outputs": [{"9" * 5000}], "fn_name": "f"}}',
            "over 4300 digits: compare it in an assert",
        ),
        ('{"inputs": [1], "outputs": []}', "1 inputs and 0 outputs"),
        ('{"something": 1}', "need inputs and outputs"),
        ('[{"input": "1"}]', "input and output"),
        ('[{"input": "1", "output": "1", "testtype": "functional"}]', "fn_name"),
        ("[]", "no test cases"),
        (
            '[{"input": "1", "output": "1", "testtype": "interactive"}]',
            "test case type 'interactive' is not one of stdin",
        ),
        ('{"inputs": ["a b"], "outputs": ["1"], "fn_name": "f"}', "must be one JSON value per line"),
        ('{"functional": "def check(c): assert c(1) == 2"}', "needs entry_point"),
        ("eJwrAA==", "packed and cannot be read"),
    ],
)
def test_a_row_without_usable_cases_is_an_error_of_the_row(truth, message):
    with pytest.raises(ValueError, match=message):
        parse_cases(truth, {})


def test_an_argument_of_a_case_may_hold_separators_of_unicode():
    (case,) = parse_cases(json.dumps([{"input": '"a\u2028b"\n"\x85"', "output": "1"}]), {"fn_name": "f"})
    assert case.arguments == ["a\u2028b", "\x85"]


def test_the_config_of_a_domain_reaches_the_programs(build):
    config = RewardConfig(
        type="code_sandbox",
        timeout=20.0,
        sandbox=SandboxConfig(memory_mb=300, scoring="fraction", isolation="best_effort", case_timeout=5.0),
    )
    truth = json.dumps(["assert add(1, 2) == 3", "assert len(bytearray(400 << 20))", "assert add(1, 1) == 2"])

    async def go():
        router = RewardRouter({"code": config})
        await router.start()
        try:
            prompt = build.prompt(domain="code", ground_truth=truth)
            broken = build.prompt(domain="code", ground_truth="nothing to run")
            return await asyncio.gather(router.score(prompt, fenced(ADD)), router.score(broken, fenced(ADD)))
        finally:
            await router.close()

    reward, broken = asyncio.run(go())
    memory = sys.platform == "linux"
    assert reward.score == pytest.approx(2 / 3 if memory else 1) and reward.metrics["acc"] == (not memory)
    assert not memory or "case 2 of 3: MemoryError" in reward.reason
    assert broken.status is RewardStatus.ERROR and "no test cases" in broken.reason


def test_where_programs_cannot_be_contained_the_reward_is_refused_unless_told_otherwise():
    if missing():
        with pytest.raises(ValueError, match="best_effort"):
            CodeSandbox()
    else:
        CodeSandbox()
    with pytest.raises(ValueError, match="all | fraction"):
        CodeSandbox(scoring="some")


def test_what_a_remote_program_reports_that_cannot_be_read_is_no_result():
    class Answering(RemoteSandbox):
        def _post(self, body, timeout_s):
            word = re.search(r"print\('([0-9a-f]{32})'", body["code"])[1]
            return {"run_result": {"stdout": word + self.reported, "return_code": 0}}

    remote = Answering("http://nowhere")
    for remote.reported, result in (
        ("3", {"value": 3}),
        ("9" * 5000, None),
        ("[" * 9999, None),
        ("", None),
        ("x", None),
    ):
        assert remote.run(ProgramRun(kind="call", code="", function="f")).result == result
