r"""Where an answer stands in a response: after the thinking, in the last `\boxed{}`, or on the last `Answer:` line.

Every search is linear in the length of the text: it is the model that chooses the text.
"""

from __future__ import annotations

import re

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(
    r"[^\w\n]{0,20}(?:the\s{1,3})?(?:final\s{1,3})?answer(?:\s{1,3}is)?[ \t*_]{0,6}[:=](.*)", re.IGNORECASE
)
_TAGGED = re.compile(r"<answer>([^<]*)</answer>", re.IGNORECASE)


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; nothing when the thinking was opened and never closed; else the whole text."""
    _, closed, rest = text.rpartition("</think>")
    if closed:
        return rest
    return "" if text.lstrip().startswith("<think>") else text


def final_answer(text: str) -> str | None:
    """The stated answer, outside the thinking: the last box, else the last `Answer:` line, else the last `<answer>`
    tag. None when nothing is stated.
    """
    text = after_thinking(text)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    for line in reversed(text.splitlines()):
        stated = _ANSWER_LINE.match(line.lstrip())
        if stated and stated[1].strip(" \t*_`"):
            return stated[1].strip(" \t*_`")
    tagged = _TAGGED.findall(text)
    return tagged[-1].strip() if tagged else None


def last_boxed(text: str) -> str | None:
    r"""Content of the complete \boxed{...} that starts last; None without one. Escaped braces do not count."""
    open_braces: list[int] = []  # where the content starts for a box, -1 for another brace
    found: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match[0] == "{":
            open_braces.append(-1)
        elif match[0][-1] == "{" and len(match[0]) > 2:
            open_braces.append(match.end())
        elif match[0] == "}" and open_braces:
            start = open_braces.pop()
            if start >= 0 and (found is None or start > found[0]):
                found = (start, match.start())
    return text[found[0] : found[1]].strip() if found else None
