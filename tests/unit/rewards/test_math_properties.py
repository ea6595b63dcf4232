"""Properties of equality: any expression equals itself in another writing, no number equals a list, and no number
another one in whatever writing.
"""

from dataclasses import dataclass
from decimal import Decimal

import pytest

from roll_async.rewards.math_rule import MathRule
from roll_async.rewards.maths.equality import same_value

hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("math_verify")
st = hypothesis.strategies
SETTINGS = hypothesis.settings(max_examples=80, deadline=None, derandomize=True, database=None)
FEW = hypothesis.settings(SETTINGS, max_examples=15)
"""Where an example is many comparisons by the parser."""


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


# A grouped number has no less than 1,000 and its first group no zero in front.
THOUSANDS = [",", "{,}", r"\,", r"\ ", r"\;", r"\:", "~", " ", "\u00a0", "\u2009", "\u202f", "'"]
DECIMALS = st.decimals(min_value=1000, max_value=10**9, places=2).filter(lambda value: value % 1)


def grouped(whole, separator):
    return f"{whole:,}".replace(",", separator)


def spelled(value, separator, mark):
    """1234.5 as `1 234,5`."""
    whole, _, decimals = f"{value:f}".partition(".")
    return grouped(int(whole), separator) + (mark + decimals if decimals else "")


def others(value):
    return [value * 10, value * 1000, value / 10, value / 1000, -value, value + 1]


@FEW
@hypothesis.given(st.integers(1000, 10**9), st.sampled_from(THOUSANDS), st.sampled_from(["", "-", "x = "]))
def test_a_number_is_itself_with_any_thousands_and_never_another_one(value, separator, before):
    written, plain = before + grouped(value, separator), before + str(value)
    assert same_value(written, plain) and same_value(plain, written) and same_value(written, written)
    for other in others(Decimal(value)):
        assert not same_value(written, before + f"{other:f}") and not same_value(before + f"{other:f}", written), other


@SETTINGS
@hypothesis.given(DECIMALS, st.sampled_from(THOUSANDS[2:]), st.sampled_from([",", "{,}", "."]))
def test_a_number_is_itself_with_either_decimal_mark_and_never_another_one(value, separator, mark):
    one, other = spelled(value, separator, mark), f"{value:f}"
    german, english = spelled(value, ".", ","), spelled(value, ",", ".")
    for a, b in ((one, other), (german, english), (german, other), (english, one)):
        assert same_value(a, b) and same_value(b, a) and same_value(a, a), (a, b)
    for wrong in others(value):
        for written in (one, german, english):
            assert not same_value(written, f"{wrong:f}") and not same_value(f"{wrong:f}", written), (written, wrong)


@SETTINGS
@hypothesis.given(st.decimals(min_value=0, max_value="0.999", places=3), st.sampled_from([",", "{,}"]))
def test_a_comma_behind_a_zero_begins_decimals(value, mark):
    comma, point = f"{value:f}".replace(".", mark), f"{value:f}"
    digits = point.replace("0.", "", 1)
    assert same_value(comma, point) and same_value(point, comma)
    assert not int(digits) or not (same_value(digits, comma) or same_value(comma, digits)), "a thousand times as much"


SMALL = st.tuples(st.integers(10, 99), st.integers(7, 30))
POWERS = [r"{0}.{1}\times 10^{{-{2}}}", "{0}.{1}e-{2}", r"{0}.{1} \cdot 10^{{-{2}}}", "{0}.{1}*10^(-{2})"]


def tiny(mantissa, exponent, form):
    return form.format(mantissa // 10, mantissa % 10, exponent)


@FEW
@hypothesis.given(SMALL, st.sampled_from(POWERS), st.sampled_from(POWERS), st.integers(10, 99))
def test_a_small_number_equals_itself_in_any_writing_and_no_other_one(number, form, other_form, other_mantissa):
    mantissa, exponent = number
    one, same = tiny(mantissa, exponent, form), tiny(mantissa, exponent, other_form)
    plain = f"{Decimal(mantissa).scaleb(-exponent - 1):f}"
    for a, b in ((one, same), (one, plain), (plain, one), (f"({one}, 2)", f"({one},2)")):
        assert same_value(a, b), (a, b)
    wrong = [tiny(mantissa, exponent + 1, other_form), tiny(mantissa, exponent - 1, other_form), "-" + same, "0", "0.0"]
    wrong += [tiny(other_mantissa, exponent, other_form)] if other_mantissa != mantissa else []
    for other in wrong:
        assert not same_value(one, other) and not same_value(other, one), (one, other)


ENDS = st.tuples(st.integers(-50, 49), st.integers(1, 50)).map(lambda pair: (pair[0], pair[0] + pair[1]))
LESS = [
    ("<", "<"),
    (r"\lt ", "<"),
    (r"\le ", "<="),
    (r"\leq ", "<="),
    (r"\leqslant ", "<="),
    ("\u2264", "<="),
    ("<=", "<="),
]


@FEW
@hypothesis.given(ENDS, st.sampled_from(LESS), st.sampled_from(LESS), st.sampled_from(["x", "t", r"\theta"]))
def test_an_inequality_is_its_interval_both_ways_and_no_other_one(ends, first, second, name):
    low, high = ends
    left, right = "(" if first[1] == "<" else "[", ")" if second[1] == "<" else "]"
    closed = {"(": "[", "[": "(", ")": "]", "]": ")"}
    texts = {
        f"{low} {first[0]} {name} {second[0]} {high}": (f"{left}{low},{high}{right}", f"{left}{low}, {high + 1}{right}",
                                                        f"{closed[left]}{low},{high}{right}"),
        f"{low} {first[0]} {name}": (rf"{left}{low},\infty)", rf"{left}{low + 1},\infty)",
                                     rf"(-\infty,{low}{closed[right]}"),
        f"{name} {second[0]} {high}": (rf"(-\infty, {high}{right}", rf"(-\infty,{high}{closed[right]}",
                                       rf"{left}{high},\infty)"),
        f"{name} {first[0]} {low} \\text{{ or }} {high} {second[0]} {name}": (
            rf"(-\infty,{low}{')' if left == '(' else ']'}\cup{'(' if right == ')' else '['}{high},\infty)",
            rf"(-\infty,{low}{')' if left == '(' else ']'}", rf"(-\infty,{high})\cup({high},\infty)"),
    }  # fmt: skip
    for text, (same, *wrong) in texts.items():
        assert same_value(text, same) and same_value(same, text) and same_value(text, text), (text, same)
        for other in wrong:
            assert not same_value(text, other) and not same_value(other, text), (text, other)


@SETTINGS
@hypothesis.given(VALUES)
def test_a_root_with_parentheses_is_one_with_braces(write):
    inner = write(PLAIN)
    for head in (r"\sqrt", "sqrt", r"\sqrt[3]", "2^", r"x+\frac{1}{2}\sqrt"):
        braced = head.replace("sqrt", r"\sqrt") if head == "sqrt" else head
        assert same_value(f"{head}({inner})", f"{braced}{{{inner}}}"), (head, inner)
