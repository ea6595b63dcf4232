"""What a rank holds on its device, moved to host memory and back: two roles that share a device take turns.

Moved are storages, not tensors: a storage gives its memory back and later takes as much again, so every view of it
(parameters inside Megatron's flat buffers, ranges of a distributed optimizer, tied embeddings) is valid afterwards
without being told. Weights and optimizer state come back bit by bit. Gradients are not kept: each step begins by
setting them to zero, and they come back as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from roll_async.trainer.megatron.state.optimizer_state import MOMENTS, parameter_states
from roll_async.trainer.protocol import STATE_KINDS, StateMemory


@dataclass(kw_only=True, slots=True)
class _Slot:
    """One storage of the device."""

    storage: torch.UntypedStorage
    num_bytes: int
    content: Tensor | None = None
    """uint8 in host memory while the storage has none; None for gradients."""


@dataclass(kw_only=True, slots=True)
class _Away:
    """One kind of state in host memory."""

    slots: list[_Slot] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Given back by the device."""
        return sum(slot.num_bytes for slot in self.slots)


class DeviceState:
    """Weights, optimizer state and gradients of one rank. A role that only scores has weights alone."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        network: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer | None,
        device: torch.device,
    ) -> None:
        self._chunks, self._network, self._optimizer, self._device = chunks, network, optimizer, device
        self._away: dict[str, _Away] = {}
        self._pinned: dict[int, Tensor] = {}

    def offload(self, kinds: Sequence[str]) -> StateMemory:
        """Give the device's memory of these kinds back. A kind that is away stays away. Raises ValueError for an
        unknown kind.
        """
        _check(kinds)
        if self._optimizer is not None and "gradients" in kinds:
            self._optimizer.zero_grad()  # drops the float32 copies that the last step was taken from
        held = {kind: slots for kind, slots in self._held().items() if kind in kinds and kind not in self._away}
        for kind, slots in held.items():
            self._away[kind] = _Away(slots=slots)
            for slot in slots:
                slot.content = None if kind == "gradients" else self._copied(slot)
        # The copies run in the background, and the memory they read is given back next.
        self._synchronize()
        for slots in held.values():
            for slot in slots:
                slot.storage.resize_(0)
        if self._device.type == "cuda":
            # torch's allocator would keep the memory from the other process.
            torch.cuda.empty_cache()
        return self.memory()

    def load(self, kinds: Sequence[str]) -> StateMemory:
        """Bring these kinds back. A kind that is there stays. Raises ValueError for an unknown kind."""
        _check(kinds)
        for kind in STATE_KINDS:
            if kind in kinds and kind in self._away:
                for slot in self._away.pop(kind).slots:
                    slot.storage.resize_(slot.num_bytes)
                    whole = _bytes_of(slot.storage, self._device)
                    if slot.content is None:
                        whole.zero_()
                    else:
                        whole.copy_(slot.content, non_blocking=True)
        self._synchronize()
        return self.memory()

    def is_away(self, kind: str) -> bool:
        """Whether this kind is in host memory."""
        return kind in self._away

    def require(self, *kinds: str) -> None:
        """Raises RuntimeError where one of these kinds is in host memory."""
        missing = [kind for kind in kinds if kind in self._away]
        if missing:
            raise RuntimeError(
                f"{' and '.join(missing)} of this rank are in host memory: load_states({missing}) comes first"
            )

    def memory(self) -> StateMemory:
        """Bytes by kind, on the device and in host memory."""
        device = {kind: sum(slot.num_bytes for slot in slots) for kind, slots in self._held().items()}
        return StateMemory(
            device_bytes={kind: device.get(kind, 0) for kind in STATE_KINDS},
            host_bytes={kind: self._away[kind].num_bytes if kind in self._away else 0 for kind in STATE_KINDS},
            allocated_bytes=torch.cuda.memory_allocated() if self._device.type == "cuda" else None,
        )

    def _held(self) -> dict[str, list[_Slot]]:
        """Storages with memory on the device by kind, each once: the first kind that has it counts."""
        tensors = {"weights": self._weights(), "optimizer": self._optimizer_state(), "gradients": self._gradients()}
        seen: set[int] = set()
        held: dict[str, list[_Slot]] = {}
        for kind, parts in tensors.items():
            held[kind] = []
            for tensor in parts:
                storage = tensor.untyped_storage()
                # Not what is away (0 bytes), nor optimizer state that optimizer_cpu_offload keeps in host memory.
                if storage.nbytes() and storage.device.type == self._device.type and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    held[kind].append(_Slot(storage=storage, num_bytes=storage.nbytes()))
        return held

    def _weights(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()

    def _optimizer_state(self) -> Iterator[Tensor]:
        if self._optimizer is None:
            return
        for state in parameter_states(self._optimizer):
            if state.main is not None:
                yield state.main
                held = state.optimizer.state.get(state.main, {})
                yield from (held[name] for name in MOMENTS if name in held)

    def _gradients(self) -> Iterator[Tensor]:
        """Megatron's flat buffers, and what the optimizer was last handed."""
        for part in self._network:
            for buffer in (*part.buffers, *part.expert_parallel_buffers):  # pyright: ignore[reportGeneralTypeIssues]
                yield buffer.grad_data
        if self._optimizer is not None:
            for state in parameter_states(self._optimizer):
                if state.main is not None and state.main.grad is not None:
                    yield state.main.grad

    def _copied(self, slot: _Slot) -> Tensor:
        """The storage's bytes in host memory; pinned memory is kept from phase to phase, its allocation is slow."""
        # By the storage itself: its address is another after each phase.
        content = self._pinned.get(slot.storage._cdata)
        if content is None or len(content) != slot.num_bytes:
            content = torch.empty(slot.num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            if self._device.type == "cuda":
                self._pinned[slot.storage._cdata] = content
        return content.copy_(_bytes_of(slot.storage, self._device), non_blocking=True)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """[n] uint8, the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload]


def _check(kinds: Sequence[str]) -> None:
    unknown = [kind for kind in kinds if kind not in STATE_KINDS]
    if unknown:
        raise ValueError(f"state {unknown[0]!r} is not one of {' | '.join(STATE_KINDS)}")
