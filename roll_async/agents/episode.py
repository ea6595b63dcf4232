"""One trajectory: a world and the policy in turns, or an agent of the user's own at its endpoint.

world --observation--> messages --> Session.turn --reply--> tools (in parallel) --> messages
                                                    +-----> world.step
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from roll_async.agents.messages import Message, TurnReply, TurnRequest
from roll_async.agents.protocol import AgentResult, Ending, Endpoint, Task
from roll_async.agents.session import Session
from roll_async.agents.turn_handler import BadRequest, TrajectoryEnded
from roll_async.config.prompt_templates import RULES, filled, names_in
from roll_async.envs.protocol import GraderFailed, LiveWorld, Observation, WorldFailed
from roll_async.observe.outside import OutsideError, asked, encodable, message_of, number, place_of, text_of
from roll_async.prompts.row_tools import RowTools, parse_tools
from roll_async.prompts.tool_calls import ToolCall, name_of, write
from roll_async.rollout.dispatch.requests import GenerationFailed
from roll_async.rollout.tools import Toolbox
from roll_async.schema import Outcome

_FRAME = 100
"""Lines, and characters of a line, of a rendering."""
_OURS = ("acc", "turns")
"""Metrics of every trajectory that this package measures."""
_MOST_METRICS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeOptions:
    """How a world is presented to the policy."""

    max_turns: int
    max_response_tokens: int = 0
    """Of one turn."""
    windowed: bool = False
    """Manager step: every turn is a separate text."""
    history_length: int = 0
    """Turns shown, 0 = all; windowed only."""
    system_template: str | None = None
    """Placeholders as in `config/prompt_templates.py`; None = the world's instructions."""
    turn_template: str | None = None
    """Likewise; None = the observation, windowed after the history."""

    def places_rules(self, template: str | None, *, system: bool) -> bool:
        """Whether a template says where the world's instructions stand."""
        return template is not None and bool(names_in(template, system=system) & {*RULES})


