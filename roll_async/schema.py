"""The nouns of the system: what travels between folders.

Token ids are `array('i')` (int32), log-probs `array('f')` (float32): compact, picklable, and readable by torch without
a copy (`torch.frombuffer`). They are never changed after construction.

Worked example. Prompt `[5, 6]`, the model answers `[7, 8]` under version 3, is interrupted, and goes on with `[9]`
under version 4: one `Completion` with `token_ids=[7, 8, 9]`, three log-probs and `version_runs=((3, 2), (4, 1))`. Step
5 is trained from weights of version 4, so there its staleness is 5 - 1 - 3 = 1: a sample is as old as its oldest
trained token.

Shape letters: B rows (one row = one sample), T token positions of the padded batch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WeightVersion = int
"""The training step whose weights they are; 0 is the initial model."""

VersionRuns = tuple[tuple[WeightVersion, int], ...]
"""Run-length coded weight version per token: ((version, num_tokens), ...), in token order."""


def merge_runs(runs: Iterable[tuple[WeightVersion, int]]) -> VersionRuns:
    """Neighbours of one version become one run."""
    return tuple((version, sum(n for _, n in same)) for version, same in groupby(runs, key=lambda run: run[0]))


def cut_runs(runs: VersionRuns, start: int, end: int) -> VersionRuns:
    """Versions of the tokens from `start` to `end` (not included)."""
    found, position = [], 0
    for version, count in runs:
        inside = min(end, position + count) - max(start, position)
        if inside > 0:
            found.append((version, inside))
        position += count
    return tuple(found)


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token or stop string
    LENGTH = "length"  # max_new_tokens or the context is used up
    ABORT = "abort"  # interrupted on request; the tokens so far are valid


COLDEST = 1e-4
"""Logits divided by a smaller temperature, other than 0, leave the range of float16."""
_MOST_TOP_K = 10_000_000
"""Above every vocabulary, within the 32 bits that engines have for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request samples. Defaults are the plain categorical distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 = off."""
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence ids."""

    def __post_init__(self) -> None:
        """Raises ValueError for what would spoil an engine for the requests beside this one."""
        t = self.temperature
        for name, value, is_sound, expected in (
            ("temperature", t, t == 0 or COLDEST <= t <= 1 / COLDEST, f"0 or {COLDEST} to {1 / COLDEST:g}"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k, -1 <= self.top_k <= _MOST_TOP_K, f"-1 to {_MOST_TOP_K}"),
            ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "finite, above 0"),
            ("stop_strings", self.stop_strings, all(self.stop_strings), "texts that are not empty"),
        ):
            if not is_sound:
                raise ValueError(f"{name}: expected {expected}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A picture in a prompt, as its file was: what a model reads of it is made where the model is, each time alike
    (`prompts/images.py`).
    """

    data: bytes = field(repr=False)
    """PNG, JPEG or another format that Pillow reads."""
    grid: tuple[int, int]
    """Rows and columns of tokens that stand for it in the prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt that it takes."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question, tokenised."""

    row_id: str
    """Id of the data row; the same row in another epoch has the same row_id."""
    token_ids: array  # [P] int32
    domain: str
    """Key of `rewards` in the config that scores it."""
    ground_truth: str
    text: str = ""
    """Last user message, for judges and logs."""
    extra: Mapping[str, str] = field(default_factory=dict)
    answer_ids: array | None = None  # [R] int32
    """Answer of a supervised row, with its end mark: trained on in place of samples."""
    content: str = ""
    """Digest of what the row says (messages, truth, other columns), by which a resumed run knows it."""
    thought: str = ""
    """Opening mark of the thought that the rendered prompt ends inside; empty: of none."""
    images: tuple[Image, ...] = ()
    """In the order of their tokens, which are the first image tokens of `token_ids`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRecord:
    """Which experts read the first tokens of a row: the choice of every router, as the engine made it.

    Worked example: 2 layers, 2 experts per token; `ids=[0, 3, 1, 2, 2, 3, 0, 1]` says that position 0 went to experts 0
    and 3 in the first layer and to 1 and 2 in the second, position 1 to 2 and 3, then to 0 and 1. The last token an
    engine samples is never read by the model: n tokens have n - 1 positions.
    """

    ids: array  # [positions * num_layers * top_k], 'B' (up to 256 experts) or 'h'
    num_layers: int
    """All layers of the model, or only those that have experts."""
    top_k: int

    def __post_init__(self) -> None:
        assert self.ids.typecode in "Bh" and len(self.ids) % (self.num_layers * self.top_k) == 0

    @property
    def num_positions(self) -> int:
        """Positions recorded."""
        return len(self.ids) // (self.num_layers * self.top_k)


def join_records(records: Iterable[ExpertRecord | None]) -> ExpertRecord | None:
    """One record after the other; what has none is left out. None when nothing is left."""
    found = [record for record in records if record is not None]
    if len(found) < 2:
        return found[0] if found else None
    ids = array(found[0].ids.typecode)
    for record in found:
        assert (record.num_layers, record.top_k) == (found[0].num_layers, found[0].top_k), "one model, one shape"
        ids.extend(record.ids)
    return ExpertRecord(ids=ids, num_layers=found[0].num_layers, top_k=found[0].top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One generation on one replica. Token in, token out."""

    request_id: str
    prompt_token_ids: array  # [P], for a resumed request: the prompt and the tokens generated so far
    sampling: SamplingParams
    recorded_positions: int = 0
    """Positions of the prompt whose experts are known: the record of this request begins after them."""
    images: tuple[Image, ...] = ()
    """As of `Prompt.images`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What one request generated."""

    request_id: str
    token_ids: array  # [R] int32, without the prompt, with the end-of-sequence token
    logprobs: array  # [R] float32, natural log of the probability it was sampled with
    version_runs: VersionRuns
    finish_reason: FinishReason
    generation_s: float
    """Seconds from submission to the end, on the engine's clock."""
    experts: ExpertRecord | None = None
    """From the request's `recorded_positions` on; None when the engine does not record."""
    replica: str = ""
    """Engine replica that sampled its last token; empty on the replica itself."""

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs) == sum(n for _, n in self.version_runs), (
            "one log-prob and version per token"
        )

    @classmethod
    def empty(cls, request_id: str, reason: FinishReason = FinishReason.ABORT, generation_s: float = 0.0) -> Completion:
        """Of a request that ends without a token."""
        return cls(
            request_id=request_id,
            token_ids=array("i"),
            logprobs=array("f"),
            version_runs=(),
            finish_reason=reason,
            generation_s=generation_s,
        )


