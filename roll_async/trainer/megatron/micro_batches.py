"""Rows to what the model reads, and the model's answers back to rows.

The model may see rows padded side by side, or packed one after another, and under context parallelism only its share of
the positions; of rows that are copies of one another it sees one. The loss never knows: answers are brought back to
[b,t] rows, aligned with the tokens they speak of.
Shape letters: B rows of a StepRows, b rows of a micro-batch, q sequences fed for them, t its width, s positions that
this rank feeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_async.prompts.images import laid_out
from roll_async.schema import ExpertRows, Image
from roll_async.trainer.megatron.model.shapes import pack_multiple, padded_length
from roll_async.trainer.megatron.settings import MegatronSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """Rows of a training step, or of a scoring call: of the whole batch, or a rank's share of it."""

    tokens: Tensor  # [B,T] int64, right-padded
    lengths: Tensor  # [B] int64
    mask: Tensor  # [B,T] bool
    fields: Mapping[str, Tensor]  # [B,T] or [B], whatever the loss reads
    experts: ExpertRows | None = None
    """Choice of experts to replay."""
    images: tuple[tuple[Image, ...], ...] = ()
    """[B] of each row; () = no row has any."""

    def images_of(self, row: int) -> tuple[Image, ...]:
        """Those of one row."""
        return self.images[row] if self.images else ()

    def taken(self, index: Tensor) -> StepRows:
        """A copy of the rows `index` [b], in that order, with all that belongs to them, as wide as the longest."""
        lengths = self.lengths[index]
        width = int(lengths.max()) if len(lengths) else 0

        def of(values: Tensor) -> Tensor:
            return values[index] if values.dim() == 1 else values[index, :width]

        return StepRows(
            tokens=of(self.tokens),
            lengths=lengths,
            mask=of(self.mask),
            fields={name: of(x) for name, x in self.fields.items()},
            experts=None if self.experts is None else _records_of(self.experts, index),
            images=tuple(self.images[row] for row in index.tolist() if self.images),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextShare:
    """This rank among those that share the positions of a row."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFeed:
    """What this rank's model reads. Position s predicts `targets[s]`, the token after it."""

    tokens: Tensor  # [q,s] int64, packed: [1,s]
    positions: Tensor  # like tokens
    targets: Tensor  # like tokens
    asked: Tensor  # [n] int64: positions of the flattened grid whose prediction is asked for
    padding: Tensor  # like tokens, bool: not a token of any row
    bounds: tuple[int, ...] | None
    """packed: where each sequence starts in the pack (over all context ranks), and the end; None: padded rows."""
    starts: Tensor | None = None  # [R+1] int32: `bounds` on the device
    experts: Tensor | None = None  # [q,s,L,K] int16, -1 where nothing is recorded
    axes: Tensor | None = None  # [3,q,s] int64: positions in time, height and width; None: all are `positions`
    slots: Tensor | None = None  # like tokens: which of the tower's outputs is the token's embedding, -1 = none
    images: tuple[Image, ...] = ()
    """What the tower is given, one after another; what several sequences see once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Some rows, cut to the longest of them. No rows: filler, so that all ranks take part equally often."""

    rows: Tensor  # [b] int64 row numbers in the StepRows they were cut from
    mask: Tensor  # [b,t] bool
    fields: Mapping[str, Tensor]  # [b,t] or [b]
    feed: ModelFeed
    source: Tensor  # [b,t] int64: where the prediction of token t lies in the feeds of all context ranks, flattened


def cut(
    sequences: Sequence[Sequence[int]],
    step: StepRows,
    settings: MegatronSettings,
    *,
    device: torch.device,
    context: ContextShare,
    feed_shape: tuple[int, int] | None = None,
    image_token: int = -1,
) -> MicroBatch:
    """The micro-batch of these sequences, on the device. Each is given as the rows that are copies of it, equal in
    tokens, mask and images; the first is fed. `feed_shape` (sequences, positions): pad the model's input up to it.
    `image_token`: the id that stands for parts of images, where rows have any.
    """
    rows = torch.tensor([row for copies in sequences for row in copies], dtype=torch.int64)
    fed = torch.tensor([copies[0] for copies in sequences], dtype=torch.int64)
    fed_as = torch.tensor([i for i, copies in enumerate(sequences) for _ in copies], dtype=torch.int64)
    lengths = step.lengths[fed].tolist()
    # Filler has no rows, but the model must be fed a position.
    width = max((int(x) for x in lengths), default=1)
    tokens, mask = _take(step.tokens, fed, width), _take(step.mask, fed, width)
    place = _packed_place if settings.micro_batching == "packed" else _padded_place
    grid, bounds, source = place(lengths, width, settings, feed_shape)
    predicts = torch.zeros_like(mask)
    predicts[:, :-1] = mask[:, 1:]
    following = torch.zeros_like(tokens)
    following[:, :-1] = tokens[:, 1:]
    share = _share_of(grid.shape, bounds, context)

    def lay(values: Tensor, filler: int | bool) -> Tensor:
        """[q,t] values into the feed's grid, this context rank's share."""
        # The filler is last, where the grid's -1 reads it.
        flat = torch.cat([values.reshape(-1), values.new_full((1,), filler)])
        return flat[grid.reshape(-1)].view(grid.shape).gather(1, share)

    valid = (
        torch.arange(width)[None] < torch.tensor(lengths)[:, None]
        if lengths
        else torch.zeros(0, width, dtype=torch.bool)
    )
    images, axes, slots = _seen(step, fed, width, image_token) if step.images else ((), None, None)
    feed = ModelFeed(
        tokens=lay(tokens, 0).to(device),
        positions=lay(torch.arange(width).expand(len(lengths), -1), 0).to(device),
        targets=lay(following, 0).to(device),
        asked=lay(predicts, False).flatten().nonzero()[:, 0].to(device),
        padding=~lay(valid, False).to(device),
        bounds=bounds,
        starts=None if bounds is None else torch.tensor(bounds, dtype=torch.int32).to(device),
        experts=None
        if step.experts is None
        else _experts_at(step.experts, lay(_recorded(step.experts, fed, width), -1)).to(device),
        axes=None if axes is None else torch.stack([lay(axis, 0) for axis in axes]).to(device),
        slots=None if slots is None else lay(slots, -1).to(device),
        images=images,
    )
    return MicroBatch(
        rows=rows,
        mask=mask[fed_as].to(device),
        # Of all rows, not of those that are fed: copies differ in what the loss reads.
        fields={name: _take(x, rows, width).to(device) for name, x in step.fields.items()},
        feed=feed,
        source=_in_gathered(source, grid.shape, bounds, context)[fed_as].to(device),
    )


def _seen(step: StepRows, index: Tensor, width: int, image_token: int) -> tuple[tuple[Image, ...], Tensor, Tensor]:
    """Different images of the rows `index` [q] in the order of their first tokens, axes [3,q,t] of all tokens, and
    [q,t] which of the tower's outputs for these images takes a token's place, -1 where none does.
    """
    numbers: dict[Image, Tensor] = {}
    count = 0
    axes = torch.arange(width).expand(3, len(index), -1).clone()
    slots = torch.full((len(index), width), -1)
    for i, row in enumerate(index.tolist()):
        of_row, length = step.images[row], int(step.lengths[row])
        if not of_row:
            continue
        for image in of_row:
            if image not in numbers:
                numbers[image] = torch.arange(count, count + image.num_tokens)
                count += image.num_tokens
        axes[:, i, :length], own = laid_out(step.tokens[row, :length], of_row, image_token)
        outputs = torch.cat([numbers[image] for image in of_row])
        slots[i, :length] = torch.where(own < 0, -1, outputs[own])
    return tuple(numbers), axes, slots


def _records_of(experts: ExpertRows, index: Tensor) -> ExpertRows:
    """The records of the rows `index` [b], in that order."""
    count = experts.num_positions
    first = count.cumsum(0) - count
    places = [torch.arange(int(first[row]), int(first[row] + count[row])) for row in index.tolist()]
    return ExpertRows(
        ids=experts.ids[torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)], num_positions=count[index]
    )


