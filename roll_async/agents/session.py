"""One trajectory's side of the policy: every request is a turn of its tree, within its limits.

    request --render (thread)--> continues a stored turn, or branches --> policy --> tokens into the tree --> reply

A request in flight at a weight push goes on as `interrupt.mode` says; with mode abort this turn alone is sampled anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from roll_async.agents.messages import ChatDigest, Message, TurnReply, TurnRequest
from roll_async.agents.rendering import Renderer, SampledTurn
from roll_async.agents.turn_handler import BadRequest, TurnHandler
from roll_async.observe.thoughts import Thought, opening_at_end, thought_of
from roll_async.prompts.tokenizer import without_stop
from roll_async.prompts.tool_calls import ToolCall
from roll_async.rollout.trace_tree import TraceTree
from roll_async.schema import Completion, FinishReason, GenerateRequest, Outcome, SamplingParams

T = TypeVar("T")
RENDERING_THREADS = 4
"""Templates hold the interpreter in turns, tokenizers release it: a long chat must not keep the others waiting."""
_INLINE_CHARACTERS = 8000
"""A chat of so many takes about a millisecond; to hand it to a thread and back takes longer where both are busy."""


class Policy(Protocol):
    """Source of sampled turns."""

    async def generate(self, request: GenerateRequest, *, conversation: str, validation: bool) -> Completion: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """Limits of one trajectory, and how its turns are sampled."""

    sampling: SamplingParams
    """max_new_tokens: of one turn."""
    max_turns: int
    max_context: int
    """Tokens of one path: sequence_length."""
    max_seconds: float = float("inf")
    client_sampling: bool = False
    """Temperature, top_p, top_k and stop strings of the request count; never in training, where log-probs are compared
    at one setting and engines are started for the run's stop strings.
    """
    windowed: bool = False
    """Each turn has a new text (manager step), so branches are expected."""
    validation: bool = False


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A turn that can be continued."""

    node: int
    turns: tuple[SampledTurn, ...]
    """Those up to this one."""
    tools: bytes
    """Digest."""
    last_token: int | None
    """None: nothing was sampled."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Position of a request in the tree."""

    parent: int | None
    new_ids: array
    before: str
    """What the template puts before the turn that comes."""
    turns: tuple[SampledTurn, ...]
    reason: str | None
    """Reason for a branch; None where it continues a turn."""
    digest: ChatDigest
    """Of the request's messages."""
    tools: bytes
    """Digest."""


