"""Chats to tokens: by the model's own template, so that what was sampled before is never encoded again.

The turns of the policy stand in the chat as they were sampled. Its text has to begin with what was said so far, and
only what comes after the last turn is encoded. So a client that reorders JSON, trims white space or drops call ids
still continues the stored tokens. A template that says something else than it was given (such as one that leaves the
thoughts of earlier turns out) does not: its text begins a branch.

After a prompt that came as tokens (a question with tools) there is no chat to render: `between` gives what stands
between two turns.

The mark that ended a turn was sampled, and is not said again. Another one in its place stands for the close of the turn
(`<|endoftext|>` for `<|im_end|>`), or, with a template that has no close, is followed by the head of the next turn: a
model of the GLM family that samples `<|user|>` after a call is told `<|user|><|observation|>`. Its own token stays, and
the result is not taken for a turn of the user.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from roll_async.agents.messages import Message
from roll_async.agents.processes.beside import Beside
from roll_async.observe.thoughts import marks_of, opening_at_end
from roll_async.prompts.call_forms import PROBE_TOOL, plain_id, turn_of, written_by
from roll_async.prompts.end_marks import EndMarks, leading_marks
from roll_async.prompts.tokenizer import TEMPLATES, Opening, special_marks, without_marks
from roll_async.prompts.tool_calls import HERMES, HERMES_EXAMPLE, CallFormat, offer, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_INLINE_CHARACTERS = 100_000
_ANSWER = "roll-async-answer"
"""Stands for a turn of the policy, after which a template says what `between` looks for."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn of the policy inside a chat."""

    position: int
    """Index of its message in the chat."""
    text: str
    """As sampled, without its end mark."""
    before: str
    """What the template had put before it: after the turn before, or from the beginning."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text."""

    text: str
    """All of it, with the sampled turns as the template renders them."""
    rest: str | None
    """What comes after the last sampled turn; None: the text does not go on from those turns, white space at their ends
    aside.
    """


