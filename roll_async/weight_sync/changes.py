"""Only what changed: the values of a piece that differ from those of the export before, and where they lie.

A step of reinforcement learning changes 1-3 % of bfloat16 weights, scattered. A piece of which few values changed
travels as these values, end to end, and then one byte for each: how many unchanged values lie before it. Gaps longer
than a byte can say are bridged by sending an unchanged value.

Worked example: of 600 bfloat16 values those at 3 and 500 changed. Sent are the values at 3, 259 (unchanged) and 500 and
the bytes 3, 255 and 240: 9 bytes instead of 1200.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll_async.weight_sync.bucket import TensorSlot, UpdatePlan
from roll_async.weight_sync.digest import FrozenDigest, flat_bytes
from roll_async.weight_sync.layout import Cut

_PAYS = 0.5
"""Largest share of a piece's bytes that changes may take; beyond it, finding them costs more than it saves."""
_LOOKED_AT = 4096
"""Values that tell whether the rest is worth comparing."""
_STRIDE = 256
"""Largest distance that a byte says."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Values are compared as integers, by size: bit by bit."""


class LastExport:
    """The bytes of every piece of the last export, in host memory: a trainer rank keeps what it sent, an engine rank
    what it took in. Nothing is kept of an export on which none builds.
    """

    def __init__(self) -> None:
        self._export = 0
        self._keeps = False
        self._pieces: dict[tuple[str, Cut | None], Tensor] = {}
        self.frozen = FrozenDigest()
        """Of the weights below adapters, which later exports do not send."""

    def begin(self, plan: UpdatePlan) -> bool:
        """Whether this is the export that the plan builds on; if not, it is forgotten. Until `complete` it is neither
        that one nor the new one.
        """
        known = plan.base is not None and plan.base == self._export
        self._export, self._keeps = 0, plan.export > 0
        if not known:
            self._pieces = {}
        return known

    def complete(self, plan: UpdatePlan) -> None:
        """All pieces of the plan are here."""
        self._export = plan.export
        self.frozen.complete(plan)

    def __getitem__(self, slot: TensorSlot) -> Tensor:
        """All bytes of a piece, uint8."""
        return self._pieces[slot.name, slot.cut]

    def changes(self, slot: TensorSlot, tensor: Tensor) -> Tensor | None:
        """What to send of a piece instead of all of it, uint8; None = all of it. Keeps the piece."""
        if not self._keeps:
            return None
        # Compared on the host, where the copy of the last export is: a device has no room for one.
        new, old = flat_bytes(tensor).cpu(), self._pieces.get((slot.name, slot.cut))
        if old is None or len(old) != len(new):
            # A copy: on a CPU `new` is the weight itself, which is trained further.
            self._pieces[slot.name, slot.cut] = new.clone()
            return None
        old, new = (data.view(_WORDS[tensor.element_size()]) for data in (old, new))
        places = _differing(old, new)
        if places is None:
            old.copy_(new)
            return None
        values = new[places]
        old[places] = values  # what receivers will hold after it
        return torch.cat([values.view(torch.uint8), _gaps(places).to(torch.uint8)])

    def whole(self, slot: TensorSlot, raw: Tensor, *, owned: bool) -> Tensor:
        """All bytes of a piece, of which `raw` has come. Keeps the piece, without a copy where `raw` is `owned`: nobody
        else writes there, ever. Raises RuntimeError for changes that are none of this piece.
        """
        if not self._keeps:
            return raw
        if slot.num_values is None:
            kept = self._pieces.get((slot.name, slot.cut))
            if kept is None:
                # copy=True: `to` alone returns the reader's view where it is on the host.
                self._pieces[slot.name, slot.cut] = raw if owned else raw.to("cpu", copy=True)
            else:
                kept.copy_(raw)
            return raw
        kept = self[slot]
        _apply(raw.cpu(), kept, slot)
        return kept.to(raw.device)  # where the engine loads from; the digest is over this, too


def _differing(old: Tensor, new: Tensor) -> Tensor | None:
    """Places of the values that differ and of those that bridge gaps, int64, ascending; never none. Both are [n] of an
    integer type. None when sending them is not worth it.
    """
    count, size = len(new), new.element_size()
    # In values: each takes its own bytes and one more for its place.
    most = _PAYS * count * size / (size + 1)
    step = max(1, count // _LOOKED_AT)
    if step > 1 and (old[::step] != new[::step]).sum().item() * step > 2 * most:
        return None
    places = torch.from_numpy((old.numpy() != new.numpy()).nonzero()[0])  # NumPy takes half of torch's time for it
    if not len(places):
        places = places.new_zeros(1)  # a slot without bytes could be a block without bytes
    elif _gaps(places).max() >= _STRIDE:
        places = _bridged(places, _gaps(places))
    return places if len(places) <= most else None


def _gaps(places: Tensor) -> Tensor:
    """How many values lie before each, after the place before."""
    # -1 as the place before the first: its gap counts from the start of the piece.
    return torch.diff(places, prepend=places.new_tensor([-1])) - 1


def _bridged(places: Tensor, gaps: Tensor) -> Tensor:
    """`places` with so many more before each that no gap is too long."""
    steps = gaps // _STRIDE + 1  # places that stand for this one: itself, and one more for each 256 of its gap
    number = torch.arange(int(steps.sum())) - (steps.cumsum(0) - steps).repeat_interleave(steps)
    before = (places - gaps - 1).repeat_interleave(steps)
    return torch.minimum(before + (number + 1) * _STRIDE, places.repeat_interleave(steps))


def _apply(changes: Tensor, whole: Tensor, slot: TensorSlot) -> None:
    """Write them into `whole`, uint8."""
    assert slot.num_values is not None
    # Each change is a value and one byte of its gap.
    size = changes.numel() // slot.num_values - 1
    values, gaps = changes.split([slot.num_values * size, slot.num_values])
    # long: sums of bytes exceed a byte.
    places = (gaps.long() + 1).cumsum(0) - 1
    target = whole.view(_WORDS[size])
    if places[-1] >= target.numel():  # ascending, so the last one is the largest
        raise RuntimeError(f"{slot.name}: a changed value lies at {int(places[-1])} of {target.numel()}")
    target[places] = values.view(_WORDS[size])