class RewardStatus(str, Enum):
    """A score exists only with OK. Nothing else is a wrong answer."""

    OK = "ok"
    TIMEOUT = "timeout"  # judging this sample exceeded the scorer's limits of time or memory; asking again is no use
    ERROR = "error"  # the reward raised on this sample: a bug in the reward or in the data row
    OUTAGE = "outage"  # the scorer could not work; the same sample can be scored when it is back


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """Verdict of one scorer on one sample."""

    score: float
    status: RewardStatus = RewardStatus.OK
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers usable by `filter_groups.metric`, e.g. acc, format."""
    reason: str = ""
    scoring_s: float = 0.0
    place: str = ""
    """`FILE:LINE, in FUNCTION` of the reward's code, if it raised."""
    traceback: str = ""
    """From the process in which it raised."""


class Outcome(str, Enum):
    """How a trajectory of many turns ended. Only a trusted end carries a reward; nothing else is a failure of the
    policy, and it is never trained as one.
    """

    SOLVED = "solved"
    FAILED = "failed"
    TRUNCATED_TURNS = "truncated_turns"  # cut at max_steps, and graded as it stood
    TRUNCATED_TOKENS = "truncated_tokens"  # the context was used up; graded as it stood
    TRUNCATED_TIME = "truncated_time"  # cut at the time limit of its tag; graded as it stood
    AGENT_ERROR = "agent_error"  # the agent's own code raised
    INFRA_ERROR = "infra_error"  # the world crashed, hung or could not be reached
    GRADER_ERROR = "grader_error"  # the end was reached and could not be judged
    CANCELLED = "cancelled"  # nobody wants it any more

    @property
    def is_trusted(self) -> bool:
        """Whether the reward of a trajectory that ended so says something about the policy."""
        return self in _TRUSTED


