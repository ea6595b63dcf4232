"""Rules that read an answer: right, wrong, and nothing to read."""

import asyncio
import random

import pytest

from roll_async.config.schema import RewardConfig
from roll_async.rewards.answers import final_answer
from roll_async.rewards.exact_match import ExactMatch
from roll_async.rewards.math_rule import MathRule
from roll_async.rewards.maths.equality import same_value
from roll_async.rewards.registry import REWARDS, create_reward, is_rule, needs_environment
from roll_async.rewards.serving.router import RewardRouter
from roll_async.schema import RewardStatus


@pytest.mark.parametrize(
    ("text", "truth", "score", "form"),
    [
        ("8+7+0=15;5+6+1=12;=425", "425", 1, 1),
        ("=425", "425", 1, 1),
        ("= 425 \n", "425", 1, 1),
        ("425", "425", 0, 0),
        ("", "425", 0, 0),
        ("=425;=424", "425", 0, 1),
        ("=0425", "425", 0, 1),
        ("=425=", "425", 0, 1),
        ("=", "", 1, 1),
    ],
)
def test_exact_match_compares_what_follows_the_last_marker(text, truth, score, form):
    verdict = ExactMatch()(text, truth, {})
    assert (verdict.score, verdict.acc, verdict.format) == (score, score, form)
    assert bool(verdict.reason) == (not score)


def test_the_marker_of_exact_match_can_be_another():
    assert ExactMatch("####")("so #### 7", "7", {}).score == 1 and ExactMatch("####")("so = 7", "7", {}).format == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and an open \boxed{2", "1"),
        (r"\fbox{3}", "3"),
        ("Answer: 12", "12"),
        ("**Final Answer:** 12\nAnswer: 13\nbye", "13"),
        (r"<think>\boxed{1}</think> the answer is \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> I do not know", None),
        ("nothing at all", None),
        ("", None),
    ],
)
def test_the_final_answer_is_the_last_one_stated_after_the_thinking(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("stated", "truth", "score"),
    [
        ("42", "42", 1),
        (r"\frac{1}{2}", "0.5", 1),
        ("1,234", "1234", 1),
        (r"\$18", "18", 1),
        ("18.", "18", 1),
        ("x+1", "1+x", 1),
        ("43", "42", 0),
        ("apple", "42", 0),
        ("230 km/h", "230", 1),
        ("8 m/s.", "8", 1),
        ("12.50 dollars per hour", "12.5", 1),
        ("42 square meters", "42", 1),
        (r"12\text{ cm}^2", "12", 1),
        ("42 or 43", "42", 0),
        ("42 million", "42", 0),
        ("42x", "42", 0),
        ("42 pi", "42", 0),
        ("1,234.5", "1234.5", 1),
        (r"1{,}234", "1,234", 1),
        ("1,2,3", "123", 0),
        ("073", "73", 1),
        (r"\frac{84}{2}", "42", 1),
        (r"\dfrac{1}{3}", "1/3", 1),
        (r"(1,2)", "(2,1)", 0),
        (r"\{1,2\}", r"\{2,1\}", 1),
        ("-42", "42", 0),
        (r"\text{42 dollars}", "42", 1),
        (r"\approx 42", "42", 1),
        ("2 1/2", "2.5", 1),
        ("-2 1/2", r"-\frac52", 1),
        ("2 1/2", "10.5", 0),
        ("\u20ac1,842", "1842", 1),
        ("18\u20ac", "18", 1),
        ("1.5e3", "1500", 1),
        ("1e-2", "0.01", 1),
        ("1e3", "100", 0),
        ("2**10", "1024", 1),
        ("x**2", "x^2", 1),
        ("3\u221a2", r"3\sqrt{2}", 1),
        ("\u221a(x+1)", r"\sqrt{x+1}", 1),
        ("\u00bd", "0.5", 1),
        ("3\u00bd", "3.5", 1),
        ("\u2153", r"\frac13", 1),
        ("pi/2", r"\frac{\pi}{2}", 1),
        ("2pi", r"2\pi", 1),
        (r"5:00 \text{ PM}", "5:00 PM", 1),
        ("1 12", "112", 0),
        ("1 1/2", "11/2", 0),
    ],
)
def test_the_math_rule_compares_values_and_not_letters(stated, truth, score):
    pytest.importorskip("math_verify")
    verdict = MathRule()(rf"thus \boxed{{{stated}}}", truth, {})
    assert verdict.score == verdict.acc == score and verdict.format == 1


