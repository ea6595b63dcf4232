r"""Thoughts: what a reasoning model writes for itself, between marks of its family, before it answers.

    rendered prompt  ...<|im_start|>assistant\n<think>\n            text of the response  9+9 is 18.</think> 18
                     \_ ends inside a thought                                             \_ thought _/      \_ rest

A template may open the thought itself (DeepSeek R1, QwQ, Qwen3-Thinking), so that no response holds the opening mark;
whether a response is inside a thought follows from both. Which marks there are is asked of the template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks of one family. All of them may be read by a tokenizer as text or as special tokens."""

    opening: str
    closing: str
    head: str = ""
    """Pattern of what the family writes between the thought and the answer."""
    closes_alone: bool = True
    """Whether the closing mark ends nothing but thoughts: then what precedes one is a thought, opened or not."""

    def written(self, thought: str, answer: str) -> str:
        """A response with its thought, unfinished where there is no answer."""
        return f"{self.opening}{thought}{self.closing}{answer}" if answer else f"{self.opening}{thought}"

    @property
    def texts(self) -> tuple[str, ...]:
        """In which the special tokens of the family's thoughts stand."""
        return self.opening, self.closing, self.head.replace("\\", "")


THINK = (ThoughtMarks("<think>", "</think>"),)
"""Without a template to ask, and beside what a template says: policies are asked for it in words, too."""
_FAMILIES = (
    ThoughtMarks("[THINK]", "[/THINK]"),  # Mistral
    ThoughtMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    # Of gpt-oss and of ATEM (Muse) every message ends so, and a thought is one of them.
    ThoughtMarks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        head=r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>|<\|start\|>[^<]*(?:<\|channel\|>[^<]*)?\Z",
        closes_alone=False,
    ),
    ThoughtMarks(
        "to=self<|message|>",
        "<|eom|>",
        head=r"(?:<\|start\|>assistant)?<\|message\|>|<\|start\|>[^<]*\Z",
        closes_alone=False,
    ),
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ThoughtMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtMarks("<thought>", "</thought>"),  # EXAONE Deep
    ThoughtMarks("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi-VL
    ThoughtMarks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)


_LONGEST_END = 256
"""Characters of a prompt in which an opening mark and white space behind it are looked for."""


class Thought(NamedTuple):
    """A response, cut where its last thought ends."""

    thought: str
    """All before the rest, without marks of thoughts."""
    rest: str
    """What follows the last thought as it was written; all of the text where there is none, nothing after an
    unfinished one.
    """
    unfinished: bool
    """The text ends inside a thought."""


def marks_of(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> tuple[ThoughtMarks, ...]:
    """`<think>`, and the marks that stand in the chat template or are tokens of the vocabulary. `template`: used in
    place of the tokenizer's own.
    """
    source = template or tokenizer.chat_template or ""
    source = source if isinstance(source, str) else "\n".join(source.values())  # several by name
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}

    def shown(text: str) -> bool:
        return text in source or text in added

    # Some templates only take thoughts out of earlier turns, and have the closing mark alone.
    found = (each for each in _FAMILIES if shown(each.opening) or (each.closes_alone and shown(each.closing)))
    return (*THINK, *found)


def opening_at_end(rendered: str, marks: Sequence[ThoughtMarks] = THINK) -> str:
    """The mark of the thought that a rendered prompt, or its last characters, ends inside; empty: it ends in none.
    Nothing but white space follows the mark. One in a message of the chat is followed at least by what begins the
    assistant's turn.
    """
    opened = _opened(rendered, marks)
    return "" if opened is None else opened.opening


def with_thought_closed(rendered: str, marks: Sequence[ThoughtMarks] = THINK) -> str:
    """The prompt, whose thought is empty where it ended inside one: as templates write it that offer not to think.

    >>> with_thought_closed("assistant\\n<think>\\n")
    'assistant\\n<think>\\n\\n</think>\\n\\n'
    """
    opened = _opened(rendered, marks)
    if opened is None:
        return rendered
    space = rendered[rendered.rindex(opened.opening) + len(opened.opening) :]
    return f"{rendered}{space}{opened.closing}{space}{space}"


def thought_of(prompt_tail: str, text: str, marks: Sequence[ThoughtMarks] = THINK) -> Thought:
    """The response after a prompt that ends in `prompt_tail`, in time linear in the text. A mark that opens inside a
    thought is text of it: models repeat the one of the template.

    >>> thought_of("assistant\n<think>\n", "9+9 is 18.</think> 18")
    Thought(thought='9+9 is 18.', rest=' 18', unfinished=False)
    """
    pattern, opens, closes = _compiled(tuple(marks))
    inside, begins = _opened(prompt_tail, marks), 0
    for found in pattern.finditer(text):
        if (mark := found[0]) in opens:
            inside = inside or opens[mark]
        elif inside == closes[mark] or (inside is None and closes[mark].closes_alone):
            inside, begins = None, found.end()
    unfinished = inside is not None or _is_cut_opening(text, marks)
    end = len(text) if unfinished else begins
    return Thought(pattern.sub("", text[:end]), _without_head(text[end:], marks), unfinished)


def holds_thought(answer: str, marks: Sequence[ThoughtMarks] = THINK) -> bool:
    """Whether an answer brings a thought of its own."""
    return any(each.opening in answer or each.closing in answer for each in marks)


def continuing(opening: str, answer: str) -> str:
    """An answer with a thought, as what follows a prompt that ends in `opening`: the mark is not said twice."""
    begins = answer.lstrip()
    return begins[len(opening) :].lstrip() if opening and begins.startswith(opening) else answer


@lru_cache(maxsize=64)
def _compiled(
    marks: tuple[ThoughtMarks, ...],
) -> tuple[re.Pattern[str], dict[str, ThoughtMarks], dict[str, ThoughtMarks]]:
    """(any mark, families by opening mark, by closing mark)."""
    opens, closes = {each.opening: each for each in marks}, {each.closing: each for each in marks}
    # Longest first: of alternatives, re takes the first that fits.
    return re.compile("|".join(map(re.escape, sorted((*opens, *closes), key=len, reverse=True)))), opens, closes


def _opened(rendered: str, marks: Sequence[ThoughtMarks]) -> ThoughtMarks | None:
    end = rendered[-_LONGEST_END:].rstrip()  # not a copy of a whole chat
    return next((each for each in marks if end.endswith(each.opening)), None)


def _is_cut_opening(text: str, marks: Sequence[ThoughtMarks]) -> bool:
    """Nothing but the beginning of an opening mark. One character says nothing: `<` may be an answer."""
    begun = text.strip()
    return len(begun) > 1 and any(each.opening.startswith(begun) for each in marks)


def _without_head(rest: str, marks: Sequence[ThoughtMarks]) -> str:
    for each in marks:
        if each.head and (found := re.match(each.head, rest)):
            return rest[found.end() :]
    return rest