class WorldEpisode:
    """The course of one trajectory in a world."""

    def __init__(self, session: Session, world: LiveWorld, toolbox: Toolbox, options: EpisodeOptions) -> None:
        self._session, self._world, self._toolbox, self._options = session, world, toolbox, options
        self._world_tools: dict[str, Mapping[str, object]] = {}
        self._row_tools = RowTools()
        self._system: list[Message] = []
        self._messages: list[Message] = []
        """Since the beginning; windowed: of the present turn of the world."""
        self._history: list[tuple[str, str]] = []
        self._frames: list[tuple[str, ...]] = []
        self._transcript: list[tuple[str, str]] = []
        self._instructions = ""
        self._solved: bool | None = None
        self._unfinished = False
        """The newest turn ended inside a thought."""

    async def run(self, seed: int) -> Ending:
        """Run to the end, which is returned; only cancellation and the loss of all engines are raised."""
        try:
            observation = await self._world.reset(seed)
            self._begin(observation)
            # The world's end counts before the limit: what is solved in the last turn is solved.
            while not observation.ended:
                if self._session.num_turns >= self._options.max_turns:
                    return self._end(Outcome.TRUNCATED_TURNS, f"{self._options.max_turns} turns")
                reply = await self._session.turn(self._request())
                observation = await self._apply_reply(reply, observation)
            # gymnasium lets a step say both: then it ended by itself.
            if observation.truncated and not observation.terminated:
                return self._end(Outcome.TRUNCATED_TURNS, "the world ended it")
            return self._end(Outcome.SOLVED if self._is_solved() else Outcome.FAILED, "")
        except TrajectoryEnded as error:
            return self._end(error.outcome, str(error))
        except GraderFailed as error:
            return self._end(Outcome.GRADER_ERROR, str(error))
        except (WorldFailed, GenerationFailed) as error:
            return self._end(Outcome.INFRA_ERROR, str(error))
        except BadRequest as error:
            return self._end(Outcome.AGENT_ERROR, str(error))

    def _begin(self, observation: Observation) -> None:
        self._instructions = text_of(observation.info.get("instructions") or "")
        template, offered = self._options.system_template, observation.info.get("tools")
        if template is not None:
            system = filled(template, self._values(observation), system=True)
        else:
            system = "" if self._options.places_rules(self._options.turn_template, system=False) else self._instructions
        if system:
            self._system = [Message(role="system", content=system)]
            self._transcript.append(("system", system))
        try:
            self._row_tools = parse_tools(observation.info.get("tool_names"), observation.info.get("tool_arguments"))
            self._world_tools = {name_of(tool): tool for tool in (offered if isinstance(offered, list) else ())}
        except ValueError as error:
            raise WorldFailed(f"reset: {error}") from error
        self._append_observation(observation)

    def _append_observation(self, observation: Observation) -> None:
        """Append the observation as the next message."""
        self._update_state(observation)
        text = self._render_observation(observation)
        if self._options.windowed:
            self._messages = []
        self._messages.append(Message(role="user", content=text))
        self._transcript.append(("user", text))

    def _update_state(self, observation: Observation) -> None:
        frame = observation.info.get("frame")
        if isinstance(frame, list):
            self._frames.append(tuple(str(line)[:_FRAME] for line in frame[:_FRAME]))
        if "solved" in observation.info:
            self._solved = bool(observation.info["solved"])

    def _render_observation(self, observation: Observation) -> str:
        """The user message. Rules that no template places stand before the first one of a text."""
        options, values = self._options, self._values(observation)
        text = f"{values['history']}\n{observation.text}" if values["history"] else observation.text
        if options.turn_template is not None:
            text = filled(options.turn_template, values, system=False)
        if not self._instructions or options.system_template is None or (self._messages and not options.windowed):
            return text
        is_placed = options.places_rules(options.system_template, system=True)
        is_placed |= options.places_rules(options.turn_template, system=False)
        return text if is_placed else f"{self._instructions}\n{text}"

    def _values(self, observation: Observation) -> dict[str, str | int]:
        """The placeholders of templates; a turn is one of the policy, as `max_turns` counts them."""
        options, taken = self._options, self._session.num_turns
        shown = self._history[-options.history_length :] if options.history_length else self._history
        suffix = str(observation.info.get("suffix", ""))
        return {
            "observation": observation.text,
            "suffix": suffix,
            "current_observation": f"{observation.text} {suffix}" if suffix else observation.text,
            **dict.fromkeys(RULES, self._instructions),
            **dict.fromkeys(("turn", "turn_idx", "current_step"), taken + 1),
            "step_count": taken,
            "max_turns": options.max_turns,
            "actions_left": options.max_turns - taken,
            "max_response_length": options.max_response_tokens,
            "history": "\n".join(f"{seen}\n> {did}" for seen, did in shown) if options.windowed else "",
            "history_length": len(shown) if options.windowed else 0,
        }

    def _request(self) -> TurnRequest:
        tools = (*self._toolbox.offered(self._row_tools), *self._world_tools.values())
        return TurnRequest(messages=(*self._system, *self._messages), tools=tools)

    async def _apply_reply(self, reply: TurnReply, observation: Observation) -> Observation:
        """Continue after a turn: with results of tools, or with the world's next observation."""
        tree = self._session.tree
        self._unfinished = reply.unfinished_thought
        tree.judge(reply.node, state=state_key(observation.state))
        self._transcript.append(("assistant", reply.text))
        has_tools = bool(self._toolbox.schemas or self._world_tools)
        if has_tools and (reply.tool_calls or reply.problems):
            return await self._call(reply, observation)
        # Without calls, and without tools, where what looks like a call is part of the answer.
        after = await self._step(reply.node, reply.answer.strip() if not has_tools else reply.answer)
        self._history.append((observation.text, reply.text.strip()))
        if not self._options.windowed:
            self._messages.append(reply.message)
        if after.ended:
            self._update_state(after)
            self._transcript.append(("user", after.text))
        else:
            self._append_observation(after)
        return after

    async def _call(self, reply: TurnReply, observation: Observation) -> Observation:
        """Run the calls of one turn: those of tools in parallel, then those of the world one after another."""
        self._messages.append(reply.message)
        calls = (*reply.tool_calls, *reply.problems)
        mine = [call for call in calls if call.problem or call.name not in self._world_tools]
        # By identity: two calls of one turn may be equal.
        answers = dict(zip(map(id, mine), await self._toolbox.run(mine, self._row_tools), strict=True))
        for call in calls:
            said = answers.get(id(call))
            if said is None and not observation.ended:
                observation = await self._step(reply.node, _as_text(call))
                self._update_state(observation)
                said = observation.text
            if said is not None:
                self._messages.append(Message(role="tool", content=said, call_id=call.call_id))
                self._transcript.append(("tool", said))
        return observation

    async def _step(self, node: int, action: str) -> Observation:
        after = await self._world.step(action)
        self._session.tree.judge(node, reward=after.reward)
        return after

    def _total(self) -> float:
        return sum(self._session.tree.nodes[node].reward for node in self._session.tree.turns)

    def _is_solved(self) -> bool:
        return self._total() > 0 if self._solved is None else self._solved

    def _end(self, outcome: Outcome, reason: str) -> Ending:
        solved = self._is_solved() if outcome.is_trusted else False
        return Ending(
            outcome=outcome,
            reward=self._total(),
            reason=reason,
            metrics={
                "acc": float(solved),
                "turns": float(self._session.num_turns),
                "unfinished_thought": float(self._unfinished),
            },
            story=tuple(self._transcript),
            frames=tuple(self._frames),
        )


