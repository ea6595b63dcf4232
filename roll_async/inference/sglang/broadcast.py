"""Weights to SGLang's ranks on several nodes: its process group of weight updates; rank 0 is the engine's process.

What a push left in that process goes on to every rank, piece by piece. On one node SGLang hands tensors over in shared
memory instead, which ends at the node.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, TCPStore

_GROUP, _BACKEND = "weight_update_group", "gloo"
"""Gloo takes tensors of the host here and of a device there; this process has no device of its own for NCCL."""
_PIECE_BYTES = 256 << 20
"""Weights that a rank holds beside its model while it loads."""
_TIMEOUT = timedelta(seconds=300)
"""Of a broadcast: a rank that ended ends it sooner, one that hangs costs the replica."""


class RankBroadcast:
    """The sender's place in the group; `join` makes the group."""

    def __init__(self, manager: Any, group: ProcessGroup) -> None:
        self._manager, self._group = manager, group

    @classmethod
    async def join(cls, manager: Any, address: str, *, num_ranks: int) -> RankBroadcast:
        """Join the group of this process and SGLang's ranks. `manager`: its tokenizer manager; `address`: of this
        node. Raises RuntimeError with SGLang's reason.
        """
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput
        from sglang.srt.utils import init_custom_process_group
        from torch.distributed import PrefixStore

        store, size = _store(address), 1 + num_ranks
        wanted = InitWeightsUpdateGroupReqInput(
            master_address=address,
            master_port=store.port,
            rank_offset=1,
            world_size=size,
            group_name=_GROUP,
            backend=_BACKEND,
        )
        # At the same time: each side waits in the rendezvous for the other.
        group, answer = await asyncio.gather(
            asyncio.to_thread(
                init_custom_process_group,
                backend=_BACKEND,
                store=PrefixStore(_GROUP, store),
                timeout=_TIMEOUT,
                world_size=size,
                rank=0,
                group_name=_GROUP,
            ),
            manager.init_weights_update_group(wanted, None),
        )
        checked("init_weights_update_group", answer)
        return cls(manager, group)

    async def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Every rank gets all tensors and keeps its part. Raises RuntimeError with SGLang's reason."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        for piece in _pieces(tensors):
            wanted = UpdateWeightsFromDistributedReqInput(
                names=[name for name, _ in piece],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in piece],
                shapes=[list(tensor.shape) for _, tensor in piece],
                group_name=_GROUP,
                flush_cache=False,  # once for all pieces, at the commit
            )
            # A broadcast ends when the ranks take part, and they do so on this message.
            _, answer = await asyncio.gather(
                asyncio.to_thread(self._broadcast, piece), self._manager.update_weights_from_distributed(wanted, None)
            )
            checked("update_weights_from_distributed", answer)

    def _broadcast(self, piece: Sequence[tuple[str, Tensor]]) -> None:
        import torch.distributed as dist

        # All of a piece are under way before the first is waited for.
        works = [dist.broadcast(tensor.contiguous(), src=0, group=self._group, async_op=True) for _, tensor in piece]
        for work in works:
            assert work is not None
            work.wait()


def _store(address: str) -> TCPStore:
    """Where the ranks find this process. Torch's own would listen on every interface of the machine."""
    from torch.distributed import TCPStore

    server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = server.getsockname()[1]
    return TCPStore(address, port, None, True, _TIMEOUT, False, master_listen_fd=server.detach())


def checked(what: str, answer: tuple[bool, str]) -> None:
    """SGLang returns its failures. Raises RuntimeError."""
    success, message = answer[0], answer[1]
    if not success:
        raise RuntimeError(f"SGLang's {what} failed: {message}")


def _pieces(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of at most `_PIECE_BYTES`, or a larger one alone."""
    piece: list[tuple[str, Tensor]] = []
    left = _PIECE_BYTES
    for name, tensor in tensors:
        if piece and tensor.nbytes > left:
            yield piece
            piece, left = [], _PIECE_BYTES
        piece.append((name, tensor))
        left -= tensor.nbytes
    if piece:
        yield piece
