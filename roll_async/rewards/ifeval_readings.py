"""IFEval's own reading of each constraint where it differs from the stricter one of `constraints.py`; the table of both
is in docs_roll/rewards.md. The evaluator's two trained parts are replaced: its splitter (punkt) by rules and a
list of abbreviations, its language detector by ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from roll_async.rewards.constraints import CONSTRAINTS, compare
from roll_async.rewards.language import language_of

_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st jr sr vs etc e.g i.e u.s u.k u.n a.m p.m no vol fig inc ltd co corp dept univ approx est gen "
    "gov hon lt col capt sgt rev sen rep jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat sun "
    "ave blvd rd mt ft al cf ca ed eds pp ph.d b.c a.d d.c".split()
)
_SENTENCE_END = re.compile(r"(\S{0,40}?)([.!?]+)[\"'\u2019\u201d)\]*_]{0,4}(?=\s+(\S)|\s*$)")
_INITIAL = re.compile(r"[A-Z]")
_NUMBER = re.compile(r"[\d.,]+")
_WORD = re.compile(r"\w+")
_EDGES = ".,;:!?()[]{}<>\"'`*_#\u201c\u201d\u2018\u2019"


def number_sentences(text: str, *, num_sentences: int, relation: str = "at least") -> bool:
    return compare(count_sentences(text), relation, num_sentences)


def count_sentences(text: str) -> int:
    """A sentence ends at `.`, `!` or `?` before white space; not behind an abbreviation or an initial, and behind a
    number or an ellipsis only before a capital or a digit. A line break ends none; the heading `1.` of a list is one.
    """
    count, end = 0, 0
    for match in _SENTENCE_END.finditer(text):
        word, mark, following = match[1].lstrip("(\"'[*_").rpartition(" ")[2], match[2], match[3] or ""
        if following:
            if mark == "." and (word.lower() in _ABBREVIATIONS or _INITIAL.fullmatch(word)):
                continue
            if (mark.startswith("..") or _NUMBER.fullmatch(word)) and following.islower():
                continue
        count, end = count + 1, match.end()
    return count + bool(text[end:].strip())


def keywords_exist(text: str, *, keywords: Sequence[str]) -> bool:
    return all(_found(word, text) for word in keywords)


def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return compare(len(_found(keyword.strip(), text)), relation, frequency)


def forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(_found(word, text, r"\b(?:{})\b") for word in forbidden_words)


def number_words(text: str, *, num_words: int, relation: str = "at least") -> bool:
    return compare(len(_WORD.findall(text)), relation, num_words)


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Cut at each empty line; the place counts empty pieces, the number does not."""
    pieces = text.split("\n\n")
    filled = sum(bool(piece.strip()) for piece in pieces)
    piece = pieces[nth_paragraph - 1].strip() if 1 <= nth_paragraph <= filled else ""
    if not piece:
        return False
    word = re.split(r"[.,?!'\"]", piece.split()[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    return filled == num_paragraphs and word.lower() == first_word.lower()


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    spaced = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(marker, re.escape(marker.lower()))
    return re.search(spaced, text.lower()) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    lines = [line.lstrip() for line in text.splitlines()]
    # Two stars begin bold text, and no bullet.
    stars = sum(line.startswith("*") and len(line) > 1 and line[1] != "*" for line in lines)
    return stars + sum(line.startswith("-") for line in lines) == num_bullets


def constrained_response(text: str) -> bool:
    return any(choice in text for choice in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(inner.strip()) for inner in (*single, *double)) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(_found(rf"{section_spliter.strip()}\s?\d+", text, flags=0)) >= num_sections


def json_format(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """In each line, from the first `<<` to the last `>>`."""
    for line in text.splitlines():
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].strip("<> \t"):
            return True
    return False


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str = "at least") -> bool:
    """Between white space, without punctuation at the ends: `A-B` is one word."""
    words = (word.strip(_EDGES) for word in text.split())
    return compare(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and language_of(text) == "en"


def english_lowercase(text: str) -> bool:
    return text.islower() and language_of(text) == "en"


def no_comma(text: str) -> bool:
    return "," not in text


def _found(pattern: str, text: str, form: str = "{}", flags: int = re.IGNORECASE) -> list[str]:
    """The data set's text as a regular expression, as IFEval takes it; as itself where it is none."""
    try:
        return re.findall(form.format(pattern), text, flags)
    except re.error:
        return re.findall(form.format(re.escape(pattern)), text, flags)


READINGS: dict[str, Callable[..., bool]] = {
    **CONSTRAINTS,
    "keywords:existence": keywords_exist,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
"""By IFEval's `instruction_id`: all of them, those that both read alike as they stand there."""
