"""Answers: a trajectory of one path, from the prompt's tokens over turns with tools to one scored row.

prompt --> turn --find_calls--> none: the answer is complete --> reward --> Trajectory
             ^           +----> tools --results as tokens, masked--+
             +-----------------------------------------------------+
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field, replace

from roll_async.observe.outside import OutsideError, border
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.requests import GenerationFailed, Interrupted
from roll_async.rollout.group_source import SourceCounts
from roll_async.rollout.groups import Ended, EndReason, Trajectory, TrajectoryRequest
from roll_async.rollout.scoring import RewardScoring
from roll_async.rollout.tools import ToolCompletionCallback
from roll_async.rollout.trace_tree import TraceTree
from roll_async.schema import FinishReason, GenerateRequest, Outcome, Sample


@dataclass(eq=False, slots=True)
class _OpenAnswer:
    """An answer until its last token, as `abort_groups` reaches it. One that is being scored is not open."""

    open_requests: set[str] = field(default_factory=set)
    is_stopped: bool = False

    def stop(self, outcome: Outcome, reason: str) -> None:
        """Its running turn, or its tools, are the last."""
        self.is_stopped = True


class AnswerRunner:
    """`rollout/groups.py: TrajectoryRunner` of questions. All turns of an answer go to one replica while it lives."""

    cancels_on_abort = False

    def __init__(
        self, manager: EnginePool, scoring: RewardScoring, *, tools: ToolCompletionCallback | None = None
    ) -> None:
        self._manager, self.scoring, self.tools = manager, scoring, tools

    async def run(self, request: TrajectoryRequest) -> Trajectory | Ended:
        """A finished, scored answer. It is sampled once: a failed reward is asked again on the same tokens."""
        try:
            row = await self._row(request)
            if row.finish_reason is FinishReason.ABORT:  # not scored: for the length audit alone
                return Ended(reason=EndReason.ABORTED, text="aborted", rows=(row,))
            generated_s = asyncio.get_running_loop().time()  # before scoring: the wait for scores is measured from here
            reward = await self.scoring.score(request.prompt, row)
        except Interrupted:
            return Ended(reason=EndReason.INTERRUPTED, text="interrupted by a weight push")
        except (GenerationFailed, OutsideError, ValueError) as error:  # ValueError: a row that a scorer cannot read
            return Ended(reason=EndReason.FAILED, text=str(error))
        if isinstance(reward, Ended):
            return reward
        is_scored = self.scoring.is_scored(request.prompt)
        return Trajectory(rows=(replace(row, reward=reward),), generated_s=generated_s, is_scored=is_scored)

    async def _row(self, request: TrajectoryRequest) -> Sample:
        """The whole answer. Raises OutsideError when the callback of tools fails, and what
        `EnginePool.generate` raises.
        """
        answer = _OpenAnswer()
        request.scope.open.add(answer)
        try:
            tree = await self._converse(request, answer)
        finally:
            request.scope.open.discard(answer)
            if self.tools is not None:
                self._manager.forget_affinity(request.name)  # else the manager keeps its home for the whole run
        if self.tools is None:
            return tree.answer(request.name)
        with border():
            row = self.tools.postprocess(tree, request.name)
            if not isinstance(row, Sample):
                raise TypeError(f"postprocess gave {type(row).__name__}, not a Sample")
            return row

    async def _converse(self, request: TrajectoryRequest, answer: _OpenAnswer) -> TraceTree:
        loop, tree, prompt, sampling = asyncio.get_running_loop(), TraceTree(), request.prompt, request.sampling
        assert sampling is not None, "answers are sampled as the run or the validation says"
        began_s = loop.time()
        end = tree.add_request(None, prompt.token_ids, role="user", started_s=began_s)
        while True:
            number, path = len(tree.turns), tree.token_ids(end)  # a turn is a request with the whole text so far
            # The budget is one for the whole answer, results of tools included: a turn has what is left of it.
            left = sampling.max_new_tokens - (len(path) - len(prompt.token_ids))
            turn = GenerateRequest(
                request_id=f"{request.name}+{number}" if number else request.name,
                prompt_token_ids=path,
                sampling=replace(sampling, max_new_tokens=left),
                recorded_positions=tree.recorded_positions(end),
                images=prompt.images,
            )
            answer.open_requests.add(turn.request_id)
            try:
                completion = await self._manager.generate(
                    turn,
                    affinity=request.affinity,
                    conversation=request.name if self.tools is not None else None,
                    validation=request.validation,
                )
            finally:
                answer.open_requests.discard(turn.request_id)
            end = tree.add_turn(end, completion, started_s=began_s)
            if self.tools is None:
                return tree
            with border():
                found = await self.tools(prompt, tree, completion)
                # Inside the border: a user's callback may give anything.
                results = None if found is None else array("i", found)
            if results is None:
                return tree
            if answer.is_stopped or len(completion.token_ids) + len(results) >= left:
                # A result that leaves no room for a turn after it is not appended.
                tree.end(FinishReason.ABORT if answer.is_stopped else FinishReason.LENGTH)
                return tree
            began_s = loop.time()
            end = tree.add_request(end, results, role="tool", started_s=began_s)

    def counts(self, num_retries: int) -> SourceCounts:
        """Counters since the start."""
        box = None if self.tools is None else self.tools.toolbox
        return SourceCounts(
            reward_outages=self.scoring.outages,
            reward_timeouts=self.scoring.timeouts,
            reward_errors=self.scoring.errors,
            tool_calls=0 if box is None else box.num_calls,
            tool_failures=0 if box is None else box.num_failures,
        )