class Renderer(Protocol):
    """Between messages and tokens. All of it may take long for long chats."""

    @property
    def calls(self) -> CallFormat:
        """How the model writes calls of tools, as its prompt tells it to."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], turns: Sequence[SampledTurn]
    ) -> Rendered:
        """Raises ValueError for a chat that the template refuses."""
        ...

    def encode(self, text: str) -> array:
        """[n] int32: a chat from its beginning."""
        ...

    def encode_after(self, last_token: int | None, rest: str) -> array:
        """[n] int32: what comes after a turn that ended with this token; None: with none."""
        ...

    def said(self, token_ids: Sequence[int]) -> str:
        """A turn without the mark that ended it."""
        ...


class TemplateRenderer:
    """`Renderer` of a tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "native") -> None:
        self._tokenizer, self._template = tokenizer, TEMPLATES[template]
        self.ends, self._opening = EndMarks.of(tokenizer, template), Opening(tokenizer)
        self._added = tokenizer.added_tokens_decoder.keys()
        self._reserved = special_marks(tokenizer)
        self._beside = Beside(_load, tokenizer.backend_tokenizer) if tokenizer.is_fast else None
        question = {"role": "user", "content": "?"}
        # Asked of the template itself: no tokenizer declares what its template renders.
        self._written = written_by(self._render_probe)
        self._id_of = plain_id if self._written is None else self._written.id_of
        # One that offers tools tells the model a form of calls, too: it may not where no form reads them.
        self._knows_tools = self._written is not None and "roll_probe" in self._try([question], [PROBE_TOOL])
        self.calls = (self._written.form if self._written is not None else HERMES).with_thoughts(
            marks_of(tokenizer, self._template)
        )
        # Twice: templates whose roles must alternate count an answer before a result, too (Mistral's).
        answer, said = {"role": "assistant", "content": "!"}, {"role": "tool", "content": "roll-said"}
        said["tool_call_id"] = self._id_of("roll_probe", 0)
        self._knows_tool_role = self._try([question, *(answer, said) * 2], None).count("roll-said") == 2
        self._knows_system = "roll-said" in self._try([{"role": "system", "content": "roll-said"}, question], None)
        logger.info(
            "calls of tools are read in the form of %s, %s; results are turns of role %s",
            self.calls.family,
            "which the chat template writes"
            if self._written is not None
            else "since the chat template has none we read",
            "tool" if self._knows_tool_role else "user",
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], turns: Sequence[SampledTurn]
    ) -> Rendered:
        """Raises ValueError for a chat that the template refuses."""
        chat, sampled = self._plain(messages, tools, {turn.position for turn in turns})
        opened = [self._opened(turn) for turn in turns]
        text, end = "", None
        # A template that opens the thought of a turn to come does not write the mark again for one that was: it is part
        # of what the turn said. Some do, so both are tried.
        for heads in (opened, [""] * len(turns)) if any(opened) else (opened,):
            for place, turn, head in zip(sampled, turns, heads, strict=True):
                place["content"] = head + turn.text
            text = self._apply(chat, tools if self._knows_tools else None)
            if (end := _end_of(turns, text)) is not None:
                break
        return Rendered(text, None if end is None else text[end:])

    def _opened(self, turn: SampledTurn) -> str:
        """The mark of the thought that the template opened before a turn, and the white space behind it."""
        mark = opening_at_end(turn.before, self.calls.thoughts)
        return turn.before[turn.before.rindex(mark) :] if mark else ""

    def between(self, last_token: int, results: Sequence[str]) -> array:
        """[n] int32: the rest of the policy's turn, the results of its tools, the head of its next turn. `last_token`:
        the last one of the turn; an end mark that was sampled is not said twice. A template that knows no `tool` role
        gets the results in one turn of the user. Raises ValueError for one that leaves them out.
        """
        messages = [Message(role="user", content="?"), Message(role="assistant", content=_ANSWER)]
        # Who reads the whole conversation takes a mark of a thought for the model's own.
        thoughts = {mark for marks in self.calls.thoughts for mark in (marks.opening, marks.closing)}
        results = [without_marks(result, thoughts) for result in results]
        chat, _ = self._plain([*messages, *(Message(role="tool", content=result) for result in results)], (), ())
        text = self._apply(chat, None)
        _, found, rest = text.partition(_ANSWER)
        if not found or not all(without_marks(result, self._reserved) in rest for result in results):
            raise ValueError(
                f"the chat template does not render turns of role {chat[-1]['role']}, and no model would read the "
                "results of tools; use none, or a model whose chat template knows them"
            )
        return self.encode_after(last_token, rest)

    def encode(self, text: str) -> array:
        """[n] int32: a chat from its beginning, with what the tokenizer puts there."""
        return self._opening.before(text) + self._encoded(text)

    def encode_after(self, last_token: int | None, rest: str) -> array:
        """[n] int32: what comes after a turn that ended with this token; a mark is not said again."""
        if last_token not in self.ends.ids:
            return self._encoded(rest)
        mark = self.decode([last_token])
        rest = self._unsaid(mark, rest)
        if last_token not in self._added:
            return self._encoded(rest)
        # Behind the mark, as the template has it: some tokenizers take or add white space beside one. Never merged.
        ids = self._encoded(mark + rest)
        return ids[ids.index(last_token) + 1 :]

    def _unsaid(self, mark: str, rest: str) -> str:
        """Without the mark, or the close that it stands for, with which the template goes on after a turn."""
        found = leading_marks(rest, self._reserved)
        if mark in (found if self.ends.closes else found[:1]):
            closing = found[: found.index(mark) + 1]
        else:
            closing = found[:1] if self.ends.closes else []
        return rest.lstrip().removeprefix("".join(closing)) if closing else rest

    def said(self, token_ids: Sequence[int]) -> str:
        """A turn without the mark that ended it."""
        ended = len(token_ids) > 0 and token_ids[-1] in self.ends.ids
        return self.decode(token_ids[:-1] if ended else token_ids)

    def _encoded(self, text: str) -> array:
        """Of a long text in another process: a list of a million tokens, and what Rust remembers of each, are made and
        dropped while the interpreter is held.
        """
        if self._beside is not None and len(text) > _INLINE_CHARACTERS:
            return array("i", self._beside.call(_encode, text))
        # Only the ids: every further list of a long text is one more that the garbage collector walks through.
        found = self._tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
        )
        return array("i", found["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Marks included."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _plain(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], positions: Collection[int]
    ) -> tuple[list[dict], list[dict]]:
        """(chat as the template takes it, those of its turns that stand at `positions`)."""
        chat: list[dict] = []
        sampled: list[dict] = []
        ids: dict[str, str] = {}  # of the newest calls: by the client's, the one that the template is given
        num_calls = 0
        told: list[str] | None = None  # results that the next turn of the user holds
        for position, message in enumerate(messages):
            if message.role == "assistant":
                chat += [{"role": "assistant"}] if position in positions else self._turns(message, num_calls)
                sampled += chat[-1:] if position in positions else []
                numbered = enumerate(message.tool_calls, num_calls)
                ids = {call.call_id: self._id_of(call.name, i) for i, call in numbered}
                num_calls += len(message.tool_calls)
                told = None
                continue
            said = message.content if message.role == "system" else without_marks(message.content, self._reserved)
            if message.role == "tool" and self._knows_tool_role:
                answered = message.call_id if message.call_id in ids else next(iter(ids), "")
                ours = ids.pop(answered, None) or self._id_of("tool", num_calls)
                chat.append({"role": "tool", "content": said, "tool_call_id": ours})
            elif message.role == "tool":
                # Where roles must alternate, results and what the user says to them are one turn.
                if told is None:
                    chat.append({"role": "user", "content": (told := [])})
                told.append(f"<tool_response>\n{said}\n</tool_response>")  # as Qwen's templates
            elif message.role == "user" and told is not None:
                told.append(said)
                told = None
            else:
                chat.append({"role": message.role, "content": said})
                told = None
        for turn in chat:
            if isinstance(turn.get("content"), list):
                turn["content"] = "\n".join(turn["content"])
        return self._with_system(chat, tools), sampled

    def _with_system(self, chat: list[dict], tools: Sequence[Mapping[str, object]]) -> list[dict]:
        """The chat with what the template does not say: the tools, and who is who in a system message."""
        if tools and not self._knows_tools:
            text = offer(tools, HERMES_EXAMPLE if self._written is None else self._written.example)
            if chat and chat[0]["role"] == "system":
                chat[0]["content"] += text
            else:
                chat.insert(0, {"role": "system", "content": text.strip()})
        if not self._knows_system and len(chat) > 1 and chat[0]["role"] == "system" and chat[1]["role"] == "user":
            chat[:2] = [{"role": "user", "content": f"{chat[0]['content']}\n{chat[1]['content']}"}]
        return chat

    def _turns(self, message: Message, number: int) -> list[dict]:
        """One of the assistant; for a template that takes one call a turn, one for each call."""
        content, calls, written = message.content, message.tool_calls, self._written
        if written is None or not calls:
            return [{"role": "assistant", "content": write(content, calls)}]
        if not self._knows_tool_role:
            # As it would be sampled: templates that let no result follow calls count a turn with calls as none, too.
            groups = [calls] if written.takes_several else [[call] for call in calls]
            texts = [turn_of(self._render_probe, written.message("", group, number)) for group in groups]
            return [{"role": "assistant", "content": "\n".join(filter(None, (content, *texts)))}]
        if written.takes_several:
            return [written.message(content, calls, number)]
        return [written.message(content if i == 0 else "", [call], number + i) for i, call in enumerate(calls)]

    def _render_probe(self, chat: list[dict]) -> str:
        return self._try(chat, [PROBE_TOOL])

    def _try(self, chat: list[dict], tools: Sequence[Mapping[str, object]] | None) -> str:
        try:
            return self._apply(chat, tools)
        except ValueError:
            return ""

    def _apply(self, chat: list[dict], tools: Sequence[Mapping[str, object]] | None) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                chat,
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
            )
        # Templates are programs: what they do not expect raises Python's own errors, too.
        except (TemplateError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        assert isinstance(text, str)
        return text


_LOADED: list[Any] = []
"""In a process beside this one: the fast tokenizer of its renderer."""


def _load(tokenizer: Any) -> None:
    # Both may be set in a tokenizer's file; transformers sets them in each of its calls.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _LOADED[:] = [tokenizer]


def _encode(text: str) -> bytes:
    # Bytes: a pickled list of a million numbers would hold both interpreters.
    return array("i", _LOADED[0].encode(text, add_special_tokens=False).ids).tobytes()


def _end_of(turns: Sequence[SampledTurn], text: str) -> int | None:
    """Where the last of the turns ends in a chat that begins with them; None if it does not."""
    end = 0
    for turn in turns:
        if text.startswith(turn.before, end) and text.startswith(turn.text, end + len(turn.before)):
            end += len(turn.before) + len(turn.text)
            continue
        # White space at the ends of a turn: templates trim it, or write what the model samples first.
        before, said = turn.before.rstrip(), turn.text.strip()
        if not text.startswith(before, end):
            return None
        end = _after_spaces(text, end + len(before))
        if not text.startswith(said, end):
            return None
        end += len(said)
        tail = turn.text[len(turn.text.rstrip()) :]
        end += len(tail) if text.startswith(tail, end) else 0
    return end


def _after_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