@pytest.mark.parametrize("truth", ["so 6*7=<<6*7=42>>42\n#### 42", "#### 42", r"thus \boxed{42}.", "042", "$42$"])
def test_the_math_rule_reads_references_as_data_sets_write_them(truth):
    pytest.importorskip("math_verify")
    assert MathRule()(r"\boxed{42}", truth, {}).score == 1 and MathRule()(r"\boxed{24}", truth, {}).score == 0


@pytest.mark.parametrize(
    ("stated", "truth", "same"),
    [
        ("(0, 100)", "(0,100)", True),
        ("1100", "(1,100)", False),
        ("(1,100)", "1100", False),
        ("1,100", "(1,100)", False),
        ("(1,234)", "(1, 234)", True),
        ("(1,234)", "1234", False),
        ("\\{100,200\\}", "100200", False),
        ("\\{100,200\\}", "100, 200", True),
        ("[1,100]", "(1,100)", False),
        ("(-\\infty,100)\\cup(1,200)", "(-\\infty, 100) \\cup (1, 200)", True),
        ("(1,100),(2,200)", "(2, 200), (1, 100)", True),
        ("12", "1,2", False),
        ("1,234", "1,2,3,4", False),
        ("1\\,234", "1234", True),
        ("10\\ 000", "10,000", True),
        ("(1{,}000, 2{,}000)", "(1000,2000)", True),
        ("x = 1,250", "1250", True),
        ("-1,250.5", "-1250.5", True),
        ("1,250 km^2", "1250", True),
        ("1,250\\text{ dollars}", "1250", True),
        ("\\text{10,000}", "10000", True),
        ("\\frac{1,250}{2}", "625", True),
        ("1,000 and 2,000", "3000", False),
    ],
)
def test_thousands_are_joined_only_where_the_whole_answer_is_one_number(stated, truth, same):
    pytest.importorskip("math_verify")
    assert same_value(stated, truth) == same


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("#### 1,080", "1080", 1),
        ("Answer: $18 per day", "18", 1),
        ("Answer: Janet makes $18 per day.", "18", 1),
        ("Answer: 18 apples. I hope this helps.", "18", 1),
        ("Answer: $x = 1$ or $x = 2$", "1, 2", 1),
        ("Answer: $x = 1$ or $x = 2$", "2", 0),
        ("Answer: the probability is $\\frac{1}{2}$.", "1/2", 1),
        ("Answer: $5$ million", "5", 0),
        ("Answer: 5 million", "5", 0),
        ("Answer: \\(\\frac{3}{4}\\)", "0.75", 1),
        ("So the answer is 3 * 6 = 18 dollars.", "18", 1),
        ("the answer is between 3 and 18", "18", 0),
        ("x = \\boxed{1}, y = \\boxed{2}", "1, 2", 1),
        ("x = \\boxed{1}, y = \\boxed{2}", "2", 1),
        ("\\boxed{1} or \\boxed{2}", "2", 0),
        ("\\boxed{1, 2}", "\\boxed{1} and \\boxed{2}", 1),
        ("\\boxed{2}", "\\boxed{1} and \\boxed{2}", 0),
        ("there are 18 apples", "18", 0),
    ],
)
def test_a_sentence_around_the_value_is_left_out_and_two_values_are_not_one(text, truth, score):
    pytest.importorskip("math_verify")
    assert MathRule()(text, truth, {}).score == score


def test_a_domain_or_a_row_names_the_form_of_its_answers():
    rule = MathRule("last_number")
    assert rule("there are 18 apples", "18", {}).score == 1
    assert rule("there are 18 apples #### 17", "17", {"answer_format": "hashes"}).score == 1
    with pytest.raises(ValueError, match="answer_format 'boxes'"):
        rule("18", "18", {"answer_format": "boxes"})
    assert ExactMatch(answer_format="tag")("<answer>7</answer> = 8", "7", {}).score == 1


def test_the_router_says_when_a_domain_has_no_readable_answers(build):
    router = RewardRouter({"math": RewardConfig(type="qa", answer_format="boxed")})

    async def go():
        await router.start()
        try:
            prompt = build.prompt(domain="math", ground_truth="18")
            for _ in range(20):
                assert (await router.score(prompt, "#### 17")).score == 0
        finally:
            await router.close()

    asyncio.run(go())
    assert len(router.notices) == 1 and "rewards.math.answer_format: auto would read 16" in router.notices[0]


