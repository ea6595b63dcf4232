"""Chats on the virtual clock: a template, and what the fake engines sample for turns of trajectories.

Template: the first letter of the role, what was said, `$`; then `a` for the turn that comes. One token per character;
what was rendered is told from what was sampled by its kind (`simulator/parts/text.py`). Worked example: `u7:0:1$a`,
turn of 3 tokens, `u7:0:2$a`: the world 0 of task 7 after its first and its second move.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from roll_async.agents.messages import Message
from roll_async.agents.rendering import Rendered, SampledTurn
from roll_async.prompts.tool_calls import HERMES, write
from roll_async.simulator.parts.models import LengthModel, ToolModel, uniform
from roll_async.simulator.parts.text import END, RENDERED, ScriptedTurn, decode, is_sampled

END_MARK = decode((END,))


class SimRenderer:
    """`agents/rendering.py: Renderer`. `strips`: the template leaves earlier turns out, as some do with thoughts."""

    calls = HERMES

    def __init__(self, *, strips: bool = False) -> None:
        self._strips = strips

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], turns: Sequence[SampledTurn]
    ) -> Rendered:
        """Never refuses."""
        sampled = {} if self._strips else {turn.position: turn.text for turn in turns}
        text: list[str] = []
        rest: list[str] = []
        for position, message in enumerate(messages):
            if position in sampled:
                text += (*rest, "a", sampled[position])
                rest = [END_MARK]
                continue
            said = "" if self._strips and message.role == "assistant" else write(message.content, message.tool_calls)
            rest.append(f"{message.role[0]}{said}{END_MARK}")
        after = "".join((*rest, "a"))
        return Rendered("".join((*text, after)), None if self._strips and turns else after)

    def encode(self, text: str) -> array:
        """One token per character."""
        return array("i", [END if c == END_MARK else RENDERED + ord(c) for c in text])

    def encode_after(self, last_token: int | None, rest: str) -> array:
        """An end mark is not said again."""
        return self.encode(rest.removeprefix(END_MARK) if last_token == END else rest)

    def said(self, token_ids: Sequence[int]) -> str:
        """A turn without its end mark."""
        return decode(token_ids).removesuffix(END_MARK)


class TraceTexts:
    """`simulator/parts/text.py: Texts` of trajectories: where a turn begins is what was rendered last."""

    def __init__(self, seed: int, lengths: LengthModel, tools: ToolModel | None = None) -> None:
        self._seed, self._lengths, self._tools = seed, lengths, tools

    def turn(self, name: str, prompt: Sequence[int], stops: Sequence[str]) -> ScriptedTurn:
        """`name`: TRAJECTORY+N, with ~K when it was asked anew after a push. `prompt`: may end with tokens that were
        sampled for it before.
        """
        name, start = name_of_turn(name), len(prompt)
        while is_sampled(prompt[start - 1]):
            start -= 1
        # The name begins with the group, whose trajectories share a part of their lengths.
        length = self._lengths.tokens(self._seed, name.partition(".")[0], name)
        calls = self._tools is not None and uniform(self._seed, "call", name) < self._tools.share
        return ScriptedTurn(start, start + length, calls, False, not calls, name)


def name_of_turn(request: str) -> str:
    """Without the count of its attempts."""
    trajectory, _, number = request.partition("+")
    return f"{trajectory}+{number.partition('~')[0]}"
