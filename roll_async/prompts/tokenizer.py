"""Tokenizers and chat templates."""

from __future__ import annotations

import json
import os
import re
import threading
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING

from roll_async.observe.thoughts import holds_thought, marks_of, opening_at_end, with_thought_closed
from roll_async.prompts.turns import Form, Turn, forms_for, keeps_thoughts, marked, with_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BatchDecode = Callable[[list[list[int]]], Sequence[str]]
"""Token ids of texts to texts."""
EncodedChat = tuple[list[int], str]
"""(token ids of a prompt, opening mark of the thought that it ends inside or nothing)."""
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
    "You are a helpful assistant.<|im_end|>\n' }}{% endif %}"
)
TEMPLATES: dict[str, str | None] = {
    "native": None,
    "chatml": _CHATML,
    "qwen2_5": _QWEN_SYSTEM + _CHATML,
    "qwen3": _CHATML,
    "base": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
}
"""By `data_args.template`; None = the one the tokenizer brings."""


_PROBE = "1 2  3   4\n5\n\n6 \n 7\n"
"""Of digits, which every vocabulary has."""
_BLOCK = 1 << 14
"""Characters that are searched at a time: a search of megabytes would hold the interpreter."""
_IMPORTING = threading.Lock()
"""transformers makes its names while it is imported: one that a second thread asks for meanwhile may be missing."""
_SHAPES = 1024
"""Chats of so many shapes (roles and keys of the turns) are remembered with the form that the template takes."""


