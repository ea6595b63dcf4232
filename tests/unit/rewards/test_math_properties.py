"""Properties of equality: any expression equals itself in another writing, and no number equals a list."""

from dataclasses import dataclass

import pytest

from roll_async.rewards.math_rule import MathRule
from roll_async.rewards.maths.equality import same_value

hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("math_verify")
st = hypothesis.strategies
SETTINGS = hypothesis.settings(max_examples=80, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Style:
    """How something is written."""

    fraction: str = r"\frac"
    space: str = ""
    comma: str = ","
    grow: bool = False

    def bracket(self, left, inner, right):
        if self.grow:
            left, right = rf"\left{left}", rf"\right{right}"
        return f"{left}{self.space}{inner}{self.space}{right}"


PLAIN = Style()
STYLES = st.builds(
    Style,
    fraction=st.sampled_from([r"\frac", r"\dfrac", r"\tfrac"]),
    space=st.sampled_from(["", " ", r"\,", r"\ "]),
    comma=st.sampled_from([",", ", ", " , ", r",\,", r",\ "]),
    grow=st.booleans(),
)
NUMBERS = st.integers(2, 9) | st.integers(10, 99) | st.integers(100, 999)


def number(value):
    return lambda style: str(value)


def fraction(top, bottom):
    return lambda style: rf"{style.fraction}{{{top(style)}}}{{{bottom(style)}}}"


def root(of):
    return lambda style: rf"\sqrt{{{of(style)}}}"


def power(of, exponent):
    return lambda style: f"{style.bracket('(', of(style), ')')}^{{{exponent}}}"


def total(left, right, sign):
    return lambda style: f"{left(style)}{style.space}{sign}{style.space}{right(style)}"


def product(factor, name):
    return lambda style: f"{factor}{style.space}{name}"


VALUES = st.recursive(
    st.builds(number, NUMBERS) | st.builds(product, NUMBERS, st.sampled_from(["x", r"\pi", r"\sqrt{2}"])),
    lambda inner: (
        st.builds(fraction, inner, inner)
        | st.builds(root, inner)
        | st.builds(power, inner, st.integers(2, 3))
        | st.builds(total, inner, inner, st.sampled_from("+-"))
    ),
    max_leaves=3,
)


def joined(parts, left, right):
    def write(style):
        inner = style.comma.join(part(style) for part in parts)
        return style.bracket(left, inner, right) if left else inner

    return write


def union(parts):
    one, two = (joined(pair, "(", "]") for pair in (parts[:2], parts[2:]))
    return lambda style: rf"{one(style)}{style.space}\cup{style.space or ' '}{two(style)}"


BRACKETS = st.sampled_from([("(", ")"), ("[", "]"), ("[", ")"), ("(", "]"), (r"\{", r"\}"), ("", "")])
SEVERAL = st.lists(NUMBERS, min_size=2, max_size=3, unique=True).flatmap(
    lambda values: BRACKETS.map(
        lambda pair: joined([number(v) for v in (values if pair[0] in ("", r"\{") else sorted(values)[:2])], *pair)
    )
) | st.lists(NUMBERS, min_size=4, max_size=4, unique=True).map(lambda v: union([number(x) for x in sorted(v)]))


@pytest.mark.slow
@SETTINGS
@hypothesis.given(VALUES | SEVERAL, STYLES)
def test_any_expression_equals_itself_in_another_writing(write, style):
    one, other = write(PLAIN), write(style)
    assert same_value(one, one) and same_value(other, one) and same_value(one, other), (one, other)


@pytest.mark.slow
@SETTINGS
@hypothesis.given(SEVERAL, STYLES, st.sampled_from([r"\boxed{%s}", "Answer: $%s$", "#### %s", "<answer>%s</answer>"]))
def test_no_number_equals_a_list_and_no_list_a_number(write, style, form):
    several = write(style)
    digits = "".join(c for c in write(PLAIN) if c.isdigit())
    grouped = f"{int(digits):,}"
    hypothesis.assume(write(PLAIN) != grouped)  # 1,234 alone is the number
    rule = MathRule()
    for one in (digits, grouped):
        assert rule(form % one, several, {}).score == 0, (one, several)
        assert rule(form % several, one, {}).score == 0, (several, one)


@pytest.mark.slow
@SETTINGS
@hypothesis.given(SEVERAL, STYLES)
def test_no_list_equals_one_of_its_parts(write, style):
    parts = write(PLAIN).strip(r"()[]\{}").split(",")
    assert not same_value(parts[0], write(style)) and not same_value(write(style), parts[0]), parts