def _recorded(experts: ExpertRows, index: Tensor, width: int) -> Tensor:
    """[q,t] where the record of each token of the rows lies in `experts.ids`; -1 where there is none."""
    count = experts.num_positions
    first = (count.cumsum(0) - count)[index, None]
    position = torch.arange(width)[None]
    return torch.where(position < count[index, None], first + position, -1)


def _experts_at(experts: ExpertRows, places: Tensor) -> Tensor:
    """[q,s,L,K] int16 records at `places` [q,s]; -1 where that is -1."""
    # Indexing an empty tensor raises, even at 0.
    if not len(experts.ids):
        return torch.full((*places.shape, *experts.ids.shape[1:]), -1, dtype=torch.int16)
    found = experts.ids[places.clamp(min=0)].to(torch.int16)
    return found.masked_fill_((places < 0)[..., None, None], -1)


def rows_of(batch: MicroBatch, gathered: Tensor) -> Tensor:
    """[b,t] answers for each token of the rows from the flattened answers of all context ranks; 0 outside the mask."""
    picked = gathered.gather(0, batch.source.reshape(-1)).view(batch.source.shape)
    return torch.where(batch.mask, picked, 0)


def _take(x: Tensor, index: Tensor, width: int) -> Tensor:
    part = x[index]
    if x.dim() == 1:
        return part
    # A share without rows has no columns, its filler has one.
    return torch.nn.functional.pad(part[:, :width], (0, max(0, width - x.shape[1])))


