"""Which part of each tensor an engine rank keeps, and where a trainer rank's part must be cut for that.

Both sides cut Hugging Face tensors along one dimension: tensor parallelism splits a projection by output rows or by
input columns, the vocabulary by rows. A tensor that this module does not know is sent whole to every rank, so a missing
name costs bytes and is no error.

Worked example: 8 rows of `q_proj` on 2 trainer ranks (0-3, 4-7) for an engine with 4 ranks: the first trainer rank
sends rows 0-1 to engine rank 0 and rows 2-3 to engine rank 1, and no engine rank receives a row that it does not keep.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise


class _Kind(Enum):
    """How engines split a tensor."""

    ROWS = re.compile(r"\.(q_proj|gate_proj|up_proj|w1|w3)\.(weight|bias)$")
    KV_ROWS = re.compile(r"\.(k_proj|v_proj)\.(weight|bias)$")
    COLUMNS = re.compile(r"\.(o_proj|down_proj|w2)\.weight$")
    VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")


# Asked for each name, rank and push, and a mixture of experts has tens of thousands of names.
@lru_cache(maxsize=1 << 16)
def _kind(name: str) -> _Kind | None:
    return next((kind for kind in _Kind if kind.value.search(name)), None)


_VOCABULARY_MULTIPLE = 64
"""vLLM and SGLang pad the vocabulary to a multiple of it before they split it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Rows `start` to `stop` (excluded) of dimension `dim`."""

    dim: int
    start: int
    stop: int

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the part."""
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLayout:
    """How one engine replica holds the model."""

    tensor: int = 1
    """Tensor-parallel ranks."""
    num_kv_heads: int = 1
    """Key-value heads of the model; with fewer than ranks, several ranks keep the same head."""
    expert_parallel: bool = False
    """Whole experts are distributed over the ranks instead of being cut; every rank then receives all of them."""

    def kept(self, name: str, shape: Sequence[int], rank: int) -> Cut | None:
        """The part of an HF tensor that tensor-parallel rank `rank` keeps; None = all of it."""
        # Which rank has which expert is the engine's choice, not known here.
        if self.tensor == 1 or (self.expert_parallel and ".experts." in name):
            return None
        match _kind(name):
            case _Kind.VOCABULARY:
                return self._vocabulary(shape[0], rank)
            case _Kind.KV_ROWS:
                return self._even(0, shape[0], min(self.tensor, self.num_kv_heads), rank)
            case _Kind.ROWS:
                return self._even(0, shape[0], self.tensor, rank)
            case _Kind.COLUMNS:
                return self._even(1, shape[1], self.tensor, rank)
        return None

    def _even(self, dim: int, size: int, parts: int, rank: int) -> Cut | None:
        """Equal parts; neighbouring ranks share one where there are fewer parts than ranks."""
        if size % parts or self.tensor % parts:  # it is sent whole: costs bytes, and is never wrong
            return None
        part, step = rank // (self.tensor // parts), size // parts
        return Cut(dim=dim, start=part * step, stop=(part + 1) * step)

    def _vocabulary(self, size: int, rank: int) -> Cut | None:
        padded = -(-size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        if padded % self.tensor:
            return None
        step = padded // self.tensor
        # Bounded by the real size: the last ranks may hold padding alone.
        return Cut(dim=0, start=min(size, rank * step), stop=min(size, (rank + 1) * step))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """A part of a tensor that is sent in one piece."""

    cut: Cut | None
    """None = the whole tensor."""
    ranks: tuple[int, ...]
    """Tensor-parallel ranks of a replica that receive it."""


def fragments(layout: EngineLayout, name: str, shape: Sequence[int], held: Cut | None) -> list[Fragment]:
    """The part `held` of a tensor, cut where the parts of the engine's ranks begin. Rows no rank keeps are skipped.

    Ranks that cut the tensor along another dimension than `held` does receive all of it.
    """
    everyone = tuple(range(layout.tensor))
    cuts = [layout.kept(name, shape, rank) for rank in everyone]
    known = [cut for cut in cuts if cut is not None]
    if len(known) < len(cuts) or (held is not None and held.dim != known[0].dim):
        return [Fragment(cut=held, ranks=everyone)]
    dim = known[0].dim
    first, last = (0, shape[dim]) if held is None else (held.start, held.stop)
    edges = {edge for cut in known for edge in (cut.start, cut.stop) if first < edge < last}
    found = []
    for start, stop in pairwise(sorted({first, last} | edges)):
        ranks = tuple(rank for rank in everyone if known[rank].start <= start and stop <= known[rank].stop)
        whole = (start, stop) == (0, shape[dim])
        if ranks:
            found.append(Fragment(cut=None if whole else Cut(dim=dim, start=start, stop=stop), ranks=ranks))
    return found


def needed_elements(layout: EngineLayout, name: str, shape: Sequence[int], rank: int, dim: int) -> int:
    """Elements of a tensor that arrive at a rank when its parts are cut along `dim`."""
    kept = layout.kept(name, shape, rank)
    sizes = shape if kept is None or kept.dim != dim else kept.of(shape)
    count = 1
    for size in sizes:
        count *= size
    return count
