"""What the fake engines sample, and what a sample must hold because of it: every token says where it stands, every
log-prob for which answer, at which position and with which weights it was sampled.

Token id = position + kind * 2^20, and in the first four tokens of a turn a byte of its name's checksum above that: no
two answers are alike. Kinds: 0 a plain token (decoded as one dot), 1 to 4 the characters of the stop string, 5 a call
of a tool; in trajectories also 6 a character that was rendered (its code instead of the position), 7 the end of a turn
(without position, so that it is one token). Worked example: prompt of 4 tokens, an answer of 6 with
the stop string `</a>`: positions 4 and 5 are plain, 6 to 9 are `<`, `/`, `a`, `>`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

from roll_async.prompts.tool_calls import HERMES
from roll_async.rollout.tools import Tool, ToolCompletionCallback
from roll_async.schema import VersionRuns, WeightVersion
from roll_async.simulator.parts.models import LengthModel, ToolModel, uniform

STOP = "</a>"
_CALL = 5
_KIND = 1 << 20
RENDERED = 6 * _KIND
END = 7 * _KIND
_POSITION = _KIND - 1
_SALT_FROM, _SALTED = 23, 4  # above 20 bits of position and 3 of kind; the byte ends below the sign of int32
_PLAIN = (1 << _SALT_FROM) - 1
_SCALE = 1 << 24
"""Integers below it are exact in float32."""
_NAME_BITS, _PLACE_BITS = 6, 10


@lru_cache(maxsize=4096)
def _name_code(sample: str) -> int:
    return crc32(sample.encode()) % (1 << _NAME_BITS) << _PLACE_BITS


def logprobs_of(sample: str, position: int, runs: Iterable[tuple[WeightVersion, int]]) -> array:
    """Of the tokens of these versions from a position of the text on; exact in float32 up to version 254."""
    name, found = _name_code(sample), array("f")
    for version, count in runs:
        head = ((1 + version) << _NAME_BITS + _PLACE_BITS) + name
        # Exact: the divisor is a power of 2.
        found.extend([-(head + place % 1024) / _SCALE for place in range(position, position + count)])
        position += count
    return found


def sampled_as(logprob: float) -> tuple[WeightVersion, int, int]:
    """(version, code of the answer, position modulo 1024) that a log-prob encodes."""
    code = round(-logprob * _SCALE)
    return (code >> _NAME_BITS + _PLACE_BITS) - 1, code >> _PLACE_BITS & 63, code & 1023


def decode(token_ids: Sequence[int]) -> str:
    """One character per token, a whole call of a tool for its token."""
    text = []
    for token in (each & _PLAIN for each in token_ids):
        kind = token >> 20
        if kind == _CALL:
            call = json.dumps({"name": "sim", "arguments": {"at": token & _POSITION}})
            text.append(f"<tool_call>{call}</tool_call>")
        elif token >= RENDERED:
            text.append("$" if token == END else chr(token - RENDERED))
        else:
            text.append(STOP[kind - 1] if kind else ".")
    return "".join(text)


def is_sampled(token: int) -> bool:
    """By the policy, the end of a turn aside, which is also rendered."""
    return token & _PLAIN < RENDERED


def position_of(token: int) -> int:
    """Of a sampled token."""
    return token & _POSITION


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """What the engine would sample for one turn, left alone: positions `start` to `end`."""

    start: int
    end: int
    calls: bool
    """Its last token calls a tool."""
    stops: bool
    """Its last tokens are the stop string."""
    marked: bool = False
    """Its last token is `END`."""
    name: str = ""
    """Of the request that it answers."""

    @property
    def stop_begins(self) -> int:
        """Position of the stop string."""
        return self.end - len(STOP)

    def tokens(self, first: int, last: int) -> array:
        """Ids from one position to another; beyond the end they are plain."""
        ids = array("i", range(first, last))
        if first < self.start + _SALTED:
            salt = crc32(self.name.encode()).to_bytes(4)
            for place in range(max(first, self.start), min(last, self.end, self.start + _SALTED)):
                ids[place - first] |= salt[place - self.start] << _SALT_FROM
        if self.calls and first < self.end <= last:
            ids[self.end - 1 - first] |= _CALL * _KIND
        if self.marked and first < self.end <= last:
            ids[self.end - 1 - first] = END
        if self.stops:
            for place in range(max(first, self.stop_begins), min(last, self.end)):
                ids[place - first] |= (1 + place - self.stop_begins) * _KIND
        return ids


class Texts:
    """What is sampled in one world, by prompt and name of the sample."""

    def __init__(self, seed: int, lengths: LengthModel, tools: ToolModel | None = None) -> None:
        self._seed, self._lengths, self._tools = seed, lengths, tools

    def turn(self, name: str, prompt: Sequence[int], stops: Sequence[str]) -> ScriptedTurn:
        """`name`: of the request, which ends with +N for a turn after the first. `prompt`: its tokens begin with the
        length and the number of the prompt.
        """
        sample, _, number = name.partition("+")
        start = prompt[0]
        for earlier in range(int(number or 0)):  # where a turn begins depends on all turns before it
            turn = self._turn(f"{sample}+{earlier}" if earlier else sample, start, prompt[1], stops)
            start = turn.end + self.answer_tokens(turn.end - 1)
        return self._turn(name, start, prompt[1], stops)

    def _turn(self, name: str, start: int, prompt: int, stops: Sequence[str]) -> ScriptedTurn:
        length = self._lengths.tokens(self._seed, str(prompt), name)
        if stops:
            length = max(length, len(STOP))  # the stop string must fit into the answer
        tools = self._tools
        # The last tokens are a call or the stop string, not both.
        calls = tools is not None and not stops and uniform(self._seed, "call", name) < tools.share
        return ScriptedTurn(start, start + length, calls, bool(stops), name=name)

    def answer_tokens(self, called_at: int) -> int:
        """How many tokens a tool's answer has."""
        assert self._tools is not None
        return 1 + int(self._tools.answer_tokens * 2 * uniform(self._seed, "answer", called_at))

    def whole(self, name: str, prompt: Sequence[int], limit: int, stops: Sequence[str]) -> tuple[array, bytes]:
        """All tokens after the prompt, and which of them the policy samples."""
        ids, mask, number = array("i"), bytearray(), 0
        while True:
            turn = self.turn(f"{name}+{number}" if number else name, prompt, stops)
            end = min(turn.end, turn.start + limit - len(ids))
            ids += turn.tokens(turn.start, end)
            mask += b"\x01" * (end - turn.start)
            number += 1
            if end < turn.end or not turn.calls or self._tools is None or number >= self._tools.max_turns:
                return ids, bytes(mask)
            answer = self.answer_tokens(end - 1)
            if len(ids) + answer >= limit:  # as `rollout/answers.py`: no room is left for a turn after it
                return ids, bytes(mask)
            ids.extend(range(end, end + answer))
            mask += b"\x00" * answer


def expected_logprobs(name: str, start: int, mask: bytes, runs: VersionRuns) -> array:
    """Of a whole sample: where the policy sampled, what the engine reports for the version of the label; else 0."""
    found = logprobs_of(name, start, runs)
    if 0 in mask:
        for place, sampled in enumerate(mask):
            if not sampled:
                found[place] = 0.0
    return found


class Codec:
    """`rollout/tools.py: ToolCodec`."""

    calls = HERMES

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def said(self, token_ids: Sequence[int]) -> str:
        return decode(token_ids)

    def between(self, last_token: int, results: Sequence[str]) -> Sequence[int]:
        place = position_of(last_token)
        return range(place + 1, place + 1 + self._texts.answer_tokens(place))


def tools_of(model: ToolModel | None, texts: Texts, tool: Tool) -> ToolCompletionCallback | None:
    """The real callback over a fake tool; None in a world without tools."""
    if model is None:
        return None
    return ToolCompletionCallback(
        {"sim": tool},
        Codec(texts),
        max_turns=model.max_turns,
        timeout_s=model.timeout_s,
    )
