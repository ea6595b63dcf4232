"""Adam's state in host memory, but for the moment of a step.

Forward and backward then have the device's memory to themselves: 12 bytes per parameter of bf16 training on one rank, a
share of them with the distributed optimizer. The step itself is the device's, and needs that memory again, when
activations are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from roll_async.trainer.megatron.state.optimizer_state import MAIN, MOMENTS, parameter_states

logger = logging.getLogger(__name__)


class HostState:
    """Moments and float32 copies of parameters of one rank. Each has one buffer in (pinned) host memory."""

    def __init__(self, optimizer: MegatronOptimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._buffers: dict[int, Tensor] = {}
        self._to_host()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, the optimizer can step."""
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self._device, non_blocking=True)
        try:
            yield
        finally:
            self._to_host()

    def _to_host(self) -> None:
        moved = list(self._tensors())
        for tensor in moved:
            self._buffer_of(tensor).copy_(tensor.data, non_blocking=True)
        if self._device.type == "cuda":
            # Below the device's memory is let go: the copies must have ended.
            torch.cuda.synchronize()
        for tensor in moved:
            tensor.data = self._buffer_of(tensor)

    def _buffer_of(self, tensor: Tensor) -> Tensor:
        key = id(tensor)
        if key not in self._buffers:
            pinned = self._device.type == "cuda"
            self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return self._buffers[key]

    def _tensors(self) -> Iterator[Tensor]:
        """What the optimizer holds besides the model's own parameters; moments exist from the first step on."""
        for state in parameter_states(self._optimizer):
            if state.main is None:
                continue
            if MAIN in state.names:
                yield state.main
            held = state.optimizer.state.get(state.main, {})
            yield from (held[name] for name in MOMENTS if name in held)


def host_state(optimizer: MegatronOptimizer, device: torch.device) -> HostState | None:
    """None where the device's memory is the host's."""
    if device.type == "cpu":
        logger.info("optimizer_cpu_offload: the rank runs on CPU, its optimizer state is in host memory already")
        return None
    return HostState(optimizer, device)