class Session(TurnHandler):
    """Turns of the engines' policy, recorded token by token."""

    def __init__(
        self, name: str, policy: Policy, renderer: Renderer, options: SessionOptions, executor: Executor | None = None
    ) -> None:
        """`executor`: where chats are rendered and encoded; None = here, for fakes that cost nothing."""
        super().__init__(name, max_turns=options.max_turns, max_seconds=options.max_seconds)
        self._policy, self._renderer, self._options = policy, renderer, options
        self._executor = executor
        self.takes_sampling = options.client_sampling
        self.tree = TraceTree()
        self._recorded: dict[bytes, _Recorded] = {}
        self._seen: set[bytes] = set()
        self._beginnings: set[bytes] = set()
        self.open_requests: set[str] = set()
        """Ids of the running requests, as the policy names them."""
        self.newest: tuple[tuple[Message, ...], str] = ((), "")
        """The chat of the newest turn and what it said, for display."""
        self._turns = itertools.count()  # for ids: a refused turn gives its number back, an id comes once

    async def _sample_turn(self, request: TurnRequest, started_s: float) -> TurnReply:
        plan = await self._planned(request)
        tree, options = self.tree, self._options
        if plan.reason is not None:
            tree.branches["window" if options.windowed else plan.reason] += 1
        role = request.messages[-1].role
        parent = tree.add_request(plan.parent, plan.new_ids, role=role, started_s=started_s)
        # Before the turn is sampled: requests may overlap.
        self._beginnings.add(plan.digest.keys[0])
        self._seen.add(plan.digest.keys[-1])
        prompt = tree.token_ids(parent)
        room = options.max_context - len(prompt)
        if room < 1:
            raise self._end_with(
                Outcome.TRUNCATED_TOKENS, f"the context of {options.max_context} tokens is used up ({len(prompt)})"
            )
        asked = GenerateRequest(
            request_id=f"{self.name}+{next(self._turns)}",
            prompt_token_ids=prompt,
            sampling=self._sampling(request, room),
            recorded_positions=tree.recorded_positions(parent),
        )
        self.open_requests.add(asked.request_id)
        try:
            completion = await self._policy.generate(asked, conversation=self.name, validation=options.validation)
        finally:
            self.open_requests.discard(asked.request_id)
        if completion.finish_reason is FinishReason.ABORT:
            raise self._end_with(Outcome.CANCELLED, "the request was aborted")
        node = tree.add_turn(parent, completion, started_s=started_s)
        return await self._reply(request, plan, node, completion, asked)

    async def count_tokens(self, request: TurnRequest) -> int:
        """Tokens of the prompt that a turn would have; nothing is recorded."""
        if self.ended is not None:
            raise self._end_error()
        plan = await self._planned(request)
        return len(self.tree.token_ids(plan.parent)) + len(plan.new_ids)

    async def _planned(self, request: TurnRequest) -> _Plan:
        """Where the request goes on. Raises BadRequest for one that the template refuses, or makes no token of."""
        try:
            plan = await self._off_loop(lambda: self._plan(request), request.longer_than(_INLINE_CHARACTERS))
        except ValueError as error:
            raise BadRequest(str(error)) from error
        # An engine takes no empty prompt.
        if plan.parent is None and not plan.new_ids:
            raise BadRequest("messages: the chat template makes no token of them")
        if self.ended is not None:
            raise self._end_error()
        return plan

    def _sampling(self, request: TurnRequest, room: int) -> SamplingParams:
        base = self._options.sampling
        wanted = min(base.max_new_tokens, room, request.max_tokens or base.max_new_tokens)
        if not self.takes_sampling:
            return replace(base, max_new_tokens=wanted)
        asked = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        given = {name: value for name, value in asked.items() if value is not None}
        return replace(base, max_new_tokens=wanted, stop_strings=(*base.stop_strings, *request.stop), **given)

    def _continued(self, keys: list[bytes]) -> _Recorded | None:
        """The longest recorded chat that this one begins with."""
        # Without the last key: at least one message follows a turn.
        return next((self._recorded[key] for key in reversed(keys[:-1]) if key in self._recorded), None)

    def _plan(self, request: TurnRequest) -> _Plan:
        """Of a long chat in another thread; it only reads the recorded turns."""
        digest, tools = ChatDigest(request.messages), _digest_of(request.tools)
        keys = digest.keys
        found = self._continued(keys)
        if found is not None:
            rendered = self._renderer.render(request.messages, request.tools, found.turns)
            if rendered.rest is not None:
                ids = self._renderer.encode_after(found.last_token, rendered.rest)
                return _Plan(found.node, ids, rendered.rest, found.turns, None, digest, tools)
            return self._branch(request, "tools" if tools != found.tools else "template", digest, tools)
        if keys[-1] in self._seen:
            return self._branch(request, "resampled", digest, tools)
        return self._branch(request, "history" if keys[0] in self._beginnings else "new_context", digest, tools)

    def _branch(self, request: TurnRequest, reason: str, digest: ChatDigest, tools: bytes) -> _Plan:
        rendered = self._renderer.render(request.messages, request.tools, ())
        ids = self._renderer.encode(rendered.text)
        parent, covered = self.tree.deepest_prefix(ids)
        new_ids = ids[covered:] if covered else ids
        return _Plan(parent, new_ids, rendered.text, (), reason if self.tree.nodes else None, digest, tools)

    async def _reply(
        self, request: TurnRequest, plan: _Plan, node: int, completion: Completion, asked: GenerateRequest
    ) -> TurnReply:
        ids, sampling = completion.token_ids, asked.sampling
        stops = () if sampling.include_stop_str_in_output else sampling.stop_strings
        said, text, thought, content, found = await self._off_loop(
            lambda: self._read(ids, plan.before, request.tools, stops), len(ids) > _INLINE_CHARACTERS
        )
        number = f"{self.name}+{node}"
        good = [call for call in found if not call.problem]
        # The text of a model has no ids, and clients answer calls by them.
        calls = tuple(replace(call, call_id=f"call_{node}_{i}") for i, call in enumerate(good))
        finish = "length" if completion.finish_reason is FinishReason.LENGTH else "tool_calls" if calls else "stop"
        reply = TurnReply(
            reply_id=number,
            text=text,
            content=content,
            tool_calls=calls,
            finish_reason=finish,
            prompt_tokens=len(asked.prompt_token_ids),
            completion_tokens=len(ids),
            node=node,
            problems=tuple(call for call in found if call.problem),
            thought=text[: len(said) - len(thought.rest)],
            unfinished_thought=thought.unfinished,
        )
        self.newest = request.messages, text
        turn = SampledTurn(len(request.messages), said, plan.before)
        last = ids[-1] if ids else None
        self._recorded[plan.digest.then(reply.message)] = _Recorded(node, (*plan.turns, turn), plan.tools, last)
        return reply

    def _read(
        self, ids: array, before: str, tools: Sequence[Mapping[str, object]], stops: Sequence[str]
    ) -> tuple[str, str, Thought, str, list[ToolCall]]:
        """(what was sampled, that without its stop string, its thought, what it says beside calls, its calls)."""
        said, last, calls = self._renderer.said(ids), self._renderer.said(ids[-1:]), self._renderer.calls
        opened = opening_at_end(before, calls.thoughts)
        # Also of a turn that was cut: clients are told of the call that it began. A stop string may end a call.
        content, found = calls.read(said, tools, opened=opened) if tools else (said, [])
        text, content = (without_stop(one, last, stops) for one in (said, content))
        return said, text, thought_of(opened, said, calls.thoughts), content, found

    async def _off_loop(self, work: Callable[[], T], is_long: bool) -> T:
        if self._executor is None or not is_long:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _digest_of(tools: Sequence[object]) -> bytes:
    """Of their form; one call for each, so that many do not hold the interpreter."""
    digest = hashlib.blake2b(digest_size=16)
    for tool in tools:
        digest.update(repr(tool).encode())
    return digest.digest()
