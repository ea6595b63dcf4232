"""Tools: the calls in an answer of the model are run, and their results are appended as tokens for its next turn.

    completion --find_calls--> none: the conversation is complete
                         +---> run in parallel --> codec.tool_turn(results) --> tokens of the next turn, loss mask 0

The model's own tokens are only read (decoded to find the calls), never rebuilt from text.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roll_async.prompts.row_tools import RowTools, tools_of_row
from roll_async.schema import Completion, ExpertRecord, FinishReason, Prompt, Sample, join_records, merge_runs

logger = logging.getLogger(__name__)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Tool(Protocol):
    """A function that the model can call."""

    async def __call__(self, arguments: Mapping[str, object]) -> str:
        """The result as the model shall read it. What it raises, the model reads as an error."""
        ...


class ToolCodec(Protocol):
    """Converts between tokens and text; `prompts/tool_turns.py`."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def tool_turn(self, last_token: int, results: Sequence[str]) -> Sequence[int]:
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


class Transcript:
    """One conversation as tokens: the prompt, the model's turns (trained) and the tools' (masked)."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self._tokens, self._logprobs, self._mask = array("i"), array("f"), bytearray()
        self._runs: list[tuple[int, int]] = []
        self._experts: list[ExpertRecord] = []
        self._generation_s = 0.0
        self._finish_reason, self._replica = FinishReason.ABORT, ""
        self.num_turns = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def token_ids(self) -> array:
        """Prompt and everything after it: what the next turn continues."""
        return self.prompt.token_ids + self._tokens if self._tokens else self.prompt.token_ids

    @property
    def recorded_positions(self) -> int:
        """Positions whose experts the turns so far have recorded."""
        return sum(record.num_positions for record in self._experts)

    def add_completion(self, completion: Completion) -> None:
        """A turn of the model."""
        self._tokens += completion.token_ids
        self._logprobs += completion.logprobs
        self._mask += b"\x01" * len(completion.token_ids)
        self._runs += completion.version_runs
        if completion.experts is not None:
            self._experts.append(completion.experts)
        self._generation_s += completion.generation_s
        self._finish_reason, self._replica = completion.finish_reason, completion.replica
        self.num_turns += 1

    def add_masked(self, token_ids: Sequence[int]) -> None:
        """Tokens that the model did not sample: mask 0, log-prob 0, the version of the turn before them."""
        assert self._runs, "tools answer a turn of the model"
        self._tokens.extend(token_ids)
        self._logprobs.extend([0.0] * len(token_ids))
        self._mask += b"\x00" * len(token_ids)
        self._runs.append((self._runs[-1][0], len(token_ids)))

    def end(self, reason: FinishReason) -> None:
        """Set another finish reason than that of the last turn."""
        self._finish_reason = reason

    def sample(self, name: str) -> Sample:
        """The whole conversation, not scored yet."""
        return Sample(
            sample_id=name,
            prompt_token_ids=self.prompt.token_ids,
            response_token_ids=self._tokens,
            loss_mask=bytes(self._mask),
            behaviour_logprobs=self._logprobs,
            version_runs=merge_runs(self._runs),
            finish_reason=self._finish_reason,
            generation_s=self._generation_s,
            num_turns=self.num_turns,
            experts=join_records(self._experts),
            replica=self._replica,
        )


class ToolCompletionCallback:
    """Called with every completion of a conversation: runs the tools it asks for, or says that it is complete.

    Sub-class it for another format of calls (`find_calls`) or of the finished sample (`postprocess`).
    """

    def __init__(
        self, tools: Mapping[str, Tool], codec: ToolCodec, *, max_turns: int = 8, timeout_s: float = 30.0
    ) -> None:
        self._tools, self._codec = tools, codec
        self._max_turns, self._timeout_s = max_turns, timeout_s
        self.num_calls = self.num_failures = 0

    async def __call__(self, transcript: Transcript, completion: Completion) -> Sequence[int] | None:
        """Tokens to append before the model goes on; None when the conversation is complete."""
        stopped = completion.finish_reason is FinishReason.STOP and len(completion.token_ids) > 0
        if not stopped or transcript.num_turns >= self._max_turns:
            return None
        calls = self.find_calls(self._codec.decode(completion.token_ids))
        if not calls:
            return None
        row = tools_of_row(transcript.prompt.extra)
        results = await asyncio.gather(*(self._run(call, row) for call in calls))
        return self._codec.tool_turn(completion.token_ids[-1], results)

    def find_calls(self, text: str) -> list[ToolCall]:
        """Calls in the order of the text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and
        Hermes models write them.
        """
        return [parse_call(text[start:end].strip()) for start, end in call_spans(text)]

    def postprocess(self, transcript: Transcript, name: str) -> Sample:
        """The sample of a complete conversation: tokens as they were, masks and versions beside them."""
        return transcript.sample(name)

    async def _run(self, call: ToolCall, row: RowTools) -> str:
        """The result, or the error as the model shall read it."""
        self.num_calls += 1
        known = call.name in self._tools and row.allows(call.name)
        problem = call.problem or ("" if known else f"there is no tool '{call.name}'")
        if not problem:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._tools[call.name](row.completed(call.name, call.arguments))
            except TimeoutError:
                problem = f"no result within {self._timeout_s:g} s"
            except Exception as error:  # the tool is user code: whatever it raises is its result
                problem = f"{type(error).__name__}: {error}"
                logger.info("tool %s: %s", call.name, problem)
        self.num_failures += 1
        return f"error: {problem}"


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
        call = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "too deep"
        return ToolCall(name="", problem=f"the call is not valid JSON ({reason})")
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(name="", problem='a call is {"name": string, "arguments": object}')
    return ToolCall(name=name, arguments=arguments)
