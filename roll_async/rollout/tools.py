"""Tools: the calls in an answer of the model are run, and their results are appended as tokens for its next turn.

    completion --find_calls--> none: the conversation is complete
                         +---> run in parallel --> codec.between(results) --> tokens of the next turn, loss mask 0

The model's own tokens are only read (decoded to find the calls), never rebuilt from text.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from roll_async.observe.outside import OutsideError, asked, encodable, plain, text_of
from roll_async.prompts.row_tools import RowTools, tools_of_row
from roll_async.rollout.trace_tree import TraceTree
from roll_async.schema import Completion, FinishReason, Prompt, Sample

logger = logging.getLogger(__name__)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LONGEST_RESULT = 20_000
"""Characters of a result, or of an error."""
_MOST_CALLS = 64
"""Of one turn; those beyond it are not run."""


class Tool(Protocol):
    """A function that the model can call."""

    async def __call__(self, arguments: Mapping[str, object]) -> str:
        """The result as the model shall read it. What it raises, the model reads as an error."""
        ...


class ToolCodec(Protocol):
    """Converts between tokens and text; `agents/rendering.py: TemplateRenderer`."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def between(self, last_token: int, results: Sequence[str]) -> Sequence[int]:
        """Tokens between the end of the model's turn, whose last token is given, and the beginning of its next."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call found in a completion."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot be run; the model is told."""
    call_id: str = ""
    """Of an agent's API; empty where tools are called in the text alone."""


class ToolRuns:
    """Runs calls of functions, which are user code: whatever they give or raise becomes text that the model reads."""

    def __init__(self, functions: Mapping[str, Callable[[Mapping[str, object]], object]], *, timeout_s: float) -> None:
        """A function gives its result, or an awaitable of it."""
        self._functions, self._timeout_s = functions, timeout_s
        self.num_calls = self.num_failures = 0

    async def results(self, calls: Sequence[ToolCall], row: RowTools) -> list[str]:
        """Of the calls of one turn, in their order; they run in parallel. `row`: what the prompt's row allows and adds
        to the arguments.
        """
        surplus = f"not run: one turn may hold {_MOST_CALLS} calls"
        checked = [call if i < _MOST_CALLS else replace(call, problem=surplus) for i, call in enumerate(calls)]
        return list(await asyncio.gather(*(self._run(call, row) for call in checked)))

    async def _run(self, call: ToolCall, row: RowTools) -> str:
        self.num_calls += 1
        known = call.name in self._functions and row.allows(call.name)
        problem = call.problem or ("" if known else self._unknown(call.name, row))
        if not problem:
            try:
                arguments = row.completed(call.name, call.arguments)
                start = partial(self._functions[call.name], arguments)
                return await asked(start, partial(text_of, longest=_LONGEST_RESULT), self._timeout_s)
            except TimeoutError:
                problem = f"no result within {self._timeout_s:g} s"
            except OutsideError as error:
                problem = error.said
                logger.info("tool %s: %s", call.name, error)
        self.num_failures += 1
        return encodable(f"error: {problem}"[:_LONGEST_RESULT])

    def _unknown(self, name: str, row: RowTools) -> str:
        return f"there is no tool '{name}'"


class ToolCompletionCallback(ToolRuns):
    """Called with every completion of a conversation: runs the tools it asks for, or says that it is complete.

    Sub-class it for another format of calls (`find_calls`) or of the finished sample (`postprocess`).
    """

    def __init__(
        self, tools: Mapping[str, Tool], codec: ToolCodec, *, max_turns: int = 8, timeout_s: float = 30.0
    ) -> None:
        super().__init__(tools, timeout_s=timeout_s)
        self._codec, self._max_turns = codec, max_turns

    async def __call__(self, prompt: Prompt, tree: TraceTree, completion: Completion) -> Sequence[int] | None:
        """Tokens to append before the model goes on; None when the conversation is complete. `tree`: what was said so
        far, the completion included.
        """
        # A turn that was cut at its length may hold half a call, and has left no room for a result.
        stopped = completion.finish_reason is FinishReason.STOP and len(completion.token_ids) > 0
        if not stopped or len(tree.turns) >= self._max_turns:
            return None
        calls = self.find_calls(self._codec.decode(completion.token_ids))
        if not calls:
            return None
        results = await self.results(calls, tools_of_row(prompt.extra))
        return self._codec.between(completion.token_ids[-1], results)

    def find_calls(self, text: str) -> list[ToolCall]:
        """Calls in the order of the text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and
        Hermes models write them.
        """
        return [parse_call(text[start:end].strip()) for start, end in call_spans(text)]

    def postprocess(self, tree: TraceTree, name: str) -> Sample:
        """The sample of a complete conversation: tokens as they were, masks and versions beside them."""
        return tree.answer(name)


def call_spans(text: str, *, unclosed: bool = False) -> Iterator[tuple[int, int]]:
    """(start, end) of what stands between the marks of each call, in time linear in the text. `unclosed`: the last one
    may lack its end.
    """
    start = text.find(_OPEN)
    while start >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        if end < 0:
            if unclosed:
                yield start, len(text)
            return
        yield start, end
        start = text.find(_OPEN, end + len(_CLOSE))


def parse_call(text: str) -> ToolCall:
    """The call that `{"name": ..., "arguments": {...}}` is, or says that it cannot be. Never evaluated."""
    try:
        call = plain(json.loads(text, parse_constant=_no_number))
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        return ToolCall(name="", problem=f"the call is not valid JSON ({reason})")
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(name="", problem='a call is {"name": string, "arguments": object}')
    return ToolCall(name=name, arguments=arguments)


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")
