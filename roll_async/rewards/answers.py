r"""Where an answer stands in a response. One reader for all text rewards; docs_roll/rewards.md lists the forms.

    boxed          \boxed{18}                                 hashes      #### 18
    answer_line    Answer: 18   2. **Answer:**\n18            tag         <answer>18</answer>
    the_answer_is  so the answer is 18.                       last_number anything ... 18

`auto` takes a box if there is one, else the last of hashes, tag and answer line, else "the answer is". Only what
follows the thinking counts. Every search is linear in the length of the text: it is the model that chooses the text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from roll_async.observe.thoughts import thought_of

ANSWER_FORMATS = ("auto", "boxed", "answer_line", "hashes", "tag", "the_answer_is", "last_number")

MAX_ANSWER_CHARS = 4096
"""What follows `Answer:` is read up to here."""
_SENTENCE_CHARS = 600
# The second form takes \{ and \} away, which are no braces.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(
    r"(?:\\text\{)?[\s,;$&]*(?:\\[()\[\],;! ]|\\q?quad|[\s,;$&])*(?:and|or)?(?:\\[()\[\],;! ]|\\q?quad|[\s,;$&}])*"
)
_BETWEEN_LIMIT = 40  # characters: over a longer text the repetitions of the pattern could backtrack for long
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]{1,3}(-?\w{1,40}(?:[./]\w{1,40})?)(?!\w)")
"""TeX takes one token without braces; models write a whole number so."""
_WORD = re.compile("answer", re.IGNORECASE)
_LEAD = re.compile(
    r"(?:\n(?:_|[^\w\n]){0,20}(?:\d{1,3}[.):][^\w\n]{0,10})?|[.!?;,:)\]}$*>_][ \t]{1,3}[^\w\n]{0,4})"
    r"(?:(?:so|thus|hence|therefore)[, ]{1,2})?(?:my\s{1,3}(?=final))?(?:the\s{1,3})?(?:(?:final|correct)\s{1,3})?$",
    re.IGNORECASE,
)
"""What stands before `Answer:`: the start of a line, perhaps with a number of a list, or the end of a sentence."""
_LEAD_CHARS = 60  # looked at before each `answer`: bounded, so that all of them take linear time
_COLON = re.compile(r"(?:\s{1,3}is)?[ \t*_]{0,6}[:=\uff1a]|[ \t*_]{0,6}\r?\n", re.IGNORECASE)
_IS = re.compile(
    r"(?:\s{1,3}(?:to|of|for)\s[^.\n]{1,60}?)?\s{1,3}(?:is|are|equals|(?:must|would|will|should)\sbe)\b\s{0,3}:?",
    re.IGNORECASE,
)
_MARKUP = " \t\r*_`"
_BULLET = re.compile(r"[-\u2022>]\s{1,4}(?=\S)")
"""Of a list or a quotation on the next line; -5 is a number."""
_DISPLAY = (("\\[", "\\]"), ("$$", "$$"), ("```", "```"))
_SENTENCE_END = re.compile(r"[.!?](?=[\s*\"')]|$)")
_REASON = re.compile(r",?\s(?:because|since|as|which|so|hence|thus|instead\sof|rather\sthan)\s|,\snot\s", re.IGNORECASE)
_MATHEMATICAL = re.compile(r"[-+(\[{<$\\\s*\u2212]*(?:\d|\\[a-zA-Z]|[a-zA-Z]\s?=)")
_HASH_VALUE = re.compile(r"[^A-Za-z\\]*(?:\\.*)?")
"""After `####`, in a line that is not the last one: a value, not the heading of a section."""
_HASHES = re.compile(r"#{4,}([^\n]*)")
_TAGS = re.compile(r"<(/?)answer>", re.IGNORECASE)
_MENTION = re.compile(r"[\s.,:;)`'\"*]*(?:tags?\b|$)", re.IGNORECASE)
"""After an open tag that is only spoken of."""
_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3}){1,8}(?![\d,])(?:\.\d+)?|\d+(?:\.\d+)?(?:/\d+)?|\.\d+)", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Stated:
    """An answer and the form it was stated in, a name of ANSWER_FORMATS other than auto."""

    form: str
    text: str


def stated_answer(text: str, answer_format: str = "auto", num_parts: int = 1) -> Stated | None:
    """The answer stated outside the thinking, or None. With several parts in the reference, that many boxes are one
    answer, joined by commas. Raises ValueError for an unknown format.
    """
    visible = after_thinking(text)
    if answer_format == "auto":
        return _any_form(visible, num_parts)
    reader = _reader(answer_format)
    found = _boxed(visible, num_parts) if answer_format == "boxed" else reader(visible)
    if found is None:
        return None
    inner = joined_boxes(found[1], num_parts) if answer_format != "boxed" else None  # <answer>\boxed{5}</answer>
    return Stated(answer_format, found[1] if inner is None else inner)


def final_answer(text: str, answer_format: str = "auto", num_parts: int = 1) -> str | None:
    """The text of `stated_answer`."""
    stated = stated_answer(text, answer_format, num_parts)
    return None if stated is None else stated.text


def check_answer_format(name: str) -> str:
    """The name itself. Raises ValueError for one that is none of ANSWER_FORMATS."""
    if name not in ANSWER_FORMATS:
        raise ValueError(f"answer_format {name!r} is not one of {' | '.join(ANSWER_FORMATS)}")
    return name


def format_of(extra: Mapping[str, str], default: str) -> str:
    """The row's own `answer_format`, a column of that name, else the domain's. Raises ValueError for an unknown one."""
    return check_answer_format(extra.get("answer_format") or default)


def after_thinking(text: str) -> str:
    """What follows the thought in `<think>` and `</think>`; nothing after one that never ends."""
    return thought_of("", text).rest


def joined_boxes(text: str, num_parts: int) -> str | None:
    r"""The boxes that make the answer, joined by commas: the last `num_parts` when the last one alone has fewer parts,
    and always those that only `and`, `or` or a comma separates: \boxed{1} or \boxed{2} states two values.
    """
    spans = _box_spans(text)
    if not spans:
        return None
    first = len(spans) - 1
    while first and _connected(text, spans[first - 1], spans[first]):
        first -= 1
    if num_parts > 1 and len(split_parts(text[spans[-1][1] : spans[-1][2]])) < num_parts:
        first = min(first, max(0, len(spans) - num_parts))
    contents = (text[start:end].strip() for _, start, end in spans[first:])
    return ", ".join(filter(None, dict.fromkeys(contents)))  # a value boxed twice is stated once


def split_parts(answer: str) -> list[str]:
    """The parts of a list: cut at commas and semicolons outside brackets, at `and` and `or`; the outermost braces of a
    set are none of them.
    """
    text = answer.strip().strip("$").strip()
    text = re.sub(r"\\text\s?\{\s*(and|or)\s*\}|\\(?:left|right)\s?", lambda m: f" {m[1]} " if m[1] else "", text)
    if text.startswith("\\{") and text.endswith("\\}"):
        text = text[2:-2]
    depth, parts, start = 0, [], 0
    for match in re.finditer(r"[(\[{]|[)\]}]|[,;]|\s(?:and|or)\s", text):
        mark = match[0]
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _any_form(text: str, num_parts: int) -> Stated | None:
    boxes = joined_boxes(text, num_parts)
    if boxes is not None:
        return Stated("boxed", boxes)
    found = [(form, at) for form in ("hashes", "tag", "answer_line") if (at := _FORMS[form](text)) is not None]
    best = max(found, key=lambda item: item[1][0], default=None)
    if best is not None and best[0] == "hashes" and not _is_hash_value(text, best[1]):
        best = max((item for item in found if item[0] != "hashes"), key=lambda item: item[1][0], default=None)
    phrase = _the_answer_is(text)
    if phrase is not None and (best is None or (phrase[0] > _end(text, best) and _MATHEMATICAL.match(phrase[1]))):
        return Stated("the_answer_is", phrase[1])
    if best is None:
        return None
    inner = _the_answer_is(best[1][1]) if best[0] == "tag" else None  # <answer>So the answer is 5.</answer>
    return Stated(best[0], best[1][1]) if inner is None else Stated("the_answer_is", inner[1])


def _end(text: str, best: tuple[str, tuple[int, str]]) -> int:
    """Where a phrase must stand to come after this answer: what stands in a tag belongs to it."""
    form, (start, _) = best
    closing = text.lower().find("</answer>", start) if form == "tag" else start
    return len(text) if closing < 0 else closing


_Found = tuple[int, str] | None
"""(where it stands, the answer)."""


def _boxed(text: str, num_parts: int = 1) -> _Found:
    boxes = joined_boxes(text, num_parts)
    return None if boxes is None else (0, boxes)


def _hashes(text: str) -> _Found:
    last = None
    for found in _HASHES.finditer(text):
        line = found[1].rpartition("####")[2].strip(_MARKUP + "#")
        last = (found.start(), line) if line else last
    return last


def _is_hash_value(text: str, found: tuple[int, str]) -> bool:
    line_end = text.find("\n", found[0])
    return line_end < 0 or not text[line_end:].strip() or _HASH_VALUE.fullmatch(found[1]) is not None


def _tag(text: str) -> _Found:
    start, last = -1, None
    for tag in _TAGS.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start >= 0:
            inner, at, start = text[start : tag.start()].strip(), start, -1
            last = (at, inner) if inner else last
    # A stop string may have ended it, which the text is without.
    if last is None and start >= 0 and "\n" not in (inner := text[start:].strip()) and not _MENTION.match(inner):
        return start, inner
    return last


def _answer_line(text: str) -> _Found:
    for word in reversed(list(_WORD.finditer(text))):
        colon = _COLON.match(text, word.end())
        if colon is None or not _leads(text, word.start()):
            continue
        # The line break stays: by it `_line_or_block` knows a next line, where bullets are no signs.
        begin = colon.end() - (text[colon.end() - 1] == "\n")
        answer = _line_or_block(text[begin : begin + MAX_ANSWER_CHARS])
        # A heading above another `Answer:` states nothing.
        if answer and not _WORD.match(answer):
            return word.start(), answer
    return None


def _the_answer_is(text: str) -> _Found:
    for word in reversed(list(_WORD.finditer(text))):
        verb = _IS.match(text, word.end())
        if verb is None:
            continue
        answer = _line_or_block(text[verb.end() : verb.end() + _SENTENCE_CHARS])
        end = _SENTENCE_END.search(answer)
        answer = answer[: end.start()] if end else answer
        reason = _REASON.search(answer)
        answer = (answer[: reason.start()] if reason else answer).strip(_MARKUP + ",")
        if answer:
            return word.start(), answer
    return None


def _last_number(text: str) -> _Found:
    found = deque(_NUMBER.finditer(text), maxlen=1)  # only the last one is kept in memory
    return (found[0].start(), found[0][0].replace("\u2212", "-")) if found else None


_FORMS: dict[str, Callable[[str], _Found]] = {
    "boxed": _boxed,
    "hashes": _hashes,
    "tag": _tag,
    "answer_line": _answer_line,
    "the_answer_is": _the_answer_is,
    "last_number": _last_number,
}


def _reader(answer_format: str) -> Callable[[str], _Found]:
    return _FORMS[check_answer_format(answer_format)]


def _leads(text: str, at: int) -> bool:
    begin = max(0, at - _LEAD_CHARS)
    # The text's start counts as that of a line; a cut inside it does not.
    return _LEAD.search(("x" if begin else "\n") + text[begin:at]) is not None


def _line_or_block(rest: str) -> str:
    r"""The rest of the line, or the next line that is not empty, or the block between \[ and \] or fences there."""
    whole, rest = rest, rest.lstrip(_MARKUP + "\n")
    bullet = _BULLET.match(rest) if "\n" in whole[: len(whole) - len(rest)] else None
    rest = rest[bullet.end() :] if bullet else rest
    for opening, closing in _DISPLAY:
        if rest.startswith(opening):
            inner, closed, _ = rest[len(opening) :].partition(closing)
            if closed and inner.strip():
                return inner.strip()
    return rest.partition("\n")[0].strip(_MARKUP)


def _connected(text: str, before: tuple[int, int, int], after: tuple[int, int, int]) -> bool:
    between = text[before[2] + 1 : after[0]]
    return len(between) <= _BETWEEN_LIMIT and _BETWEEN_BOXES.fullmatch(between) is not None


def _box_spans(text: str) -> list[tuple[int, int, int]]:
    """(start of the command, of the content, end of the content) of complete boxes that hold no other, in order."""
    open_braces: list[tuple[int, int]] = []  # (start, content) of a box, (-1, -1) of another brace
    spans: list[tuple[int, int, int]] = []
    for match in _BRACES.finditer(text):
        if match[0] == "{":
            open_braces.append((-1, -1))
        elif match[0][-1] == "{" and len(match[0]) > 2:
            open_braces.append((match.start(), match.end()))
        elif match[0] == "}" and open_braces:
            start, content = open_braces.pop()
            if start >= 0:
                spans.append((start, content, match.start()))
    spans += [(bare.start(), *bare.span(1)) for bare in _BARE_BOX.finditer(text)]
    spans.sort()
    # Sorted by start, a box that holds another one is followed by it.
    return [span for span, following in pairwise([*spans, (len(text) + 1, 0, 0)]) if following[0] > span[2]]