_Place = tuple[Tensor, tuple[int, ...] | None, Tensor]
"""(grid: index into the flattened rows for each position, -1 = filler; bounds; source before context parallelism)."""


def _padded_place(
    lengths: list[int], width: int, settings: MegatronSettings, feed_shape: tuple[int, int] | None
) -> _Place:
    # Without rows one sequence of filler.
    num_rows, span = feed_shape or (max(1, len(lengths)), padded_length(width, settings))
    grid = torch.full((num_rows, span), -1, dtype=torch.int64)
    count = len(lengths)
    grid[:count, :width] = torch.arange(count * width).view(count, width)
    before = (torch.arange(width) - 1).clamp(min=0)  # position 0 has no prediction, and is never in the mask
    source = torch.arange(count)[:, None] * span + before[None]
    return grid, None, source


def _packed_place(
    lengths: list[int], width: int, settings: MegatronSettings, feed_shape: tuple[int, int] | None
) -> _Place:
    spans = [padded_length(length, settings) for length in lengths]
    starts = [sum(spans[:i]) for i in range(len(spans) + 1)]
    multiple = pack_multiple(settings)
    total = max(multiple, -(-starts[-1] // multiple) * multiple)
    if feed_shape is not None:
        total = max(total, feed_shape[1])
    grid = torch.full((1, total), -1, dtype=torch.int64)
    # `starts` has one more: the end.
    for row, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        grid[0, start : start + length] = torch.arange(row * width, row * width + length)
    before = (torch.arange(width) - 1).clamp(min=0)
    source = torch.tensor(starts[:-1], dtype=torch.int64)[:, None] + before[None]
    # What fills the pack up is a sequence of its own: no row attends to it.
    bounds = tuple(starts if starts[-1] == total else [*starts, total])
    # Positions past the end of a short row may lie beyond the pack; they are outside of the mask.
    return grid, bounds, source.clamp(max=total - 1)


def _share_of(shape: torch.Size, bounds: tuple[int, ...] | None, context: ContextShare) -> Tensor:
    """[rows, s] positions that this context rank feeds: blocks r and 2n - 1 - r of every sequence."""
    if context.size == 1:
        return torch.arange(shape[1]).expand(shape[0], -1)
    edges = bounds or (0, shape[1])
    parts = []
    for start, end in zip(edges, edges[1:], strict=False):
        # An early block and a late one: under a causal mask all ranks have as much work.
        half = (end - start) // (2 * context.size)
        for block in (context.rank, 2 * context.size - 1 - context.rank):
            parts.append(torch.arange(start + block * half, start + (block + 1) * half))
    return torch.cat(parts).expand(shape[0], -1)


def _in_gathered(source: Tensor, shape: torch.Size, bounds: tuple[int, ...] | None, context: ContextShare) -> Tensor:
    """Flat positions of the whole grid to flat positions in the answers of rank 0, rank 1, ... one after another."""
    if context.size == 1:
        return source
    where = torch.empty(shape, dtype=torch.int64)
    local = shape[1] // context.size
    for rank in range(context.size):
        share = _share_of(shape, bounds, ContextShare(rank=rank, size=context.size))
        row_base = torch.arange(shape[0])[:, None] * local + rank * shape[0] * local
        where.scatter_(1, share, row_base + torch.arange(local)[None])
    return where.reshape(-1)[source]
