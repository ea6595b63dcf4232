"""Chats to tokens: by the model's own template, so that what was sampled before is never encoded again.

The turns of the policy stand in the template as marks; what the template puts between the marks is compared with what
it put there before, and only what comes after the last mark is encoded. So a client that reorders JSON, trims white
space or drops call ids still continues the stored tokens. A template that says something else than it was given (such
as one that leaves the thoughts of earlier turns out) does not: its text begins a branch.

After a prompt that came as tokens (a question with tools) there is no chat to render: `between` gives what stands
between two turns.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from roll_async.agents.messages import Message
from roll_async.agents.processes.beside import Beside
from roll_async.observe.thoughts import ThoughtMarks, marks_of
from roll_async.prompts.tokenizer import TEMPLATES, special_marks, without_marks
from roll_async.prompts.tool_calls import HERMES, CallFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INLINE_CHARACTERS = 100_000
_ANSWER = "roll-async-answer"
"""Stands for a turn of the policy, after which a template says what `between` looks for."""
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "roll_probe", "description": "?", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn of the policy inside a chat."""

    position: int
    """Index of its message in the chat."""
    text: str
    """Text as sampled, without the end-of-turn token."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text: `parts[i]` precedes the i-th sampled turn, the last one after all of them."""

    parts: tuple[str, ...]
    text: str
    """The chat with the sampled turns inserted, as the template renders them."""
    says_turns_as_sampled: bool
    """White space at the ends of a turn aside."""


class Renderer(Protocol):
    """Between messages and tokens. All of it may take long for long chats."""

    @property
    def calls(self) -> CallFormat:
        """How the model writes calls of tools."""
        ...

    @property
    def thoughts(self) -> Sequence[ThoughtMarks]:
        """Marks of the model's thoughts."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], turns: Sequence[SampledTurn]
    ) -> Rendered:
        """Raises ValueError for a chat that the template refuses."""
        ...

    def encode(self, text: str) -> array: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class TemplateRenderer:
    """`Renderer` of a tokenizer and its chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str = "native", calls: CallFormat = HERMES
    ) -> None:
        self._tokenizer, self._template, self.calls = tokenizer, TEMPLATES[template], calls
        self.thoughts = marks_of(tokenizer, self._template)
        # Of a text that is no token, transformers gives the id of the unknown one.
        ends = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>"))
        unknown = tokenizer.unk_token_id
        self.end_ids = frozenset(i for i in ends if isinstance(i, int) and i != unknown)
        self._reserved = special_marks(tokenizer)
        self._beside = Beside(_load, tokenizer.backend_tokenizer) if tokenizer.is_fast else None
        question = {"role": "user", "content": "?"}
        # Asked of the template itself: no tokenizer declares what its template renders.
        self._knows_tools = "roll_probe" in self._try([question], [_PROBE_TOOL])
        self._knows_tool_role = "roll-said" in self._try(
            [question, {"role": "assistant", "content": "!"}, {"role": "tool", "content": "roll-said"}], None
        )
        call = {"type": "function", "function": {"name": "roll_probe", "arguments": {}}}
        self._knows_calls = "roll_probe" in self._try(
            [question, {"role": "assistant", "content": "", "tool_calls": [call]}, question], None
        )
        self._knows_system = "roll-said" in self._try([{"role": "system", "content": "roll-said"}, question], None)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], turns: Sequence[SampledTurn]
    ) -> Rendered:
        """Raises ValueError for a chat that the template refuses."""
        # With id(self): no text of a chat holds a mark by accident.
        marks = [f"@roll{number}-{id(self):x}@" for number in range(len(turns))]
        plain = self._plain(messages, tools)
        offset = len(plain) - len(messages)  # a system message that the template adds for the tools
        with_marks = self._apply(_with(plain, turns, marks, offset), tools)
        text = self._apply(_with(plain, turns, [turn.text for turn in turns], offset), tools) if turns else with_marks
        parts, rest = [], with_marks
        for mark in marks:
            part, found, rest = rest.partition(mark)
            if not found:
                return Rendered((with_marks,), text, False)  # a turn is left out, or stands elsewhere
            parts.append(part)
        parts.append(rest)
        forms = (_joined(parts, [t.text for t in turns]), _joined(parts, [t.text.strip() for t in turns]))
        return Rendered(tuple(parts), text, text in forms)

    def between(self, last_token: int, results: Sequence[str]) -> array:
        """[n] int32: the rest of the policy's turn, the results of its tools, the head of its next turn. `last_token`:
        the last one of the turn; an end mark that was sampled is not said twice. A template that knows no `tool` role
        gets the results as turns of the user. Raises ValueError for one that leaves them out.
        """
        role = "tool" if self._knows_tool_role else "user"
        said = [without_marks(result, self._reserved) for result in results]
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        text = self._apply([*chat, *({"role": role, "content": each} for each in said)], None)
        _, found, rest = text.partition(_ANSWER)
        if not found or not all(each in rest for each in said):
            raise ValueError(f"the chat template does not render turns of role {role}")
        ids = self.encode(rest)
        # By id, since there is no text of the sampled turn here. An end that is also the unknown token counts, too.
        ends = {self._tokenizer.eos_token_id, *self.end_ids}
        return ids[1:] if last_token in ends and ids and ids[0] in ends else ids

    def encode(self, text: str) -> array:
        """[n] int32. Of a long text in another process: a list of a million tokens, and what Rust remembers of each,
        are made and dropped while the interpreter is held.
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

    def _plain(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[dict]:
        chat = [self._message(message) for message in messages]
        if tools and not self._knows_tools:
            text = self.calls.offer(tools)
            if chat and chat[0]["role"] == "system":
                chat[0]["content"] += text
            else:
                chat.insert(0, {"role": "system", "content": text.strip()})
        if not self._knows_system and len(chat) > 1 and chat[0]["role"] == "system" and chat[1]["role"] == "user":
            chat[:2] = [{"role": "user", "content": f"{chat[0]['content']}\n{chat[1]['content']}"}]
        return chat

    def _message(self, message: Message) -> dict:
        match message.role:
            case "assistant" if message.tool_calls and self._knows_calls:
                calls = [
                    {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
                    for c in message.tool_calls
                ]
                return {"role": "assistant", "content": message.content, "tool_calls": calls}
            case "assistant":
                return {"role": "assistant", "content": self.calls.write(message.content, message.tool_calls)}
            case "tool" if not self._knows_tool_role:
                said = without_marks(message.content, self._reserved)
                return {"role": "user", "content": f"<tool_response>\n{said}\n</tool_response>"}  # as Qwen's templates
            case "system":
                return {"role": "system", "content": message.content}
            case role:
                return {"role": role, "content": without_marks(message.content, self._reserved)}

    def _try(self, chat: list[dict], tools: list[dict] | None) -> str:
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


def _with(chat: list[dict], turns: Sequence[SampledTurn], texts: Sequence[str], offset: int) -> list[dict]:
    """The chat with these texts in the places of the sampled turns."""
    chat = list(chat)
    for turn, text in zip(turns, texts, strict=True):
        chat[turn.position + offset] = {"role": "assistant", "content": text}
    return chat


def _joined(parts: Sequence[str], turns: Sequence[str]) -> str:
    return "".join(part + turn for part, turn in zip(parts, [*turns, ""], strict=True))
