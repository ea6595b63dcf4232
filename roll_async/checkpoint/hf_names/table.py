"""The declarative mapping between Megatron and Hugging Face parameter names.

A family is a list of rows: a Megatron name pattern in both spellings (local layers and Transformer Engine), the HF
names it corresponds to, how tensors are combined, and along which dimension tensor parallelism splits the Megatron one.
`{i}` is the layer, `{e}` the expert, both counted over the whole model.

Example: `decoder.layers.{i}.mlp.linear_fc1.weight` is `gate_proj` over `up_proj` of layer i, split along dimension 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

from roll_async.checkpoint.folders.hf_config import HfConfig

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
"""Of small models."""

TOWER = "visual."
"""Names of a tower's parameters begin with it."""


class Transform(Enum):
    """How HF tensors become one Megatron tensor."""

    COPY = "copy"
    # The HF side of both may be one tensor that has the parts one after another.
    QKV = "qkv"  # per key-value group: its query heads, its key head, its value head
    GATED_QKV = "gated_qkv"  # and after the query heads their gates, which are beside each in the HF tensor
    # Of the gated delta net, per key head: all that its input is projected to; what goes through its convolution.
    DELTA_INPUT = "delta_input"
    DELTA_GROUPED = "delta_grouped"  # the HF tensors are per key head, too
    DELTA_QKV = "delta_qkv"
    GATE_UP = "gate_up"  # gate over up; under tensor parallelism each rank holds its part of both
    # The HF matrix is [in, out]; a bias is as it is.
    TRANSPOSED = "transposed"
    IN_TURN = "in_turn"  # and its columns are of gate and of up in turn

    @property
    def groups_heads(self) -> bool:
        """Whether the rows of a key head, and of what goes with it, are put side by side."""
        return self.value.endswith("qkv") or self.value.startswith("delta")

    @property
    def transposes(self) -> bool:
        """Whether rows and columns change places."""
        return self in (Transform.TRANSPOSED, Transform.IN_TURN)


