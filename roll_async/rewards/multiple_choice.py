"""Multiple choice: the letters stated as answer are the letters of the reference."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence

from roll_async.rewards.answers import after_thinking, check_answer_format, format_of, stated_answer
from roll_async.rewards.verdict import Verdict, no_answer

_MARKUP = (
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), " or "),
    (re.compile(r"\\(?:land|wedge)(?![A-Za-z])"), " and "),
    (re.compile(r"\\mid(?![A-Za-z])"), "|"),
    (re.compile(r"\\&"), "&"),
    (re.compile(r"\\(?:quad|qquad|to)(?![A-Za-z])|\\[,;:! ()\[\]]|~"), " "),
    (re.compile(r"\\(?:text)?color(?:box)?\s?\{[^{}]{0,30}\}"), ""),
    (re.compile(r"\\[a-zA-Z]{1,20}\s?\{?|\\[{}$]|[{}$*`_\"\u201c\u201d]|</?[a-z]{1,10}>"), ""),
)
"""Of LaTeX and Markdown what stands around a letter, and what stands for a word."""
_TITLE = re.compile(
    r"(?:(?:the\s)?(?:final\s|correct\s)?(?:answer|option|choice)s?(?:\s(?:is|are))?(?:\s?:)?\s+)+(?=[(\[]?[A-Za-z]\b)",
    re.IGNORECASE,
)
_LETTER = r"[(\[<']?([A-Z])[)\]>']?"
_LETTERS = re.compile(rf"{_LETTER}(?:(?:\s{{0,2}}(?:,|;|&|/|\band\b|\+)\s{{0,2}}){{1,2}}{_LETTER})*(?=[\s.:;,!?)(]|$)")
_ONE = re.compile(r"\(?\b([A-Z])\b\)?")
_ANOTHER = re.compile(
    r"\s*,?\s*(?:\b(?:or|nor|vs\.?|not)\b|/|\||->)(?:\s*(?:maybe|perhaps|possibly))?\s*[(\[<]?[A-Z](?![\w'])"
    r"|(?:\s*[(\[<]?[A-Z][)\]>]?(?![\w'.:]))+\s*$"
    r"|\s(?:is|are)\s(?:wrong|incorrect|false|not)\b"
)
"""Behind a letter: one of several, or no answer at all."""
_RUN = re.compile(r"[A-Z]{2,10}")
_ARTICLE = re.compile(r"a\b.*", re.DOTALL)
"""In a sentence, a small a is no letter of a choice."""
_WORD = re.compile(
    r"[AI]['\u2019]|(?:I[^\S\n]+(?:don|do|did|am|was|think|thought|would|could|have|had|can|cannot|will|prefer|like|guess"
    r"|believe|know|say|see|choose|chose|need|want|picked|selected)"
    r"|A[^\S\n]+(?:lot|few|little|bit|couple|number|good|great|large|small|big|huge|long|short|better))\b"
)
"""In "I don't know" and "A lot of" there is no letter of a choice."""
_PHRASE = re.compile(
    r"\b(?:answer|choice|option)s?(?:\s{1,2}is|\s{1,2}are)?\s{0,2}:?\s{0,2}[*(\[]{0,3}([A-Z])\b(?!')", re.IGNORECASE
)


class MultipleChoice:
    """Score 1 iff exactly the right letters are stated: boxed, on an `Answer:` line, in "the answer is (B)", or alone
    on the last line.

    The reference is a letter, several (`A,C`), or the text of a choice; `extra["choices"]` may hold the choices as a
    JSON list (or an object by letter), and then their texts are understood, too.
    """

    def __init__(self, answer_format: str = "auto") -> None:
        self._format = check_answer_format(answer_format)

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        right, choices = reference_letters(ground_truth, extra)
        form = format_of(extra, self._format)
        stated = _stated(text, choices, form)
        if not stated:
            return no_answer(form)
        same = float(stated == right)
        reason = "" if same else f"{','.join(sorted(stated))} is not {','.join(sorted(right))}"
        return Verdict(score=same, acc=same, reason=reason)


def reference_letters(ground_truth: str, extra: Mapping[str, str]) -> tuple[frozenset[str], dict[str, str]]:
    """(right letters, choices by letter) of a row. Raises ValueError for a reference that names none."""
    choices = _choices(extra.get("choices", ""))
    right = _letters(ground_truth, choices, reference=True)
    if not right:
        raise ValueError(f"the reference {ground_truth[:80]!r} names no letter and none of the choices")
    return right, choices


def _stated(text: str, choices: Mapping[str, str], form: str) -> frozenset[str]:
    answer = stated_answer(text, form)
    if answer is not None and (answer.form != "the_answer_is" or not _ARTICLE.fullmatch(answer.text)):
        found = _letters(answer.text, choices)
        if found or answer.form != "the_answer_is":
            return found
    if form not in ("auto", "the_answer_is"):
        return frozenset()
    visible = after_thinking(text)
    phrase = deque((p for p in _PHRASE.finditer(visible) if not _is_word(visible, p.start(1), choices)), maxlen=1)
    # The pattern ignores case for its words; the letter of a choice is a capital.
    if phrase and phrase[0][1].isupper():
        behind = visible[phrase[0].end() :].lstrip(")]*")
        return frozenset() if _ANOTHER.match(_without_markup(behind[:80])) else frozenset(phrase[0][1])
    if form != "auto":
        return frozenset()
    lines = visible.strip().splitlines()
    last = lines[-1] if lines else ""
    alone = len(last) <= 40 and re.fullmatch(r"[\W_]*[A-Z][\W_]*(?:[.):].*)?", last)
    return _letters(last, choices) if alone else frozenset()


def _letters(answer: str, choices: Mapping[str, str], reference: bool = False) -> frozenset[str]:
    r"""{"B"} of "B", "(B)", "\text{B}", "B. Paris" or the text of choice B; {"A", "C"} of "A, C", "A and C" or "AC".
    One of two, as in "A or C", is no answer.
    """
    plain = _without_markup(answer).strip().strip("'")
    # Before the letters: the text of a choice may be one letter itself.
    by_text = [letter for letter, text in choices.items() if _same_text(text, plain)]
    if by_text:
        return frozenset(by_text)
    title = _TITLE.match(plain)
    plain = plain[title.end() :] if title else plain
    if _RUN.fullmatch(plain) and len(set(plain)) == len(plain):
        return frozenset(plain)
    written = answer.strip()
    # As it was written: a letter in bold is no word.
    if not reference and _is_word(written, title.end() if (title := _TITLE.match(written)) else 0, choices):
        return frozenset()
    stated = _LETTERS.match(plain)
    if not stated:
        small = re.fullmatch(r"[(\[]?([a-z])[)\]]?", plain)
        return frozenset(small[1].upper()) if small else frozenset()
    if _ANOTHER.match(plain, stated.end()):
        return frozenset()
    found = frozenset(_ONE.findall(stated[0]))
    return found if not choices or found <= choices.keys() else frozenset()


def _is_word(text: str, at: int, choices: Mapping[str, str]) -> bool:
    """Of the A or I there, unless the text of that choice follows."""
    own = choices.get(text[at : at + 1])
    follows = own and text[at + 1 :].lstrip().casefold().startswith(own.strip().casefold())
    return not follows and _WORD.match(text, at) is not None


def _without_markup(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    for pattern, instead in _MARKUP:
        text = pattern.sub(instead, text)
    return text


def _choices(text: str) -> dict[str, str]:
    if not text:
        return {}
    found: object = json.loads(text)
    if isinstance(found, dict) and isinstance(found.get("text"), list):  # ARC's form: {"text": [...], "label": [...]}
        labels = found.get("label") or _alphabet(found["text"])
        return {str(k): str(v) for k, v in zip(labels, found["text"], strict=True)}
    if isinstance(found, dict):
        return {str(k): str(v) for k, v in found.items()}
    if isinstance(found, list):
        return {k: str(v) for k, v in zip(_alphabet(found), found, strict=True)}
    raise ValueError(f"choices must be a JSON list or object, got {type(found).__name__}")


def _alphabet(items: Sequence[object]) -> list[str]:
    return [chr(ord("A") + i) for i in range(len(items))]


def _same_text(choice: str, answer: str) -> bool:
    return choice.strip().casefold().rstrip(".") == answer.strip().casefold().rstrip(".")
