"""What the routers of a Transformers model choose while a continuous batch runs, request by request.

Hooks on the routers see the tokens of all requests of a step one after another; the batch knows whose they are. Shape
letters: N tokens of a step, L layers with experts, K experts per token.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingManager
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from roll_async.schema import ExpertRecord

_UINT8_EXPERTS = 256


@dataclass(slots=True)
class _Recording:
    """One running request."""

    first: int
    """First position of the record."""
    end: int
    """Position after the last one recorded."""
    parts: list[bytes] = field(default_factory=list)


class ExpertRecorder:
    """Records for the requests that were announced. Hooks run in the thread of the generation loop."""

    def __init__(self, model: nn.Module, manager: Callable[[], ContinuousBatchingManager]) -> None:
        """`manager`: the one that runs the model now. Raises ValueError for a model without known routers."""
        routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
        if not routers:
            raise ValueError(
                "actor_train.router_replay=true: hf_infer knows no router of this model; set it to false, or use vllm"
            )
        self._manager, self._num_layers, self._top_k = manager, len(routers), int(routers[0].top_k)  # type: ignore[arg-type]
        small = int(routers[0].num_experts) <= _UINT8_EXPERTS  # type: ignore[arg-type]
        self._typecode, self._dtype = ("B", torch.uint8) if small else ("h", torch.int16)
        self._chosen: list[Tensor] = []
        self._open: dict[str, _Recording] = {}
        self._thread = threading.local()
        for router in routers:
            router.register_forward_hook(self._router_ran)
        model.register_forward_hook(self._step_ran)

    def announce(self, request_id: str, first: int) -> None:
        """Record a request, from position `first` on. Call it before the request is added."""
        self._open[request_id] = _Recording(first=first, end=first)

    def forget(self, request_id: str) -> None:
        """Forget a request whose result is not needed."""
        self._open.pop(request_id, None)

    def take(self, request_id: str, end: int) -> ExpertRecord | None:
        """The record up to position `end`, which no step later than those of the request's tokens can change. None when
        the request was never announced.
        """
        recording = self._open.pop(request_id, None)
        if recording is None:
            return None
        ids = array(self._typecode)
        ids.frombytes(b"".join(recording.parts))
        del ids[max(0, end - recording.first) * self._num_layers * self._top_k :]
        return ExpertRecord(ids=ids, num_layers=self._num_layers, top_k=self._top_k)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Passes of this thread are none of the batch's, whose own may run at the same time."""
        self._thread.aside = True
        try:
            yield
        finally:
            self._thread.aside = False

    def _is_aside(self) -> bool:
        return getattr(self._thread, "aside", False)

    def _router_ran(self, router: nn.Module, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """(logits [N,E], weights [N,K], experts [N,K]) of one layer."""
        if not self._is_aside():
            self._chosen.append(output[2])

    def _step_ran(self, model: nn.Module, inputs: tuple, output: object) -> None:
        if self._is_aside():
            return
        chosen, self._chosen = self._chosen, []
        batch = self._manager().batch_processor
        assert batch is not None and len(chosen) == self._num_layers, "a step passes every router once"
        rows = torch.stack(chosen, 1).to(self._dtype).cpu()  # [N,L,K], of a small type before it leaves the device
        start = 0
        assert isinstance(batch.inputs_and_outputs, ContinuousBatchingIOs), "use_async_batching is off"
        for request in batch.inputs_and_outputs.requests_in_batch:
            count = request.query_length
            recording = self._open.get(request.state.request_id)
            if recording is not None:
                # `position_offset` is already that of the next step. A request that lost its cache is read again from
                # its first token: what was recorded stays.
                position = request.state.position_offset - count
                known = recording.end - position
                assert known >= 0, "positions are read in order"
                if known < count:
                    recording.parts.append(rows[start + known : start + count].numpy().tobytes())
                    recording.end = position + count
            start += count
