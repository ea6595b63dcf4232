"""Tools: the calls in an answer of the model are run, and their results are appended as tokens for its next turn.

    completion --find_calls--> none: the conversation is complete
                         +---> run in parallel --> codec.between(results) --> tokens of the next turn, loss mask 0

The model's own tokens are only read (decoded to find the calls), never rebuilt from text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from roll_async.observe.outside import OutsideError, asked, encodable, text_of
from roll_async.observe.thoughts import opening_at_end
from roll_async.prompts.row_tools import RowTools, tools_of_row
from roll_async.prompts.tool_calls import CallFormat, ToolCall, name_of
from roll_async.rollout.trace_tree import TraceTree
from roll_async.schema import Completion, FinishReason, Prompt, Sample

logger = logging.getLogger(__name__)

_LONGEST_RESULT = 20_000
"""Characters of a result, or of an error."""
_MOST_CALLS = 64
"""Of one turn; those beyond it are not run."""
_PROMPT_END = 64
"""Tokens of a prompt that are read for the mark of a thought: one may be letters."""
_ANY = RowTools()


class Tool(Protocol):
    """A function that the model can call."""

    async def __call__(self, arguments: Mapping[str, object]) -> str:
        """The result as the model shall read it. What it raises, the model reads as an error."""
        ...


class ToolCodec(Protocol):
    """Converts between tokens and text; `agents/rendering.py: TemplateRenderer`."""

    @property
    def calls(self) -> CallFormat:
        """How the model writes calls."""
        ...

    def said(self, token_ids: Sequence[int]) -> str:
        """A turn of the model without the mark that ended it."""
        ...

    def between(self, last_token: int, results: Sequence[str]) -> Sequence[int]:
        """Tokens between the end of the model's turn, whose last token is given, and the beginning of its next."""
        ...


class Toolbox:
    """Runs calls of functions, which are user code: whatever they give or raise becomes text that the model reads."""

    def __init__(
        self,
        functions: Mapping[str, Callable[[Mapping[str, object]], object]],
        *,
        timeout_s: float,
        schemas: Sequence[Mapping[str, object]] = (),
        tells_names: bool = False,
    ) -> None:
        """A function gives its result, or an awaitable of it. `schemas`: JSON schemas of those that are offered to the
        model. `tells_names`: who calls a function that is not there reads which ones are.
        """
        self._functions, self._timeout_s = functions, timeout_s
        self.schemas, self._tells_names = tuple(schemas), tells_names
        self.num_calls = self.num_failures = 0

    def offered(self, row: RowTools) -> tuple[Mapping[str, object], ...]:
        """Schemas of the functions that a row may call."""
        return tuple(schema for schema in self.schemas if row.allows(name_of(schema)))

    async def run(self, calls: Sequence[ToolCall], row: RowTools = _ANY) -> list[str]:
        """Results of the calls of one turn, in their order; they run in parallel. `row`: what the prompt's row allows
        and adds to the arguments.
        """
        surplus = f"not run: one turn may hold {_MOST_CALLS} calls"
        # Those beyond it have a result, too: the model is told that they were not run.
        checked = [call if i < _MOST_CALLS else replace(call, problem=surplus) for i, call in enumerate(calls)]
        # `gather` keeps the order of the calls.
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
        unknown = f"there is no tool '{name}'"
        if not self._tells_names:
            return unknown
        there = [name for name in self._functions if row.allows(name)]
        return f"{unknown}; there are: {', '.join(there) or 'none'}"


class ToolCompletionCallback:
    """Called with every completion of a conversation: runs the tools it asks for, or says that it is complete.

    Sub-class it for another format of calls (`find_calls`) or of the finished sample (`postprocess`).
    """

    def __init__(
        self, tools: Mapping[str, Tool], codec: ToolCodec, *, max_turns: int = 8, timeout_s: float = 30.0
    ) -> None:
        self.toolbox = Toolbox(tools, timeout_s=timeout_s)
        self._codec, self._max_turns = codec, max_turns

    async def __call__(self, prompt: Prompt, tree: TraceTree, completion: Completion) -> Sequence[int] | None:
        """Tokens to append before the model goes on; None when the conversation is complete. `tree`: what was said so
        far, the completion included.
        """
        # A turn that was cut at its length may hold half a call, and has left no room for a result.
        stopped = completion.finish_reason is FinishReason.STOP and len(completion.token_ids) > 0
        if not stopped or len(tree.turns) >= self._max_turns:
            return None
        codec, ids = self._codec, completion.token_ids
        before = tree.token_ids(tree.turns[-1])[: -len(ids)]
        opened = opening_at_end(codec.said(before[-_PROMPT_END:]), codec.calls.thoughts)
        calls = self.find_calls(opened + codec.said(ids))
        if not calls:
            return None
        results = await self.toolbox.run(calls, tools_of_row(prompt.extra))
        return self._codec.between(completion.token_ids[-1], results)

    def find_calls(self, text: str) -> list[ToolCall]:
        """Calls in the order of a turn's text, in the form of the model: `prompts/tool_calls.py`. The text begins with
        the mark of the thought that the prompt opened, if it did, and has no end mark.
        """
        return self._codec.calls.read(text)[1]

    def postprocess(self, tree: TraceTree, name: str) -> Sample:
        """The sample of a complete conversation: tokens as they were, masks and versions beside them."""
        return tree.answer(name)
