"""Constraints a program can check: the kinds of IFEval (Zhou et al. 2023, arXiv 2311.07911), one function each, read as
strictly as they are written (`ifeval_strict`). `ifeval_readings.py` has IFEval's own readings.

Arguments have IFEval's names. Every pattern is linear in the length of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from roll_async.rewards.language import known_language, language_of

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")  # don't is one word
_SENTENCE_END = re.compile(r"[.!?]+[\"'\u2019\u201d)\]]{0,3}(?=\s|$)")
_UNORDERED = re.compile(r"^[ \t]{0,20}[*-][ \t]{1,20}\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]+\]")
_TITLE = re.compile(r"<<([^\n<>]+)>>")
_RULER = re.compile(r"\s?\*\*\*\s?")
_FENCE = re.compile(r"```(?:json|JSON)?")
_CHOICES = ("my answer is yes.", "my answer is no.", "my answer is maybe.")


def sentences(text: str) -> list[str]:
    """Pieces that hold a word, cut behind sentence ends."""
    return [piece for piece in _SENTENCE_END.split(text) if _WORD.search(piece)]


def compare(count: int, relation: str, wanted: int) -> bool:
    """`relation`: at least, less than, at most, more than, exactly. Raises ValueError for another."""
    match relation:
        case "at least":
            return count >= wanted
        case "less than":
            return count < wanted
        case "at most":
            return count <= wanted
        case "more than":
            return count > wanted
        case "exactly":
            return count == wanted
    raise ValueError(f"relation {relation!r} is not one of at least | less than | at most | more than | exactly")


def _count_word(text: str, word: str) -> int:
    # Not \b, which does not hold behind a word that ends in a sign, such as C++.
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def keywords_exist(text: str, *, keywords: Sequence[str]) -> bool:
    return all(_count_word(text, word) for word in keywords)


def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return compare(_count_word(text, keyword), relation, frequency)


def forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(_count_word(text, word) for word in forbidden_words)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def number_sentences(text: str, *, num_sentences: int, relation: str = "at least") -> bool:
    return compare(len(sentences(text)), relation, num_sentences)


def number_words(text: str, *, num_words: int, relation: str = "at least") -> bool:
    return compare(len(_WORD.findall(text)), relation, num_words)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Paragraphs are separated by `***`; an empty one in the middle breaks the constraint."""
    parts = [part.strip() for part in _RULER.split(text)]
    # A ruler at the start or at the end leaves an empty piece, which is no paragraph.
    inner = parts[1:-1]
    return all(inner) and sum(map(bool, parts)) == num_paragraphs


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are separated by an empty line; counted from 1."""
    parts = [part.strip() for part in re.split(r"\n[ \t]{0,20}\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    word = _WORD.search(parts[nth_paragraph - 1].split(maxsplit=1)[0])
    return bool(word) and word[0].casefold() == first_word.strip().casefold()


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(_PLACEHOLDER.findall(text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    marker = postscript_marker.strip().casefold()
    spaced = {"p.s.": r"p\.\s?s\.", "p.p.s": r"p\.\s?p\.\s?s"}.get(marker, re.escape(marker))
    return re.search(rf"^\s{{0,20}}{spaced}", text.casefold(), re.MULTILINE) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    return len(_UNORDERED.findall(text)) == num_bullets


def constrained_response(text: str) -> bool:
    return any(choice in text.casefold() for choice in _CHOICES)


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    return sum(bool((a or b).strip()) for a, b in _HIGHLIGHT.findall(text)) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s{{0,3}}\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    try:
        json.loads(_FENCE.sub("", text).strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    return any(found.strip() for found in _TITLE.findall(text))


def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().casefold().startswith(prompt_to_repeat.strip().casefold())


def end_checker(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').casefold().endswith(end_phrase.strip().casefold())


def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'  # one mark alone encloses nothing


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str = "at least") -> bool:
    return compare(sum(word.isupper() for word in _WORD.findall(text)), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper()


def english_lowercase(text: str) -> bool:
    return text.islower()


def response_language(text: str, *, language: str) -> bool:
    """Raises ValueError for a language that is not told apart."""
    return language_of(text) == known_language(language)


def no_comma(text: str) -> bool:
    return "," not in text and "\uff0c" not in text  # the second is that of Chinese and Japanese


CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "keywords:existence": keywords_exist,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_words": number_words,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
    "language:response_language": response_language,
}
"""By IFEval's `instruction_id`: all of them."""
