"""The declarative mapping between Megatron and Hugging Face parameter names.

A family is a list of rows: a Megatron name pattern (both spellings: local layers and Transformer Engine), the HF names
it
corresponds to, how tensors are combined, and along which dimension tensor parallelism splits the Megatron tensor.
`{i}` is the layer, `{e}` the expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Transform(Enum):
    """How HF tensors become one Megatron tensor."""

    COPY = "copy"
    QKV = "qkv"  # per key-value group: its query heads, its key head, its value head
    GATE_UP = "gate_up"  # gate over up; under tensor parallelism each rank holds its part of both


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One kind of parameter."""

    megatron: str
    hf: tuple[str, ...]
    transform: Transform = Transform.COPY
    tp_dim: int | None = None
    """Dimension of the Megatron tensor that tensor parallelism splits; None = every rank holds all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """A Megatron parameter resolved to its HF counterparts."""

    row: Row
    hf_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One model family."""

    name: str
    architectures: tuple[str, ...]
    rows: tuple[Row, ...]
    spec: Mapping[str, object] = field(default_factory=dict)
    """Megatron TransformerConfig fields that this family fixes."""

    def match(self, megatron_name: str) -> Match:
        """Resolve a Megatron name (global layer and expert numbers). Raises ValueError for a name no row knows."""
        for row in self.rows:
            found = re.fullmatch(_regex(row.megatron), megatron_name)
            if found:
                return Match(row=row, hf_names=tuple(name.format(**found.groupdict()) for name in row.hf))
        raise ValueError(
            f"{self.name}: no Hugging Face name for the Megatron parameter {megatron_name!r}; add a row to hf_names"
        )


def _regex(pattern: str) -> str:
    escaped = re.escape(pattern).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
    return escaped
