"""How many bytes of a weight push cross which kind of link, and how long that takes at given bandwidths.

Arithmetic over tensor shapes, for models and clusters that are not at hand; `roll-async simulate --weights` and
`roll-async show --weights` print it. The rules are those of the push itself: `layout.py` says what an engine rank
keeps, every trainer rank that holds a tensor sends its share, and replicas relay the weights in a chain (`links.py`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from roll_async.weight_sync.layout import EngineLayout

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_NUMBER = re.compile(r"\.\d+\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTensor:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int = 2

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Bandwidths in bytes per second and fixed costs in seconds."""

    network: float = 50e9
    """Bandwidth of one rank's network port, each way; 400 Gb/s are 50e9."""
    round_s: float = 0.005
    """Fixed cost of one bucket: the calls to all ranks."""
    chunk_bytes: int = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes and rounds of one push."""

    model_bytes: int
    per_link: tuple[tuple[int, ...], ...]
    """Pipeline stage, engine rank: from one trainer rank of that stage to that rank of the first replica."""
    sent_most: int
    """Bytes that the trainer rank with the largest share sends to the first replica."""
    received_most: int
    """Bytes that the engine rank with the largest share receives, and relays to the next replica."""
    replicas: int
    rounds: int
    """Buckets."""

    @property
    def gathered_bytes(self) -> int:
        """Bytes that one rank would send if it gathered the model and sent it to every engine rank of every replica."""
        return self.model_bytes * self.replicas

    def seconds(self, links: Links) -> float:
        """Time on the slowest link, plus one chunk for each replica of the chain, plus the calls of every bucket."""
        busiest = max(self.sent_most, self.received_most) / links.network
        return busiest + (self.replicas - 1) * links.chunk_bytes / links.network + self.rounds * links.round_s


def traffic(
    tensors: Iterable[HfTensor],
    engine: EngineLayout,
    *,
    trainer_ranks: int,
    pipeline: int = 1,
    replicas: int,
    bucket_bytes: int,
) -> Traffic:
    """The bytes of one push. Layers are distributed evenly over pipeline stages, the embedding on the first, the head
    on the last; the ranks of a stage hold parts or copies of its tensors and share the sending.
    """
    tensors = list(tensors)
    num_layers = 1 + max((int(found[1]) for t in tensors if (found := _LAYER.search(t.name))), default=0)
    sent = [[0] * engine.tensor for _ in range(pipeline)]
    # Layers are alike: one of each kind is computed, which is thousands of times fewer with experts.
    alike = Counter(
        (_stage(t.name, num_layers, pipeline), _NUMBER.sub(".0", t.name), t.shape, t.element_bytes) for t in tensors
    )
    for (stage, name, shape, element_bytes), count in alike.items():
        for rank in range(engine.tensor):
            kept = engine.kept(name, shape, rank)
            sent[stage][rank] += count * math.prod(shape if kept is None else kept.of(shape)) * element_bytes
    # trainer_ranks / pipeline ranks share what the largest stage sends.
    most = math.ceil(max(map(sum, sent)) * pipeline / trainer_ranks)
    return Traffic(
        model_bytes=sum(tensor.num_bytes for tensor in tensors),
        per_link=tuple(tuple(math.ceil(b * pipeline / trainer_ranks) for b in stage) for stage in sent),
        sent_most=most,
        received_most=max(map(sum, zip(*sent, strict=True))),
        replicas=replicas,
        rounds=max(1, math.ceil(most * trainer_ranks / bucket_bytes)),
    )


def _stage(name: str, num_layers: int, stages: int) -> int:
    found = _LAYER.search(name)
    if found is None:
        return 0 if "embed" in name else stages - 1
    return int(found[1]) * stages // num_layers