async def run_agent(
    agent: object,
    task: Task,
    session: Session,
    endpoint: Endpoint,
    *,
    max_seconds: float,
    silence_s: float = float("inf"),
) -> Ending:
    """An agent of the user's own, to its end. A limit of its session that made it raise is how it ended. One that asks
    the policy nothing for `silence_s` hangs.
    """
    reason = ""
    try:
        async with _limit(max_seconds), _limit(silence_s) as silence:
            session.on_activity = _Postponed(silence, silence_s)
            start = partial(agent.run, task, endpoint)  # type: ignore[attr-defined]
            # Without a limit of its own: those around it are its limits.
            result = await asked(start, _judged, float("inf"), GraderFailed, WorldFailed)
    except TimeoutError:
        if silence.expired():
            hung = f"the agent asked the policy nothing for {silence_s:g} s (fault.env_timeout)"
            return Ending(outcome=Outcome.INFRA_ERROR, reason=hung)
        session.end(Outcome.TRUNCATED_TIME, f"the limit of {max_seconds:g} s is reached")
        result = None
    except GraderFailed as error:
        return Ending(outcome=Outcome.GRADER_ERROR, reason=f"{message_of(error)} [{place_of(error)}]")
    except WorldFailed as error:
        return Ending(outcome=Outcome.INFRA_ERROR, reason=f"{message_of(error)} [{place_of(error)}]")
    except OutsideError as error:
        result, reason = None, str(error)
    finally:
        # A turn that ends later must not reschedule a limit that is left: asyncio raises.
        session.on_activity = None
    if session.ended is not None and session.ended.outcome is Outcome.CANCELLED:
        return Ending(outcome=Outcome.CANCELLED, reason=str(session.ended))  # whatever the agent made of it
    turns = {"turns": float(session.num_turns)}
    if result is not None:
        solved = result.reward > 0 if result.solved is None else result.solved
        outcome = Outcome.SOLVED if solved else Outcome.FAILED
        # What was solved before the limit ended it is solved.
        if session.ended is not None and not solved and session.ended.outcome.is_trusted:
            outcome = session.ended.outcome
        metrics = {**result.metrics, "acc": float(solved), **turns}
        return Ending(outcome=outcome, reward=result.reward, metrics=metrics, story=_transcript(session))
    if session.ended is not None and session.ended.outcome.is_trusted:
        metrics = {"acc": 0.0, **turns}
        return Ending(
            outcome=session.ended.outcome, reason=str(session.ended), metrics=metrics, story=_transcript(session)
        )
    return Ending(outcome=Outcome.AGENT_ERROR, reason=reason)


def _transcript(session: Session) -> tuple[tuple[str, str], ...]:
    """(role, text) of the messages of the newest request, and its reply."""
    messages, said = session.newest
    shown = ((m.role, write(m.content, m.tool_calls)) for m in messages)
    return (*shown, ("assistant", said))


def _limit(seconds: float) -> asyncio.Timeout:
    return asyncio.timeout(seconds if seconds < float("inf") else None)


@dataclass(frozen=True, slots=True)
class _Postponed:
    """Keeps a limit away while a turn runs, and sets it anew when none does."""

    limit: asyncio.Timeout
    seconds: float

    def __call__(self, is_running: bool) -> None:
        # asyncio raises for a limit that has expired.
        if not self.limit.expired():
            without = is_running or self.seconds == float("inf")
            self.limit.reschedule(None if without else asyncio.get_running_loop().time() + self.seconds)


def state_key(state: str) -> int:
    """A digest of a state, equal in every process."""
    return zlib.crc32(state.encode())


def _judged(result: object) -> AgentResult:
    """What an agent returned, checked. A metric named as one of ours gets another name. Raises GraderFailed for a
    reward that is no number, TypeError or ValueError for the rest.
    """
    if not isinstance(result, AgentResult):
        raise TypeError(f"run() returned {type(result).__name__}, not AgentResult")
    try:
        reward = number(result.reward, "the reward")
    except ValueError as error:
        raise GraderFailed(str(error)) from error
    if not isinstance(result.metrics, Mapping) or len(result.metrics) > _MOST_METRICS:
        raise ValueError(f"metrics must be at most {_MOST_METRICS} numbers by name")
    metrics = {encodable(str(name)): value for name, value in result.metrics.items()}
    return AgentResult(
        reward=reward,
        solved=None if result.solved is None else bool(result.solved),
        metrics={f"agent_{n}" if n in _OURS else n: number(value, f"metrics.{n}") for n, value in metrics.items()},
    )


def _as_text(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)})
