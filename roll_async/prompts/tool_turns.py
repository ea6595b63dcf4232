"""Tool results as tokens, in the form the chat template gives them, without touching the model's own tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from roll_async.prompts.tokenizer import TEMPLATES, special_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "roll-async-answer"
_BLOCK = 1 << 14
"""Characters that are searched at a time: a search of megabytes would hold the interpreter."""


class ChatToolCodec:
    """What stands between two turns of the model: the rest of its own turn, the results, the head of its next turn.

    The template is asked for a chat with an answer and a chat that goes on; the difference is encoded. A template that
    knows no `tool` role gets the results as a user turn. Raises ValueError for a template that renders neither.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "native") -> None:
        self._tokenizer, self._template = tokenizer, TEMPLATES[template]
        self._role = "tool"
        end_id = tokenizer.eos_token_id
        self._end_ids = {i for i in (end_id, tokenizer.convert_tokens_to_ids("<|im_end|>")) if isinstance(i, int)}
        self._reserved = special_marks(tokenizer)
        try:
            self._between("x")
        except ValueError:
            self._role = "user"
            self._between("x")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the model's tokens, marks such as <tool_call> included."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        assert isinstance(text, str), "one sequence, one text"
        return text

    def tool_turn(self, last_token: int, results: Sequence[str]) -> list[int]:
        """Tokens that follow the model's turn. `last_token`: its last one; an end-of-turn token is not said twice."""
        text = self._between(*(without_marks(r, self._reserved) for r in results))
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[1:] if last_token in self._end_ids and ids and ids[0] in self._end_ids else ids

    def _between(self, *results: str) -> str:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        tools = [{"role": self._role, "content": result} for result in results]
        text = self._render([*chat, *tools])
        _, found, rest = text.partition(_ANSWER)
        if not found or not all(result in rest for result in results):
            raise ValueError(f"the chat template does not render turns of role {self._role}")
        return rest

    def _render(self, chat: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                chat, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses tool results: {error}") from error
        assert isinstance(text, str)
        return text


def without_marks(text: str, marks: Collection[str]) -> str:
    """Text from outside cannot speak in the name of the template: its marks are removed, also those that form when the
    text on both sides of a removed one is joined. The time is linear in the text, however deep marks are nested.
    """
    if not any(mark in text for mark in marks):
        return text
    pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
    reach = max(map(len, marks)) - 1
    kept: list[str] = []
    """Characters, among which there is no mark."""
    for start in range(0, len(text), _BLOCK):
        rest = text[start : start + _BLOCK]
        position = 0
        while True:
            seam = "".join(kept[-reach:]) if reach else ""
            found = pattern.search(seam + rest[position : position + reach])
            if found is not None and found.start() < len(seam):
                del kept[found.start() - len(seam) :]
                position += found.end() - len(seam)
                continue
            found = pattern.search(rest, position)
            kept.extend(rest[position : found.start() if found is not None else len(rest)])
            if found is None:
                break
            position = found.end()
    return "".join(kept)
