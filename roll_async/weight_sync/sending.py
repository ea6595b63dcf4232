"""The trainer's end of every transport: tensors become buckets, and a writer puts each where receivers find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from roll_async.weight_sync.bucket import Bucket, TensorSlot, UpdatePlan
from roll_async.weight_sync.digest import Digest
from roll_async.weight_sync.packing import PlannedBucket, plan_buckets, size_of


class BucketWriter(Protocol):
    """One transport's sending end. Lives as long as the process, so that memory and connections serve every version."""

    def write(self, index: int, planned: PlannedBucket, num_bytes: int) -> tuple[str, Tensor]:
        """Publish bucket `index` of a version; (location, its bytes: uint8 [>= num_bytes]).

        Transports of host memory keep every bucket of a version readable until the next version begins; device
        transports only until the bucket after next.
        """
        ...

    def close(self) -> None:
        """Give back memory, files and connections."""


class BucketReader(Protocol):
    """One transport's receiving end, for one weight update."""

    def read(self, bucket: Bucket) -> Iterator[tuple[TensorSlot, Tensor, Tensor]]:
        """(slot, bytes uint8 [num_bytes], tensor) of each tensor; views. Host transports keep them valid."""
        ...

    def close(self) -> None: ...


class BucketSender:
    """Sends one weight version. Every rank iterates (gathering is collective); the rank with a writer publishes."""

    def __init__(
        self,
        tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        plan: UpdatePlan,
        bucket_bytes: int,
        writer: BucketWriter | None,
    ) -> None:
        self._plan = plan
        self._planned = plan_buckets(tensors(), bucket_bytes)
        self._digest = Digest(plan.verify)
        self._index = 0
        self.writer = writer

    @property
    def plan(self) -> UpdatePlan | None:
        """The announcement; None on ranks that only take part in the gathering."""
        return None if self.writer is None else self._plan

    @property
    def digest(self) -> str:
        """Digest of every tensor sent so far."""
        return self._digest.hexdigest()

    def next_bucket(self) -> Bucket | None:
        """Gather and publish the next bucket. None at the end, also on ranks that do not send."""
        planned = next(self._planned, None)
        if planned is None:
            return None
        index, self._index = self._index, self._index + 1
        if self.writer is None:
            return Bucket(index=index, slots=(), num_bytes=0, location="")
        num_bytes = size_of(planned)
        location, data = self.writer.write(index, planned, num_bytes)
        for slot, _ in planned:  # over the bytes as written: what receivers will read
            self._digest.update(slot, data[slot.offset : slot.offset + slot.num_bytes])
        return Bucket(index=index, slots=tuple(s for s, _ in planned), num_bytes=num_bytes, location=location)

    def close(self) -> None:
        """Close the writer, too: nothing more is sent."""
        if self.writer is not None:
            self.writer.close()
