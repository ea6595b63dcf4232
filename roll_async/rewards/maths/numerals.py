r"""Numbers as people write them, as decimal numbers of ASCII digits: 1234.5 of `1,234.5`, `1.234,5`, `1\,234{,}5`.

A mark between digits separates thousands or begins the decimals. What can be read both ways, as `1,234`, is the number
with thousands, unless the reference shows that its comma begins decimals (`0,111`, `12,5`, `1.234,5`).
"""

from __future__ import annotations

import re
from decimal import Decimal

SPACE = r"(?:\\[,:;! ]|\\(?:thinspace|nobreakspace)(?:\s|\{\})?|~|\{\\,\}|\s)"
"""What LaTeX and people put between thousands. Thin and no-break spaces are white space to `re`."""
_EXPLICIT_COMMA = r"(?:\{,\}|,\\!)"
_MARK = rf"(?:{_EXPLICIT_COMMA}|{SPACE}|[.,'\u2019])"
_MARKS = re.compile(rf"({_MARK})")
NUMERAL = rf"\d+(?:{_MARK}\d+)*"
_EXPLICIT = re.compile(rf"(?<![\w.,^_])\d+(?:(?:{_EXPLICIT_COMMA}|{SPACE}|\.(?=\d+{_EXPLICIT_COMMA}))\d+)+", re.ASCII)
r"""1{,}234 and 1\,234 are one number wherever they stand: nobody writes a list so."""
_MIXED = re.compile(rf"\d+{SPACE}[1-9]\d*", re.ASCII)
"""Before a slash: the 3 100 of 3 100/200."""
_EXPLICIT_AFTER_COMMA = re.compile(rf"(?<=\d,)\d+(?:{_EXPLICIT_COMMA}\d+)+", re.ASCII)
_ARGUMENT = re.compile(rf"(?<=[a-z}}\]]\{{){NUMERAL}(?=\}})", re.ASCII)
r"""The 1,234 of \sqrt{1,234}."""
_OF_NUMBERS = ("frac", "sqrt", "}", "]")
r"""What stands before an argument that is no list: \frac{1,5}{2}, not \max{1,5}."""
_BETWEEN_SEMICOLONS = re.compile(rf"(?<![\w.^_,]){NUMERAL}", re.ASCII)
_TIMES_TEN = re.compile(
    r"(?:([-+]?\d{1,20}(?:(?:[.,]|\{,\})\d{1,20})?)\s?(?:\\times|\\cdot|[*x\u00d7\u00b7\u22c5])\s?|([-+]?))"
    r"10\s?(?:\^|\*\*)\s?(?:\{\s?([-+]?\d{1,3})\s?\}|\(([-+]?\d{1,3})\)|([-+]?\d{1,3}))",
    re.ASCII,
)
_SCIENTIFIC = re.compile(r"([-+]?\d{1,20}(?:[.,]\d{1,20})?)[eE]([-+]?\d{1,3})", re.ASCII)
_REPEATING = re.compile(
    r"(?<![\w.])(\d{1,9})\.(\d{0,9})\\(?:overline|bar|dot)\s?(?:\{(\d{1,9})\}|(\d))(?!\d)", re.ASCII
)


def decimal_of(numeral: str, decimal_comma: bool = False) -> str | None:
    r"""1234.5 of `1,234.5`. None for marks that make no number: `1 00`, `1,2,3`, `1,00,000`.

    `decimal_comma` decides `1,234`, which is 1.234 with it.
    """
    pieces = _MARKS.split(numeral)
    groups, marks = pieces[::2], [_kind(mark) for mark in pieces[1::2]]
    if not marks:
        return numeral
    one_kind = len(set(marks)) == 1
    # One point always begins decimals, one comma does where the reference says so.
    single = len(marks) == 1 and (marks[0] == "." or (marks[0] == "," and decimal_comma))
    if one_kind and _are_thousands(groups) and not single:
        return "".join(groups)
    front, last = marks[:-1], marks[-1]
    if last in ".," and last not in front and len(set(front)) <= 1 and (not front or _are_thousands(groups[:-1])):
        return f"{''.join(groups[:-1])}.{groups[-1]}"
    return None


def has_decimal_comma(numeral: str) -> bool:
    """Whether this can be read in no other way than with a comma that begins the decimals."""
    marks = [_kind(mark) for mark in _MARKS.findall(numeral)]
    return bool(marks) and marks[-1] == "," and "." in (decimal_of(numeral) or "")


def may_be_list(numeral: str) -> bool:
    """`1,2` is 1.2, or 1 and 2; `1{,}2` and `1 000,2` are one number."""
    return re.fullmatch(r"\d+,\d+", numeral) is not None and has_decimal_comma(numeral)


def join_numerals(text: str, decimal_comma: bool = False) -> str:
    """The text with those numbers joined that are one number wherever they stand."""

    def joined(found: re.Match[str]) -> str:
        if found.string.startswith("/", found.end()) and _MIXED.fullmatch(found[0]):
            return found[0]
        return decimal_of(found[0], decimal_comma) or found[0]

    def argument(found: re.Match[str]) -> str:
        before = found.string[: found.start() - 1]
        return found[0] if may_be_list(found[0]) and not before.endswith(_OF_NUMBERS) else joined(found)

    if re.search(r"(?<!\\);", text):  # (0,5; 1,5): a comma separates nothing here
        text = _BETWEEN_SEMICOLONS.sub(joined, text)
    text = _EXPLICIT_AFTER_COMMA.sub(joined, _EXPLICIT.sub(joined, text))
    return _REPEATING.sub(_fraction, _ARGUMENT.sub(argument, text))


def power_of_ten(text: str) -> str | None:
    r"""The decimal number that `1.5e3`, `1.5 \times 10^{3}` or `10^{-6}` is, when the text is nothing else."""
    typed, latex = _SCIENTIFIC.fullmatch(text), _TIMES_TEN.fullmatch(text)
    if typed is not None:
        factor, exponent = typed.groups()
    elif latex is not None:
        factor, exponent = latex[1] or latex[2] + "1", latex[3] or latex[4] or latex[5]
    else:
        return None
    sign, number = "-" if factor.startswith("-") else "", decimal_of(factor.lstrip("+-"))
    return None if number is None else f"{Decimal(f'{sign}{number}e{exponent}'):f}"


def _kind(mark: str) -> str:
    if mark in (".", ","):
        return mark
    return "," if re.fullmatch(_EXPLICIT_COMMA, mark) else "'" if mark in "'\u2019" else " "


def _are_thousands(groups: list[str]) -> bool:
    first, *rest = groups
    return not rest or (len(first) <= 3 and first[0] != "0" and all(len(group) == 3 for group in rest))


def _fraction(repeating: re.Match[str]) -> str:
    r"""\frac{3}{9} of 0.\overline{3}."""
    whole, start, period = repeating[1], repeating[2], repeating[3] or repeating[4]
    top = int(whole + start + period) - int(whole + start)
    return rf"\frac{{{top}}}{{{'9' * len(period)}{'0' * len(start)}}}"
