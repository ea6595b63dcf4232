"""What the rows of a trajectory must hold, by value: tokens, masks, log-probs, versions, worlds, rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roll_async.agents.episode import state_key
from roll_async.schema import Group, Outcome, Prompt, Sample, SamplingParams, Turn, cut_runs
from roll_async.simulator.agents.texts import TraceTexts
from roll_async.simulator.agents.worlds import Fates, Fault, WorldId
from roll_async.simulator.parts.text import decode, is_sampled, logprobs_of, sampled_as

_SAID = re.compile(r"(\d+):(\d+):(\d+)")

Finding = tuple[int, str]
"""Number of the invariant, message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceChecks:
    """Of the trajectories of one scenario."""

    texts: TraceTexts
    fates: Fates
    max_context: int

    def tokens(self, rows: Sequence[Sample], sampling: SamplingParams) -> Iterator[Finding]:
        """Every trained token is one that was sampled, once, with the log-prob and version it was sampled with; no
        other token is trained.
        """
        seen: set[int] = set()
        for row in rows:
            ids, start = row.prompt_token_ids + row.response_token_ids, len(row.prompt_token_ids)
            mask = bytearray(len(row.response_token_ids))
            for turn in row.turns:
                first = start + turn.start
                mask[turn.start : turn.start + turn.num_tokens] = b"\x01" * turn.num_tokens
                name = f"{row.trajectory}+{turn.index}"
                limit = min(sampling.max_new_tokens, self.max_context - first)
                # From name and prompt alone: what the engines must have sampled.
                whole = self.texts.turn(name, ids[:first], ())
                expected = whole.tokens(first, min(whole.end, first + limit))
                if ids[first : first + turn.num_tokens] != expected or whole.start != first:
                    yield 5, f"turn {name} has tokens {list(ids[first:])}, expected {list(expected)}"
                elif found := self._logprobs(row, turn, first):
                    yield found
            if row.loss_mask != mask or any(p for p, m in zip(row.behaviour_logprobs, mask, strict=True) if not m):
                yield 13, f"row {row.sample_id} trains {list(row.loss_mask)}, its turns are {list(mask)}"
            again = seen.intersection(turn.index for turn in row.turns)
            if again:
                yield 3, f"turns {sorted(again)} of {row.trajectory} are trained twice"
            seen.update(turn.index for turn in row.turns)

    def _logprobs(self, row: Sample, turn: Turn, first: int) -> Finding | None:
        end = turn.start + turn.num_tokens
        runs, told = cut_runs(row.version_runs, turn.start, end), row.behaviour_logprobs[turn.start : end]
        if told == logprobs_of(row.trajectory, first, runs):
            return None
        facts = [sampled_as(x) for x in told]
        labels = [version for version, count in runs for _ in range(count)]
        number = 7 if [v for v, _, _ in facts] != labels else 13  # 7: the labels are wrong; 13: something else is
        where = f"turn {turn.index} of {row.sample_id}"
        return number, f"{where} says versions {labels}, engines told (version, answer, place) {facts}"

    def rewards(self, group: Group) -> Iterator[Finding]:
        """Of a whole group: each trajectory has a world of its own."""
        worlds: set[WorldId] = set()
        for rows in group.trajectories:
            yield from self._reward(group.prompt, rows)
            own = worlds_of(rows)
            if own & worlds:
                yield 19, f"trajectory {rows[0].trajectory} plays {own & worlds}, as another one"
            worlds |= own

    def _reward(self, prompt: Prompt, rows: Sequence[Sample]) -> Iterator[Finding]:
        """The reward is what the trajectory's own world gave, which did not fail."""
        name = rows[0].trajectory
        worlds = worlds_of(rows)
        if len(worlds) != 1 or next(iter(worlds)).task != int(prompt.row_id):
            yield 19, f"trajectory {name} of task {prompt.row_id} has seen worlds {worlds}"
            return
        world, moves, total = next(iter(worlds)), 0, 0.0
        for index, (turn, text) in enumerate(self._turns(rows)):
            if turn.index != index:
                yield 3, f"turn {index} of {name} is not trained"
            if turn.state != state_key(world.text(moves)):
                yield 19, f"turn {turn.index} of {name} does not answer the state after {moves} moves of {world}"
            given = 0.0
            if "<tool_call>" not in text:  # a call is answered by the tool: the world does not move
                given, moves = self.fates.reward(world, moves), moves + 1
            total += given
            if turn.reward != given:  # exact, because rewards are quarters
                yield 19, f"turn {turn.index} of {name} has reward {turn.reward}, {world} gave {given}"
        fault, where = self.fates.fault(world)
        if fault is not Fault.NONE and where < moves:
            yield 19, f"trajectory {name} is trained, and {world} {fault.value} after {where} moves"
        ended = moves == self.fates.moves(world)
        graded = Outcome.SOLVED if total > 0 else Outcome.FAILED
        for row in rows:
            if row.outcome is None or not row.outcome.is_trusted or (row.outcome is graded) != ended:
                yield 19, f"{row.sample_id} ended as {row.outcome} after {moves} moves of {world}, reward {total}"
            if row.reward is None or row.reward.score != total:
                yield 19, f"{row.sample_id} has {row.reward}, {world} gave {total}"

    def _turns(self, rows: Sequence[Sample]) -> list[tuple[Turn, str]]:
        found = [
            (turn, decode(row.response_token_ids[turn.start : turn.start + turn.num_tokens]))
            for row in rows
            for turn in row.turns
        ]
        return sorted(found, key=lambda item: item[0].index)


def worlds_of(rows: Sequence[Sample]) -> set[WorldId]:
    """The worlds that speak in the rows of a trajectory."""
    found = set()
    for row in rows:
        ids = row.prompt_token_ids + row.response_token_ids
        # What the policy samples decodes to characters, too.
        said = decode([token for token in ids if not is_sampled(token)])
        found |= {WorldId(int(task), int(number)) for task, number, _ in _SAID.findall(said)}
    return found