def load_tokenizer(folder: str, *, proves: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. `proves`: it has to give back what it is given. Raises ValueError
    naming what is missing or lost.
    """
    with _IMPORTING:
        from transformers import AutoTokenizer

    if os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, "tokenizer_config.json")):
        raise ValueError(f"{folder} holds no tokenizer (tokenizer_config.json is missing)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"no tokenizer for {folder}: neither a folder here nor to be fetched: {reason}") from error
    if proves and (lost := lost_by(tokenizer)):
        raise ValueError(
            f"the tokenizer of {folder} loses {', '.join(lost)}: the policy would read and write another text than is "
            "meant; name a model whose tokenizer decodes what it encodes, or make this one anew (byte-level, as its "
            "family's)"
        )
    return tokenizer


def told(
    tokenizer: PreTrainedTokenizerBase, template: str, time: str | None, variables: Mapping[str, object]
) -> PreTrainedTokenizerBase:
    """The tokenizer, whose chat template reads these variables, and is told this date when it asks for one (ISO 8601;
    None = the clock). Raises ValueError for a variable that the template (a key of `TEMPLATES`) does not read.
    """
    for name, problem in unread(tokenizer, template, variables).items():
        raise ValueError(f"template_kwargs.{name}: {problem}")
    given = dict(variables)
    if time is not None:
        # A variable of the template hides the function that Transformers offers under this name (Llama 3 asks for it).
        given["strftime_now"] = datetime.fromisoformat(time).strftime
    if given:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **given)
    return tokenizer


def unread(tokenizer: PreTrainedTokenizerBase, template: str, variables: Mapping[str, object]) -> dict[str, str]:
    """Each variable that the template does not read, with what to do about it."""
    if not variables:
        return {}
    known = _variables(tokenizer, template)
    remedy = (
        f"name one that it reads ({', '.join(sorted(known))}), or remove it" if known else "it reads none: remove it"
    )
    return {
        name: f"{json.dumps(value)} has no effect: the chat template ({template}) reads no such variable; {remedy}"
        for name, value in variables.items()
        if name not in known
    }


def _variables(tokenizer: PreTrainedTokenizerBase, template: str) -> set[str]:
    """What a template takes from its caller beside the chat and the tokenizer's own tokens."""
    from jinja2 import TemplateError, nodes
    from jinja2.meta import find_undeclared_variables

    # As it is compiled for rendering: Transformers has statements of its own (`generation`).
    from transformers.utils.chat_template_utils import _compile_jinja_template

    source = tokenizer.get_chat_template(TEMPLATES[template])
    try:
        tree = _compile_jinja_template(source).environment.parse(source)
    except TemplateError as error:
        raise ValueError(f"the chat template ({template}) is none: {error}") from error
    # To Jinja a name that is set under a condition is one of the caller's, too. It is if the template asks for it
    # before: `if date_string is not defined`, `date_string | default(...)`.
    made = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    asked = {
        node.node.name
        for node in tree.find_all((nodes.Test, nodes.Filter))
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, nodes.Name)
    }
    given = {"messages", *signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    return find_undeclared_variables(tree) - (made - asked) - given


def lost_by(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What decode(encode(probe)) does not give back: spaces, line breaks, or marks of the tokenizer's own template.

    A leading space is left out, and so is white space beside a special token: some families (Llama 2, Phi 3) put it
    there or take it away.
    """
    probe = _given_back(tokenizer, _PROBE).removeprefix(" ")
    whites = {"spaces": " ", "line breaks": "\n"}
    lost = [name for name, white in whites.items() if probe.count(white) != _PROBE.count(white)]
    if not lost and re.sub(r"\S+", ".", probe) != re.sub(r"\S+", ".", _PROBE):
        lost.append("the places of spaces and line breaks")
    if not lost and tokenizer.chat_template is not None:
        lost += _marks_lost_by(tokenizer)
    return lost


def _marks_lost_by(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    from jinja2 import TemplateError

    chat = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]
    try:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError):
        return []  # one that refuses a plain chat is told of by what renders the run's chats
    assert isinstance(text, str)
    # (?!) fits nowhere, for a tokenizer without special tokens.
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(special_marks(tokenizer)))) or '(?!)'})", text)
    rest, lost = _given_back(tokenizer, text), []
    for piece in filter(None, map(str.strip, pieces)):
        before, found, after = rest.partition(piece)
        if found and not before.strip():
            rest = after
        else:
            lost.append(f"the template's {piece!r}")
    return lost[:3]


def _given_back(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # The clean-up would take away spaces before punctuation.
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(decoded, str), "one sequence, one text"
    return decoded


def special_marks(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The texts of the special tokens, with which a template marks its turns."""
    return frozenset(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


def without_marks(text: str, marks: Collection[str]) -> str:
    """Text from outside cannot speak in the name of the template: its marks are removed, also those that form when the
    text on both sides of a removed one is joined. The time is linear in the text, however deep marks are nested.
    """
    if not any(mark in text for mark in marks):
        return text
    # Longest first: of alternatives, re takes the first that fits.
    pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
    reach = max(map(len, marks)) - 1  # characters of a mark at most on one side of a seam
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


def without_mark(chat: Sequence[Turn], mark: str) -> tuple[Turn, ...]:
    """The chat, whose contents' texts do not say the mark."""
    return tuple(with_texts(turn, lambda _, text: without_marks(text, (mark,))) for turn in chat)


class Opening:
    """What a tokenizer puts before each text: the beginning-of-sequence token in most families that have one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        whole, plain = (tokenizer("1", add_special_tokens=adds)["input_ids"] for adds in (True, False))
        assert isinstance(whole, list) and isinstance(plain, list), "one text, one list"
        start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        self._ids = array("i", whole[:start])
        self._first = tokenizer.convert_ids_to_tokens(whole[0]) if start else ""

    def before(self, text: str) -> array:
        """[n] int32: its tokens, none where the text has them: many templates write them themselves."""
        # White space may be left of the statements of a template. To an empty text there is nothing to say.
        return array("i") if not text or text.lstrip().startswith(self._first) else self._ids


def batch_decoder(
    tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], stops: Sequence[str] = ()
) -> BatchDecode:
    """What decodes answers, without special tokens other than those that mark thoughts, and without the end mark that
    was sampled, which may be another kind of token, or the one of `stops` that ended it; as small as it can be, since
    it is sent to other processes.

    Most tokenizers decode by their Rust part alone. A process that gets only this part needs no transformers, whose
    import takes two seconds and 100 MB.
    """
    from transformers import PreTrainedTokenizerFast

    own_way = getattr(type(tokenizer), "_decode", None) is not PreTrainedTokenizerFast._decode
    if own_way or tokenizer.clean_up_tokenization_spaces:
        decode = partial(tokenizer.batch_decode, skip_special_tokens=True)
    else:
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        decode = partial(tokenizer.backend_tokenizer.decode_batch, skip_special_tokens=True)
    if marks := _special_thought_tokens(tokenizer):
        decode = partial(_decode_with_marks, decode, marks)
    return partial(_decoded, decode, frozenset(end_ids), stops)


def _decoded(
    decode: BatchDecode, end_ids: Collection[int], stops: Sequence[str], answers: list[list[int]]
) -> Sequence[str]:
    texts = decode([ids[:-1] if ids and ids[-1] in end_ids else ids for ids in answers])
    if not stops:
        return texts
    last = decode([[token for token in ids[-1:] if token not in end_ids] for ids in answers])
    return [without_stop(text, end, stops) for text, end in zip(texts, last, strict=True)]


def without_stop(text: str, last: str, stops: Sequence[str]) -> str:
    """An answer, cut before the stop string that ended it. `last`: the text of its last token, in which that one ends:
    an earlier turn of the same text may hold one, too; empty: of an end mark.

    >>> without_stop("so 4</a>.", ">.", ("</a>",))
    'so 4'
    """
    if not last:
        return text
    found = (text.find(stop, max(0, len(text) - len(last) - len(stop))) for stop in stops)
    return text[: min((at for at in found if at >= 0), default=len(text))]


def _special_thought_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Those special tokens of which marks of thoughts consist, as texts."""
    written = "\0".join(text for marks in marks_of(tokenizer) for text in marks.texts)
    added = tokenizer.added_tokens_decoder.items()
    return {number: token.content for number, token in added if token.special and token.content in written}


def _decode_with_marks(decode: BatchDecode, marks: Mapping[int, str], batch: list[list[int]]) -> list[str]:
    """What stands between the marks is decoded as `decode` does."""
    runs = [[(is_mark, list(run)) for is_mark, run in groupby(ids, marks.__contains__)] for ids in batch]
    texts = iter(decode([run for row in runs for is_mark, run in row if not is_mark]))
    return [
        "".join("".join(marks[token] for token in run) if is_mark else next(texts) for is_mark, run in row)
        for row in runs
    ]


class ChatEncoder:
    """Chats to token ids, ready for the assistant's answer, with the tokenizer's opening once. Raises ValueError for an
    unknown template or a tokenizer without one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        if template not in TEMPLATES:
            raise ValueError(f"template {template!r} is not one of {' | '.join(TEMPLATES)}")
        self.tokenizer, self._template, self._opening = tokenizer, TEMPLATES[template], Opening(tokenizer)
        self._marks = marks_of(tokenizer)
        if self._template is None and tokenizer.chat_template is None:
            raise ValueError("template native: this tokenizer has no chat template; choose chatml or base")
        self._source = tokenizer.get_chat_template(self._template)
        self._demands_thoughts = not keeps_thoughts(self._source)
        self._form_of = lru_cache(_SHAPES)(self._find_form)

    def render(self, chats: Sequence[Sequence[Turn]], references: Sequence[str | None] = ()) -> list[EncodedChat | str]:
        """Each chat as tokens, or why the template refused it, or which text of the chat it leaves out. `references`:
        answers that are trained on; before one without a thought, the thought that the template opened is closed, so
        that the answer is not trained as one.
        """
        texts = [self._text(chat) for chat in chats]
        for number, reference in enumerate(references):
            text, refused = texts[number]
            if not refused and reference is not None and not holds_thought(reference, self._marks):
                texts[number] = with_thought_closed(text, self._marks), False
        good = [text for text, refused in texts if not refused]
        encoded = iter(self.tokenizer(good, add_special_tokens=False)["input_ids"] if good else [])
        return [
            text if refused else ([*self._opening.before(text), *next(encoded)], opening_at_end(text, self._marks))
            for text, refused in texts
        ]

    def answered(self, chat: Sequence[Turn], *, last: bool, end: int | None) -> list[tuple[list[int], list[bool]]]:
        """(tokens, which of them the assistant says) of a whole chat: one row where the template goes on from turn to
        turn, and one more for each answer that it says otherwise once another follows, as those without their thoughts.
        `last`: the last answer alone is trained on. `end`: the token that ends an answer. What follows the last answer
        is left out. Raises ValueError for a chat that the template refuses.
        """
        mark = "" if end is None else self.tokenizer.convert_ids_to_tokens(end)
        answers = [index for index, turn in enumerate(chat) if turn["role"] == "assistant"]
        found: list[tuple[list[int], list[bool]]] = []
        said = ""
        for index in answers[-1:] if last else answers:
            asked, whole = self._said(chat[:index]), self._said(chat[: index + 1], answered=True)
            if not whole.startswith(asked):
                raise ValueError(f"messages.{index}: the chat template does not begin its answer as it asks for one")
            if not found or not asked.startswith(said):
                found.append(([*self._opening.before(asked)], []))
                said = ""
            tokens, mask = found[-1]
            # In the pieces in which a run would see and sample them.
            tokens += self._tokens(asked[len(said) :])
            mask += [False] * (len(tokens) - len(mask))
            before, closed, _ = whole[len(asked) :].rpartition(mark) if mark else ("", "", "")
            answer = before + closed or whole[len(asked) :]
            tokens += self._tokens(answer)
            if not closed and end is not None and index == answers[-1]:
                tokens.append(end)
            mask += [True] * (len(tokens) - len(mask))
            said = asked + answer
        return found

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []  # type: ignore[return-value]

    def _said(self, chat: Sequence[Turn], *, answered: bool = False) -> str:
        if not chat:
            return ""
        shape, _ = marked(chat, thoughts=self._demands_thoughts)
        form = self._form_of(json.dumps(shape))
        if isinstance(form, str):
            raise ValueError(form)
        return self._apply(form.written(chat), answered=answered)

    def _text(self, chat: Sequence[Turn]) -> tuple[str, bool]:
        shape, _ = marked(chat, thoughts=self._demands_thoughts)
        form = self._form_of(json.dumps(shape))
        if isinstance(form, str):
            return form, True
        try:
            return self._apply(form.written(chat)), False
        except ValueError as error:
            return str(error), True

    def _find_form(self, shape: str) -> Form | str:
        """The form in which the template says all of a chat of this shape, or why there is none."""
        chat, keys = marked(json.loads(shape), thoughts=self._demands_thoughts)
        refused, left_out = "", None
        for form in forms_for(self._source, chat):
            try:
                text = self._apply(form.written(chat))
            except ValueError as error:
                refused = refused or str(error)
                continue
            lost = [key for mark, key in keys.items() if mark not in text]
            if not lost:
                return form
            left_out = lost if left_out is None or len(lost) < len(left_out) else left_out
        if left_out is None:
            return refused
        role = chat[int(left_out[0].partition(".")[0])]["role"]
        return (
            f"the chat template leaves out messages.{left_out[0]} (role {role}); take it out of the row, or use a "
            "model or data_args.template that says it"
        )

    def _apply(self, chat: list[dict[str, object]], *, answered: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                chat,  # type: ignore[arg-type]
                chat_template=self._template,
                add_generation_prompt=not answered,
                tokenize=False,
            )
        # Templates are programs: what they do not expect raises Python's own errors, too.
        except (TemplateError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        assert isinstance(text, str)
        return text
