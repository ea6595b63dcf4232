"""Short answers compared as words: exact match and F1 after SQuAD's normalisation (Rajpurkar et al. 2016), or ours."""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping

from roll_async.rewards.answers import after_thinking, check_answer_format, final_answer, format_of
from roll_async.rewards.verdict import Verdict

_COMMAND = re.compile(r"\\(?:text[a-z]*|math[a-z]+|mbox|emph|operatorname)\s?(?=\{)|\\!")
_SPACE = re.compile(r"\\[,;: ]|(?<!\d)~|~(?!\d)")
"""Of LaTeX around the words of an answer or a reference; what is left of it is punctuation. 3~4 is a range."""
_SQUAD_ARTICLE = re.compile(r"\b(a|an|the)\b")
_SQUAD_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset({"a", "an", "the"})
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
"""A word of letters and digits; Chinese and Japanese characters stand alone: nothing separates their words."""


class QuestionAnswer:
    """Score = F1 over words with the best of the references; `acc` = exact match; both also as metrics `f1`, `em`.

    The answer is what is boxed, tagged `<answer>` or on an `Answer:` line, else all that follows the thinking (then
    `format` is 0). The reference is a text or a JSON list of equally good texts.
    """

    def __init__(self, answer_format: str = "auto") -> None:
        self._format = check_answer_format(answer_format)

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        stated = final_answer(text, format_of(extra, self._format))
        answer = self._words(_plain(after_thinking(text) if stated is None else stated))
        references = _references(ground_truth)
        f1 = max(overlap_f1(answer, self._words(_plain(r))) for r in references)
        exact = float(any(answer == self._words(_plain(r)) for r in references))
        return Verdict(
            score=self._score(f1, exact),
            acc=exact,
            format=float(stated is not None),
            reason="" if exact else f"{' '.join(answer)[:80]!r} is not {references[0][:80]!r}",
            metrics={"f1": f1, "em": exact},
        )

    def _words(self, text: str) -> list[str]:
        return squad_words(text)

    def _score(self, f1: float, exact: float) -> float:
        return f1


class WordAnswer(QuestionAnswer):
    """The same with `words` for SQuAD's normalisation: hyphens separate, Chinese and Japanese count by character."""

    def _words(self, text: str) -> list[str]:
        return words(text)


class ExactAnswer(QuestionAnswer):
    """The same with score = exact match."""

    def _score(self, f1: float, exact: float) -> float:
        return exact


def _plain(text: str) -> str:
    # Without LaTeX a tilde is one: "3~4 days".
    return _SPACE.sub(" ", _COMMAND.sub("", text)) if "\\" in text else text


def squad_words(text: str) -> list[str]:
    """SQuAD's `normalize_answer`, cut at white space: lower case, ASCII punctuation deleted, articles deleted.
    "The Eiffel-Tower!" gives eiffeltower.
    """
    # In SQuAD's order: punctuation first, so that "the-" is an article.
    return _SQUAD_ARTICLE.sub(" ", text.lower().translate(_SQUAD_PUNCTUATION)).split()


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles: "The Eiffel-Tower!" gives eiffel, tower."""
    # NFKC: full-width letters and ligatures are the plain ones; don't stays one word.
    folded = unicodedata.normalize("NFKC", text).casefold().replace("'", "")
    return [word for word in _WORD.findall(folded) if word not in _ARTICLES]


def overlap_f1(answer: list[str], reference: list[str]) -> float:
    """Harmonic mean of precision and recall over the multiset of words; 1 when both are empty."""
    if not answer or not reference:
        return float(answer == reference)
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference))  # 2PR / (P + R), P and R over the same `common`


def _references(ground_truth: str) -> list[str]:
    if ground_truth.lstrip().startswith("["):
        try:
            found = json.loads(ground_truth)
        except json.JSONDecodeError:
            return [ground_truth]
        if isinstance(found, list) and found:
            return [str(item) for item in found]
    return [ground_truth]