_TRUSTED = frozenset(
    {Outcome.SOLVED, Outcome.FAILED, Outcome.TRUNCATED_TURNS, Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TIME}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of the policy, and where its tokens lie in a row.

    Worked example: the row's response is `[7, 8, 3, 3, 9]` with mask `1 1 0 0 1`; its turns are `Turn(index=0, start=0,
    num_tokens=2, ...)` and `Turn(index=1, start=4, num_tokens=1, ...)`.
    """

    index: int
    """Order in the trajectory, from 0, over all of its rows."""
    start: int
    """First position in the response."""
    num_tokens: int
    reward: float = 0.0
    """What the world gave for it; the rewards of all turns add up to the trajectory's."""
    state: int = 0
    """Key of the observation it answered: equal states of a group share it (gigpo)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceNode:
    """The tokens that one message or one turn of the policy added to a text. Sampled by the policy iff there are
    log-probs.
    """

    parent: int | None
    """Position of the node it continues in its tree; None for a beginning."""
    role: str
    """system, user, tool: the request's new part, by its last message; assistant: sampled."""
    token_ids: array  # [N] int32, only those that this node adds
    logprobs: array | None = None  # [N] float32 of a sampled node
    version_runs: VersionRuns = ()
    """Over the N tokens of a sampled node."""
    finish_reason: FinishReason = FinishReason.STOP
    experts: ExpertRecord | None = None
    """From where the records of its ancestors end."""
    generation_s: float = 0.0
    replica: str = ""
    """Engine replica that sampled its last token."""
    started_s: float = 0.0
    """Loop time when the request came."""
    reward: float = 0.0
    state: int = 0

    def __post_init__(self) -> None:
        if self.logprobs is None:
            if self.version_runs:
                raise ValueError("a node without log-probs was not sampled and has no versions")
            return
        counts = len(self.token_ids), len(self.logprobs), sum(n for _, n in self.version_runs)
        if len(set(counts)) > 1:
            raise ValueError(f"a sampled node needs one log-prob and version per token; it has {counts}")

    @property
    def sampled(self) -> bool:
        """Whether the policy wrote it."""
        return self.logprobs is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One row to train: a prompt and everything after it. Tool and environment tokens carry mask 0, log-prob 0.

    A trajectory is one row, or several: a path from the root to each leaf of its tree of turns. Tokens that paths share
    are trained in the first of them. All rows of a trajectory carry its one reward.
    """

    sample_id: str
    prompt_token_ids: array  # [P] int32
    response_token_ids: array  # [R] int32, all turns
    loss_mask: bytes  # [R] 1 = sampled by the policy and trained, 0 = tool or environment token
    behaviour_logprobs: array  # [R] float32
    version_runs: VersionRuns  # over the R tokens; masked tokens carry the version current when they were added
    finish_reason: FinishReason
    generation_s: float
    reward: Reward | None = None
    num_turns: int = 1
    experts: ExpertRecord | None = None
    """Of the prompt's and the response's first positions, each from when the model first read it."""
    trajectory: str = ""
    """Rows of one trajectory share this name; empty: the row is a whole trajectory."""
    turns: tuple[Turn, ...] = ()
    """Turns trained in this row, in order; empty: all trained tokens are one turn."""
    outcome: Outcome | None = None
    """How the trajectory ended; None for a single answer."""
    replica: str = ""
    """Engine replica that sampled its last token; empty when the sample was read from the ledger."""
    teacher_logprobs: array | None = None  # [R] float32, of a distillation teacher behind an address

    def __post_init__(self) -> None:
        if self.outcome is not None and not self.outcome.is_trusted and self.reward is not None:
            raise ValueError(f"{self.sample_id}: a trajectory that ended as {self.outcome.value} carries no reward")
        size = len(self.response_token_ids)
        assert self.experts is None or self.experts.num_positions < len(self.prompt_token_ids) + max(1, size)
        assert size == len(self.loss_mask) == len(self.behaviour_logprobs) == sum(n for _, n in self.version_runs)
        assert self.teacher_logprobs is None or len(self.teacher_logprobs) == size

    @property
    def is_cut(self) -> bool:
        """Whether it ended because its tokens ran out."""
        return self.finish_reason is FinishReason.LENGTH or self.outcome is Outcome.TRUNCATED_TOKENS

    @property
    def oldest_version(self) -> WeightVersion | None:
        """Version of the oldest trained token; None when no token is trained."""
        position, oldest = 0, None
        for version, count in self.version_runs:
            if any(self.loss_mask[position : position + count]) and (oldest is None or version < oldest):
                oldest = version
            position += count
        return oldest


Answered = tuple[Prompt, Sequence[Sample]]
"""A prompt, and the rows of one trajectory that answers it, oldest first; one row for a single answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All samples of one prompt: the unit of filtering, queueing and exactly-once accounting. Always whole."""

    group_id: int
    """Admission number, unique in a run, increasing: the order in which slots were given out."""
    prompt: Prompt
    samples: tuple[Sample, ...]
    admitted_version: WeightVersion
    """Newest version the engines held when the slot was given out."""
    admitted_s: float
    """Loop time at admission."""
    finished_s: float
    """Loop time when the last reward arrived."""
    generated_s: float | None = None
    """Loop time when the last token arrived; None where no score was waited for, and after a restart."""
    baseline_score: float | None = None
    """Score of a greedy answer to the prompt, for the remax estimator."""

    @property
    def oldest_version(self) -> WeightVersion | None:
        """Version of the oldest trained token of the group; None when no token is trained."""
        versions = [v for s in self.samples if (v := s.oldest_version) is not None]
        return min(versions) if versions else None

    @property
    def trajectories(self) -> tuple[tuple[Sample, ...], ...]:
        """The rows of each trajectory, in the order of their first rows."""
        rows: dict[object, list[Sample]] = {}
        for position, sample in enumerate(self.samples):
            rows.setdefault(sample.trajectory or position, []).append(sample)
        return tuple(tuple(found) for found in rows.values())

    @property
    def mean_score(self) -> float:
        """Of its trajectories; one without a reward counts as 0."""
        scores = [0.0 if rows[0].reward is None else rows[0].reward.score for rows in self.trajectories]
        return sum(scores) / len(scores)

    @property
    def num_tokens(self) -> int:
        """Response tokens of all samples."""
        return sum(len(s.response_token_ids) for s in self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """The records of B rows one after another: row b holds the first `num_positions[b]` positions. Shape letters: N
    positions of all rows, L layers, K experts per token.
    """

    ids: Tensor  # [N,L,K] uint8 or int16
    num_positions: Tensor  # [B] int64, 0 where nothing was recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTable:
    """The K turns of a batch, one entry each."""

    trajectory: Tensor  # [K] int64, unique over groups
    index: Tensor  # [K] int64, order in the trajectory
    rewards: Tensor  # [K] float32
    states: Tensor  # [K] int64, meaningful inside a group


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """Whole groups as right-padded tensors; position t of every per-token field belongs to token t of the row.

    The log-prob of token t comes from the logits at t - 1, so position 0 is never trained.
    """

    step: int
    """Training step that consumes it, from 1."""
    tokens: Tensor  # [B,T] int64, prompt then response, padded with 0
    lengths: Tensor  # [B] int64, prompt + response
    prompt_lengths: Tensor  # [B] int64
    mask: Tensor  # [B,T] bool, True = sampled by the policy (before staleness and sample masks)
    behaviour_logprobs: Tensor  # [B,T] float32, 0 where not sampled
    versions: Tensor  # [B,T] int64 weight version that sampled the token, -1 where not sampled
    scores: Tensor  # [B] float32, raw outcome score
    group_index: Tensor  # [B] int64, rows of one prompt share a value
    cut: Tensor  # [B] bool, the row's trajectory ended because its tokens ran out
    domain_index: Tensor  # [B] int64, into `domains`
    domains: tuple[str, ...]
    baseline_scores: Tensor | None = None  # [B] float32, greedy score of the row's prompt (remax)
    experts: ExpertRows | None = None
    """The engines' choice of experts; None when no row has a record."""
    trajectory_index: Tensor | None = None  # [B] int64, rows of one trajectory share it; None: every row is one
    turns: TurnTable | None = None
    turn_of: Tensor | None = None  # [B,T] int64 into `turns`, -1 where not sampled; None: single answers
    roles: tuple[str, ...] = ()
    """[B] domain of each row, with the column `role` of its prompt if it has one (rae)."""
    reported: Mapping[str, Tensor] = field(default_factory=dict)
    """[B] float32 by name: numbers of the reward besides the score (gdpo)."""
    teachers: tuple[str, ...] = ()
    """[B] name of the distillation teacher of each row, empty where the row has none; () = of a run without."""
    teacher_logprobs: Tensor | None = None  # [B,T] float32 that came with the samples, NaN where none did
    images: tuple[tuple[Image, ...], ...] = ()
    """[B] those of each row's prompt; () = no row has any."""

    @property
    def response_lengths(self) -> Tensor:
        """[B] int64 generated tokens, tool and observation tokens excluded."""
        return self.mask.sum(-1)
