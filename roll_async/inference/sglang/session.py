"""SGLang's session of a weight update, and the two ways of weights into it.

host memory   the engine's process receives whole tensors beside the served weights; at the commit every rank gets
              all of them and keeps its part
devices       each rank receives its part itself (`sglang_rank.py`), and loads it into the served model
"""

from __future__ import annotations

import asyncio
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_async.inference.settings import EngineSettings
from roll_async.inference.sglang.arguments import RANK_LOADER
from roll_async.inference.sglang.broadcast import RankBroadcast, checked
from roll_async.inference.sglang.rank import Command
from roll_async.weight_sync.digest import of_replica

if TYPE_CHECKING:
    from torch import Tensor


class WeightSession:
    """At most one is open in SGLang, which opens no second one."""

    def __init__(self, manager: Any, num_ranks: int, broadcast: RankBroadcast | None) -> None:
        """`manager`: SGLang's TokenizerManager. `num_ranks`: of the tensor group. `broadcast`: where ranks are on other
        nodes.
        """
        self._manager, self._num_ranks, self._broadcast = manager, num_ranks, broadcast
        self._folder = tempfile.TemporaryDirectory(prefix="roll-sglang-")
        self.is_open = False

    @classmethod
    async def over(cls, manager: Any, settings: EngineSettings) -> WeightSession:
        """That of a replica whose ranks have started."""
        ranks, span, broadcast = settings.tensor_parallel_size, settings.span, None
        if span is not None:
            broadcast = await RankBroadcast.join(manager, span.master_addr, num_ranks=ranks)
        return cls(manager, ranks, broadcast)

    async def open(self) -> None:
        """Prepare the served model for loading. Raises RuntimeError with SGLang's reason, as all below."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        checked("begin_weight_update", await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        self.is_open = True

    async def close(self) -> None:
        """Make ready for serving what was loaded."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        checked("end_weight_update", await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))
        self.is_open = False

    async def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Every rank gets all tensors and keeps its part."""
        if self._broadcast is not None:
            await self._broadcast.send(tensors)
            return
        await self._send(tensors, None)

    async def command(self, method: str, *arguments: object) -> list[Any]:
        """The answers of all ranks to a method of `RankUpdate`. Raises RuntimeError with the first rank's error."""
        file = Path(self._folder.name) / method
        asked = Command(method=method, arguments=arguments, answers=str(file))
        await self._send(asked.as_tensors(), RANK_LOADER)
        answers = pickle.loads(file.read_bytes())
        file.unlink()  # the next command of this name must not read these
        for rank, (_, error) in enumerate(answers):
            if error:
                raise RuntimeError(f"SGLang's rank {rank}: {error}")
        return [result for result, _ in answers]

    async def digest(self) -> str:
        """Of what all ranks received."""
        return of_replica(await self.command("finish"))

    async def _send(self, tensors: Sequence[tuple[str, Tensor]], loader: str | None) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        send = MultiprocessingSerializer.serialize
        payloads = [await asyncio.to_thread(send, list(tensors)) for _ in range(self._num_ranks)]
        wanted = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, flush_cache=False, load_format=loader
        )
        checked("update_weights_from_tensor", await self._manager.update_weights_from_tensor(wanted, None))