class LayerRange(Enum):
    """The layers a row describes."""

    ALL = "all"
    DENSE = "dense"
    MOE = "moe"
    ATTENTION = "attention"
    DELTA = "delta"
    """Of a gated delta net in the place of attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRow:
    """One kind of parameter."""

    megatron: str
    """Name in layers without Transformer Engine."""
    hf: tuple[str, ...]
    te: str | None = None
    """Name in Transformer Engine layers where it is another; checkpoints use it for both."""
    transform: Transform = Transform.COPY
    tp_dim: int | None = None
    """Dimension of the Megatron tensor that tensor parallelism splits; None = every rank holds all of it."""
    layers: LayerRange = LayerRange.ALL
    optional: bool = False
    """Some models of the family have it, others not (biases, a tied output layer)."""
    needed_by: str = ""
    """Megatron field of `Family.fields` that says whether an optional one is there; `not NAME`: it is when the field is
    empty. Without it the output layer: it is there unless it is tied."""
    float32: bool = False
    """Kept in float32 whatever the model's dtype."""

    def is_needed(self, fields: Mapping[str, object]) -> bool:
        """Whether a model with these Megatron fields has it, of rows other than the output layer."""
        if not self.optional or not self.needed_by:
            return not self.optional
        name = self.needed_by.removeprefix("not ")
        return bool(fields.get(name)) != self.needed_by.startswith("not ")

    @property
    def is_expert(self) -> bool:
        """Whether expert parallelism spreads it over ranks."""
        return "{e}" in self.megatron


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """One Megatron parameter with its HF counterparts. Layer and expert are None where the row has none."""

    row: ParameterRow
    name: str
    """Megatron name in layers without Transformer Engine, numbers over the whole model."""
    hf_names: tuple[str, ...]
    layer: int | None
    expert: int | None

    @property
    def te_name(self) -> str:
        """Megatron name in Transformer Engine layers."""
        return (self.row.te or self.row.megatron).format(i=self.layer, e=self.expert)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What decides which parameters a model has."""

    moe_layers: tuple[bool, ...]
    """For each layer, whether its MLP is a mixture of experts."""
    num_experts: int = 0
    delta_layers: tuple[bool, ...] = ()
    """For each layer, whether it has a gated delta net in the place of attention; () = none."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.moe_layers)

    @property
    def layers_are_equal(self) -> bool:
        """Whether all have the same parameters."""
        return len(set(self.moe_layers)) == 1 and not self.delta_layers

    def ranges_of(self, layer: int) -> set[LayerRange]:
        """Those that a layer is in."""
        delta = bool(self.delta_layers) and self.delta_layers[layer]
        return {
            LayerRange.ALL,
            LayerRange.MOE if self.moe_layers[layer] else LayerRange.DENSE,
            LayerRange.DELTA if delta else LayerRange.ATTENTION,
        }


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family."""

    name: str
    architectures: tuple[str, ...]
    rows: tuple[ParameterRow, ...]
    fields: Callable[[HfConfig], dict[str, object]] = lambda config: {}
    """Megatron TransformerConfig fields beyond those of every decoder. Raises ValueError for a model of the family that
    the rows do not describe."""
    input_norms: bool = True
    """The inputs of attention and MLP are normalised."""
    output_norms: bool = False
    """The outputs of attention and MLP are normalised before they join the residual."""
    projection_norms: bool = False
    """Queries, and keys, are normalised over all heads together."""
    activation: str = "silu"
    """As config.json names it."""
    scaled_embedding: bool = False
    """Embeddings are multiplied with the square root of their width."""
    scaled_windows: bool = True
    """The scaling of the rotation is that of windowed layers, too, where config.json does not say."""
    rotary_fraction: float = 1.0
    """Share of the head that is rotated where config.json does not say."""
    tied_by_default: bool = False
    """The output layer is the embedding where config.json does not say."""
    tiny: Mapping[str, Mapping[str, object]]
    """Small models of the family that its certificate is made with: what each has in config.json beyond the sizes of
    all. Together they have every part that the family may have."""
    reads_images: bool = False
    """Images go through a tower (`checkpoint/tower.py`), whose parameters have the same names on both sides."""
    unused: tuple[str, ...] = ()
    """Patterns of HF names that files may hold and no Megatron parameter needs; `{n}` is the number of layers."""

    def require_activation(self, config: HfConfig) -> None:
        """Raises ValueError for another one."""
        config.require(hidden_act=self.activation, hidden_activation=self.activation)

    def match(self, megatron_name: str) -> Match:
        """Resolve a Megatron name, either spelling. Raises ValueError for a name no row knows."""
        for row in self.rows:
            for pattern in (row.megatron, row.te):
                found = pattern and re.fullmatch(_regex(pattern), megatron_name)
                if found:
                    numbers = {key: int(value) for key, value in found.groupdict().items()}
                    return _match(row, numbers.get("i"), numbers.get("e"))
        if self.reads_images and megatron_name.startswith(TOWER):
            return _match(ParameterRow(megatron=megatron_name, hf=(megatron_name,)), None, None)
        raise ValueError(
            f"{self.name}: no Hugging Face name for the Megatron parameter {megatron_name!r}; add a row to hf_names"
        )

    def parameters(self, shape: ModelShape) -> Iterator[Match]:
        """Every parameter a model of this shape may have, embedding first, then layer by layer."""
        for row in self.rows:
            if "{i}" not in row.megatron:
                yield _match(row, None, None)
        for layer in range(shape.num_layers):
            ranges = shape.ranges_of(layer)
            for row in self.rows:
                if "{i}" in row.megatron and row.layers in ranges:
                    for expert in range(shape.num_experts) if row.is_expert else (None,):
                        yield _match(row, layer, expert)

    def is_unused(self, hf_name: str, num_layers: int) -> bool:
        """Whether an HF tensor is known and left out."""
        patterns = (pattern.replace("{n}", str(num_layers)) for pattern in self.unused)
        return any(re.fullmatch(_regex(pattern), hf_name) for pattern in patterns)


def moe_layers(num_layers: int, sparse: Sequence[bool]) -> int | list[int]:
    """`moe_layer_freq` of Megatron's config: 1 where all layers are sparse, so that checkpoints stack them."""
    assert len(sparse) == num_layers
    return 1 if all(sparse) else [int(x) for x in sparse]


def shape_of(num_layers: int, fields: dict[str, object]) -> ModelShape:
    """The shape told by Megatron config fields of `Family.fields`."""
    experts = fields.get("num_moe_experts") or 0
    frequency = fields.get("moe_layer_freq", 1)
    assert isinstance(experts, int)
    if not experts:
        sparse = (False,) * num_layers
    elif isinstance(frequency, list):
        sparse = tuple(bool(x) for x in frequency)
    else:
        assert frequency == 1
        sparse = (True,) * num_layers
    return ModelShape(moe_layers=sparse, num_experts=experts, delta_layers=delta_layers(fields))


def delta_layers(fields: Mapping[str, object]) -> tuple[bool, ...]:
    """For each layer, whether it has a gated delta net in the place of attention; () = none has."""
    given = fields.get("linear_attention_freq") or []
    assert isinstance(given, list)
    return tuple(bool(x) for x in given)


def _match(row: ParameterRow, layer: int | None, expert: int | None) -> Match:
    numbers = {"i": layer, "e": expert}
    return Match(
        row=row,
        name=row.megatron.format(**numbers),
        hf_names=tuple(name.format(**numbers) for name in row.hf),
        layer=layer,
        expert=expert,
    )


@cache
def _regex(pattern: str) -> str:
    """A pattern's regular expression; `*` stands for anything."""
    escaped = re.escape(pattern).replace(r"\*", ".*")
    return escaped.replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