SHAPES = [
    lambda a, b, c: (f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}"),
    lambda a, b, c: (f"({a},{b})", f"\\left( {a} , {b} \\right)"),
    lambda a, b, c: (f"[{a},{a + b})", f"\\left[{a}, {a + b}\\right)"),
    lambda a, b, c: (f"\\{{{a},{b},{c}\\}}", f"\\left\\{{ {a}, {b}, {c} \\right\\}}"),
    lambda a, b, c: (f"(-\\infty,{a})\\cup({a + b},\\infty)", f"(-\\infty, {a}) \\cup ({a + b}, \\infty)"),
    lambda a, b, c: (f"{a}\\sqrt{{{b}}}", f"{a} \\sqrt{{ {b} }}"),
    lambda a, b, c: (f"{a}x^2+{b}x-{c}", f"{a} x^{{2}} + {b} x - {c}"),
    lambda a, b, c: (f"({a},{b},{c})", f"({a}, {b}, {c})"),
    lambda a, b, c: (f"\\frac{{{a}\\pi}}{{{b}}}", f"\\tfrac{{{a} \\pi}}{{{b}}}"),
]  # fmt: skip


@pytest.mark.slow
def test_any_expression_equals_itself_in_other_spacing_and_no_number_equals_a_list():
    pytest.importorskip("math_verify")
    rng = random.Random(0)
    for shape in SHAPES * 6:
        a, b, c = (rng.choice((rng.randint(2, 9), rng.randint(10, 99), rng.randint(100, 999))) for _ in range(3))
        one, other = shape(a, b, c)
        assert same_value(one, other) and same_value(other, one) and same_value(one, one), (one, other)
        number = "".join(ch for ch in one if ch.isdigit())
        if "," in one:
            assert not same_value(number, one) and not same_value(one, number), (number, one)


def test_the_math_rule_names_what_is_missing_and_refuses_an_endless_answer():
    assert MathRule()("no answer", "1", {}).format == 0
    assert "3000 characters" in MathRule()(rf"\boxed{{{'9' * 3000}}}", "1", {}).reason


def test_every_name_in_the_table_can_be_built():
    options = {"code_sandbox": {"isolation": "best_effort"}}
    assert all(callable(create_reward(name, options.get(name))) for name in REWARDS)


def test_our_rules_work_without_rights_and_a_users_code_keeps_its_own():
    rules = {name for name in (*REWARDS, "roll_async.rewards.qa.ExactAnswer", "mine.score") if is_rule(name)}
    assert rules == {*REWARDS, "roll_async.rewards.qa.ExactAnswer"} - {"code_sandbox"}
    assert needs_environment("mine.score") and not needs_environment("code_sandbox")


def test_the_router_sends_a_prompt_to_the_reward_of_its_domain(build):
    router = RewardRouter({"add": RewardConfig(type="exact_match"), "other": RewardConfig(type="exact_match")})

    async def go():
        await router.start()
        try:
            right = await router.score(build.prompt(domain="add", ground_truth="3"), "=3")
            wrong = await router.score(build.prompt(domain="other", ground_truth="4"), "=3")
            lost = await router.score(build.prompt(domain="nowhere"), "=3")
            assert lost.status is RewardStatus.ERROR and "nowhere" in lost.reason
            return right, wrong
        finally:
            await router.close()

    right, wrong = asyncio.run(go())
    assert (right.score, wrong.score) == (1, 0) and right.status is wrong.status is RewardStatus.OK


def test_plain_numbers_get_the_verdict_that_math_verify_gives_them():
    pytest.importorskip("math_verify")
    from roll_async.rewards.maths.equality import same_expression, same_number

    numbers = ["0", "7", "+7", "-7", "007", "7.0", "7.000001", "7.0000005", "7.1", ".7", "0.70", "-.7", "123456789012"]
    decided = 0
    for stated in numbers:
        for reference in numbers[::2]:
            found = same_number(stated, reference)
            decided += found is not None
            assert found is None or found == same_expression(stated, reference), (stated, reference)
    assert decided > 0.8 * len(numbers) * len(numbers[::2])
    assert same_number("7", "7.0000005") is None and same_number("1e3", "1000") is None
    assert same_number("123456789012345", "123456789012346") is None, "more digits than it compares"


@pytest.mark.parametrize("reference", ["18", "-18", "+3", "007", "0", "123456789012345678901"])
def test_an_integer_is_read_as_math_verify_reads_it(reference):
    math_verify = pytest.importorskip("math_verify")
    from roll_async.rewards.maths.equality import _parsed_reference

    assert list(_parsed_reference(reference)) == math_verify.parse(f"${reference}$", parsing_timeout=None)
