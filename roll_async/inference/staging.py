"""A weight version on its way into an engine that loads whole tensors by name: digest, completeness, what waits."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from roll_async.weight_sync.bucket import STAGED, Bucket, Content, UpdatePlan, is_adapter
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.digest import of_replica
from roll_async.weight_sync.transfer import open_receiver


class Incoming:
    """One update, from its first bucket to its commit."""

    def __init__(self, plan: UpdatePlan, names: Iterable[str], kept: LastExport, *, rank: int = 0) -> None:
        """`names`: of all tensors that the engine holds. `kept`: what it holds of the last update. `rank`: which one of
        the engine takes in its part.
        """
        self.in_place = plan.transport not in STAGED
        """The transport leaves no room for a second model: tensors go into the served one as they come."""
        self.staged: list[tuple[str, Tensor]] = []
        self._receiver = open_receiver(plan, kept, rank=rank)
        # With adapters alone the frozen weights are held already, and do not come.
        self._missing = {name for name in names if is_adapter(name) or plan.content is not Content.ADAPTERS}

    def take_in(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """The tensors that a bucket completes; with a staged transport they are remembered until the commit. Blocks."""
        self._receiver.take(bucket)
        tensors = list(self._receiver.tensors())
        self._missing -= {name for name, _ in tensors}
        if not self.in_place:
            self.staged += tensors
        return tensors

    def finish(self) -> str:
        """The digest. Raises RuntimeError when tensors are missing."""
        # A digest proves what was sent, not that the sender sent all of the model.
        self.need_whole()
        return of_replica([self._receiver.digest])

    def need_whole(self) -> None:
        """Raises RuntimeError when tensors are missing."""
        if self._missing:
            raise RuntimeError(f"weight update is incomplete: {sorted(self._missing)[:3]} did not come")

    def committed(self) -> None:
        """The weights are served."""
        self._receiver.committed()
        self.close()

    def close(self) -> None:
        """Give the buckets' memory back."""
        self._receiver.close()
        self.staged = []
