"""The tokens that end a turn of a model: one set for its engines, its chats, its parsers and its supervised rows.

A model folder names them in up to four places, which need not agree: generation_config.json, which engines read, else
config.json; the tokenizer's own end of sequence; and what the chat template puts after a turn. The union is used.

Most templates close a turn (`hello<|im_end|>`), and whatever mark was sampled stands for that close. Those of GLM do
not: the head of the next turn is the mark (`hello<|user|>`), and only the same one is said already.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_async.prompts.tokenizer import TEMPLATES, special_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _ANSWER = "roll-async-question", "roll-async-answer"
_FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True, slots=True)
class EndMarks:
    """Of one tokenizer with one template."""

    ids: tuple[int, ...]
    """Of all sources, ascending."""
    own: int | None
    """What the template has after an answer: the end of a supervised row. None: the template has no mark there, and the
    tokenizer no end of sequence.
    """
    closes: bool
    """The template closes a turn; else the head of the next one is its end."""
    difference: str
    """What the engines would not stop at by themselves, and who says so; empty = the sources agree."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, template: str = "native") -> EndMarks:
        """`template`: of `data_args.template`. The files are those beside the tokenizer, where it was loaded from.
        Raises ValueError for a file that names no tokens.
        """
        files = {name: _of_file(tokenizer.name_or_path, name) for name in _FILES}
        own_eos = tokenizer.eos_token_id
        # Of an end of sequence that is no token, transformers gives the id of the unknown one.
        has_eos = isinstance(own_eos, int) and tokenizer.convert_ids_to_tokens(own_eos) == str(tokenizer.eos_token)
        eos = (own_eos,) if has_eos else ()
        known = {i for ids in (*files.values(), eos) for i in ids}
        after, closes = _of_template(tokenizer, TEMPLATES[template], known)
        sources = {**files, "the tokenizer": eos, "the chat template": after}
        engine = next((ids for name in _FILES if (ids := files[name])), ())
        ids = tuple(sorted(known.union(after)))
        differences = [
            f"{tokenizer.decode([i])!r} ({i}; by {', '.join(name for name, said in sources.items() if i in said)})"
            for i in ids
            if i not in engine
        ]
        return cls(
            ids=ids,
            own=next(iter((*after, *eos)), None),
            closes=closes,
            difference=", ".join(differences) if engine else "",
        )


def leading_marks(text: str, marks: Collection[str]) -> list[str]:
    """The marks with which a text begins, white space before the first aside.

    >>> leading_marks(" <|a|><|b|> <|a|>", {"<|a|>", "<|b|>"})
    ['<|a|>', '<|b|>']
    """
    # By their lengths, which are few: some families have thousands of marks. The longest that fits counts.
    lengths = sorted({len(mark) for mark in marks}, reverse=True)
    found: list[str] = []
    position = len(text) - len(text.lstrip())
    while mark := next((m for size in lengths if (m := text[position : position + size]) in marks), ""):
        found.append(mark)
        position += len(mark)
    return found


def _of_file(folder: str, name: str) -> tuple[int, ...]:
    if not folder:  # a tokenizer that was made here
        return ()
    from transformers.utils.hub import cached_file

    # A folder, or what the hub gave with the tokenizer.
    path = cached_file(
        folder, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    if path is None:
        return ()
    with open(path, encoding="utf-8") as file:
        try:
            values = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no JSON object")
    ids = values.get("eos_token_id")
    if ids is None and isinstance(inner := values.get("text_config"), dict):  # of a model that also sees or hears
        ids = inner.get("eos_token_id")
    found = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if bad := [i for i in found if not isinstance(i, int) or isinstance(i, bool)]:
        raise ValueError(f"{path}: eos_token_id: expected a token id or a list of them, got {bad[0]!r}")
    return tuple(i for i in found if i >= 0)  # -1 stands for none


def _of_template(
    tokenizer: PreTrainedTokenizerBase, template: str | None, known: set[int]
) -> tuple[tuple[int, ...], bool]:
    """(what it has after a turn of the model, if that is a mark; whether it closes turns). `known`: ends by the other
    sources.
    """
    marks = special_marks(tokenizer)

    def token_of(mark: str) -> int:
        found = tokenizer.convert_tokens_to_ids(mark)
        assert isinstance(found, int), "a special token has an id"
        return found

    def after_answer(*roles: str) -> tuple[str, list[str]]:
        """(what comes before the question, the marks after the answer)."""
        question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
        chat = [question, answer, *({"role": role, "content": "?"} for role in roles)]
        text = _tried(tokenizer, template, chat)
        return text.partition(_QUESTION)[0], leading_marks(text.partition(_ANSWER)[2], marks)

    if closing := after_answer()[1]:
        ids = [token_of(mark) for mark in closing]
        return (next((i for i in ids if i in known), ids[0]),), True
    heads = []
    for role in ("user", "tool"):
        before, found = after_answer(role)
        if found and role == "user" and found[0] not in before:
            # Not the head of a turn, which stands before the question, too: an end that the last turn does not have.
            return (token_of(found[0]),), True
        heads += [token_of(mark) for mark in found[:1]]
    return tuple(dict.fromkeys(heads)), not heads


def _tried(tokenizer: PreTrainedTokenizerBase, template: str | None, chat: list[dict[str, str]]) -> str:
    """The chat as text; empty where the template refuses it."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    # Templates are programs: what they do not expect raises Python's own errors, too.
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError):
        return ""
    assert isinstance(text, str)
    return text
