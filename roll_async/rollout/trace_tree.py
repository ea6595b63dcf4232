"""The tree of turns of one trajectory, and the rows it is trained as.

    system + question -- turn 0 -- tool result -- turn 1    row 1: the whole path
                    +--- history rewritten ----- turn 2    row 2: its path; what it shares is not trained twice

The answer to a question is a tree without branches. Of a chat, a text that goes on from stored tokens continues their
node; any other text begins a branch at the deepest node whose tokens are an exact prefix. Tokens are stored as they
were sampled or sent, and never encoded a second time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from roll_async.schema import (
    Completion,
    FinishReason,
    Outcome,
    Reward,
    Sample,
    TraceNode,
    Turn,
    VersionRuns,
    join_records,
    merge_runs,
)


class TraceTree:
    """A tree of requests (text of the agent) and turns (tokens of the policy)."""

    def __init__(self) -> None:
        self.nodes: list[TraceNode] = []
        self.branches: Counter[str] = Counter()
        """Branches by reason; the first text of a trajectory is none."""

    @property
    def turns(self) -> list[int]:
        """Positions of the sampled nodes, in the order in which they were asked for."""
        return [i for i, node in enumerate(self.nodes) if node.sampled]

    def path(self, node: int | None) -> list[int]:
        """The nodes from the root to this one."""
        found = []
        while node is not None:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def token_ids(self, node: int | None) -> array:
        """All tokens from the root to the end of this node."""
        return _joined([self.nodes[place].token_ids for place in self.path(node)])

    def recorded_positions(self, node: int | None) -> int:
        """Positions whose experts the turns on the way to this node have recorded."""
        records = (self.nodes[place].experts for place in self.path(node))
        return sum(record.num_positions for record in records if record is not None)

    def deepest_prefix(self, ids: array) -> tuple[int | None, int]:
        """(the deepest node whose tokens from the root are an exact prefix, how many they are)."""
        best: tuple[int | None, int] = (None, 0)
        open_ends: list[tuple[int | None, int]] = [best]
        while open_ends:
            parent, position = open_ends.pop()
            for child in self._children(parent):
                tokens = self.nodes[child].token_ids
                end = position + len(tokens)
                if ids[position:end] == tokens:
                    open_ends.append((child, end))
                    best = max(best, (child, end), key=lambda found: found[1])
        return best

    def add_request(self, parent: int | None, token_ids: array, *, role: str, started_s: float) -> int | None:
        """Add the agent's text after `parent`. Without tokens the parent itself is returned."""
        if not len(token_ids):
            return parent
        self.nodes.append(TraceNode(parent=parent, role=role, token_ids=token_ids, started_s=started_s))
        return len(self.nodes) - 1

    def add_turn(self, parent: int | None, completion: Completion, *, started_s: float) -> int:
        """Add a turn of the policy. Raises ValueError for log-probs or versions that do not fit the tokens."""
        node = TraceNode(
            parent=parent,
            role="assistant",
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            version_runs=completion.version_runs,
            finish_reason=completion.finish_reason,
            experts=completion.experts,
            generation_s=completion.generation_s,
            replica=completion.replica,
            started_s=started_s,
        )
        self.nodes.append(node)
        return len(self.nodes) - 1

    def end(self, reason: FinishReason) -> None:
        """Give the newest turn another finish reason than the one that its engine told."""
        assert self.nodes[-1].sampled, "only a turn of the policy ends a trajectory"
        self.nodes[-1] = replace(self.nodes[-1], finish_reason=reason)

    def judge(self, turn: int, *, reward: float = 0.0, state: int | None = None) -> None:
        """What the world gave for a turn (added to what it gave before), and which state the turn answered."""
        node = self.nodes[turn]
        assert node.sampled, "only turns of the policy are judged"
        self.nodes[turn] = replace(node, reward=node.reward + reward, state=node.state if state is None else state)

    def rows(self, name: str, *, reward: Reward | None, outcome: Outcome) -> list[Sample]:
        """One row per leaf that adds turns of its own, oldest first; none when the policy sampled nothing. Every
        sampled token is trained in exactly one of them.
        """
        order = {node: index for index, node in enumerate(self.turns)}
        trained: set[int] = set()
        rows: list[Sample] = []
        for path in self._leaf_paths():
            fresh = [node for node in path if node in order and node not in trained and len(self.nodes[node].token_ids)]
            if fresh:
                trained.update(fresh)
                row_name = f"{name}#{len(rows)}" if rows else name
                rows.append(self._row(row_name, name, path, {n: order[n] for n in fresh}, reward, outcome))
        return rows

    def answer(self, name: str) -> Sample:
        """The row of an answer, not scored yet: one path, all of whose turns are trained. There is one also when
        nothing was sampled, for the audit of lengths. An answer is no trajectory of an environment: its row has no
        outcome, and no turns that an estimator could give credit to.
        """
        order = {node: index for index, node in enumerate(self.turns)}
        row = self._row(name, "", [*range(len(self.nodes))], order, reward=None, outcome=None)
        return replace(row, turns=())

    def _row(
        self,
        row: str,
        name: str,
        path: list[int],
        fresh: dict[int, int],
        reward: Reward | None,
        outcome: Outcome | None,
    ) -> Sample:
        nodes = [(place, self.nodes[place]) for place in path]
        first = next(i for i, (_, node) in enumerate(nodes) if node.sampled)
        prompt = _joined([node.token_ids for _, node in nodes[:first]])
        ids, logprobs, mask = array("i"), array("f"), bytearray()
        runs: list[tuple[int, int]] = []
        turns: list[Turn] = []
        for place, node in nodes[first:]:
            size = len(node.token_ids)
            if place in fresh:
                turn = Turn(index=fresh[place], start=len(ids), num_tokens=size, reward=node.reward, state=node.state)
                turns.append(turn)
            ids += node.token_ids
            mask += (b"\x01" if place in fresh else b"\x00") * size
            known = place in fresh and node.logprobs is not None  # others have mask 0: their zeros are never read
            logprobs += node.logprobs if known and node.logprobs is not None else array("f", bytes(4 * size))
            # Text has no version: it counts to the turn before it, so that runs cover every token.
            runs += node.version_runs if node.sampled else (((runs[-1][0], size),) if size else ())
        last = next(node for _, node in reversed(nodes) if node.sampled)
        return Sample(
            sample_id=row,
            prompt_token_ids=prompt,
            response_token_ids=ids,
            loss_mask=bytes(mask),
            behaviour_logprobs=logprobs,
            version_runs=_positive(runs),
            finish_reason=last.finish_reason,
            generation_s=sum(self.nodes[place].generation_s for place in fresh),
            reward=reward,
            num_turns=len(turns),
            experts=join_records(node.experts for _, node in nodes),
            trajectory=name,
            turns=tuple(turns),
            outcome=outcome,
            replica=last.replica,
        )

    def _leaf_paths(self) -> Iterator[list[int]]:
        """From the root to each leaf, by the age of the leaf's last turn; requests after it are cut off: nothing was
        sampled from them.
        """
        parents = {node.parent for node in self.nodes}
        ends: dict[int, None] = {}
        for place in range(len(self.nodes)):
            if place in parents:
                continue
            end: int | None = place
            while end is not None and not self.nodes[end].sampled:
                end = self.nodes[end].parent
            if end is not None:
                ends[end] = None
        for end in sorted(ends):
            yield self.path(end)

    def _children(self, parent: int | None) -> list[int]:
        return [i for i, node in enumerate(self.nodes) if node.parent == parent]


def _joined(parts: list[array]) -> array:
    if len(parts) == 1:
        return parts[0]  # the samples of a prompt share its tokens, in memory and where they are pickled together
    ids = array("i")
    for part in parts:
        ids += part
    return ids


def _positive(runs: list[tuple[int, int]]) -> VersionRuns:
    return merge_runs((version, count) for version, count in runs if count)
