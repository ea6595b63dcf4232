"""What the tests of weight transfer share: tensors of every kind, and both ends of a transfer."""

import asyncio

import pytest
import torch

from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.digest import of_replica, of_trainer
from roll_async.weight_sync.layout import EngineLayout
from roll_async.weight_sync.transfer import TensorPart, open_receiver, open_sender


class Transfers:
    """Both ends of transfers; what it opened is closed at the end of the test."""

    def __init__(self, folder):
        self.folder, self._open = str(folder), []

    @staticmethod
    def tensors(seed=0):
        """{name: tensor}: empty, scalar, odd, transposed; three types."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(7, 5), (1,), (64, 33), (), (0, 4), (3, 2, 2), (257,)]
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        tensors = {
            f"layer.{i}.{str(dtype)[6:]}": torch.randn(shape, generator=generator).to(dtype)
            for i, shape in enumerate(shapes)
            for dtype in dtypes
        }
        return {**tensors, "transposed": torch.randn(6, 4, generator=generator).t()}

    @staticmethod
    def whole(tensors):
        return [TensorPart.whole(name, tensor) for name, tensor in tensors.items()]

    def sender(
        self, tensors, transport="shm", *, version=1, verify="full", block_bytes=1000, previous=None, source=0,
        layout=EngineLayout(), **numbers,
    ):  # fmt: skip
        """`tensors`: {name: tensor}, or parts. `numbers`: export and base of the plan."""
        parts = self.whole(tensors) if isinstance(tensors, dict) else tensors
        plan = UpdatePlan(version=version, transport=transport, verify=verify, layout=layout, **numbers)
        sender = open_sender(plan, parts, source=source, block_bytes=block_bytes, previous=previous, folder=self.folder)
        self._open.append(sender)
        return sender

    def receiver(self, plan, rank=0, kept=None):
        receiver = open_receiver(plan, kept or LastExport(), rank=rank)
        self._open.append(receiver)
        return receiver

    @staticmethod
    def buckets(senders):
        """What the trainer's ranks publish, bucket by bucket."""
        index = 0
        while blocks := tuple(b for sender in senders if (b := sender.next_block()) is not None):
            yield Bucket(index=index, blocks=blocks)
            index += 1

    def send_all(self, senders, receivers, damage=None):
        """[{name: tensor} of each receiver], read when all buckets have come; (trainer's digest, replica's digest)."""
        for bucket in self.buckets(senders):
            if damage is not None:
                damage(bucket)
            for receiver in receivers:
                receiver.take(bucket)
        digests = of_trainer([s.sent for s in senders]), of_replica(r.digest for r in receivers)
        return [dict(r.tensors()) for r in receivers], digests

    async def send_to_replicas(self, senders, replicas):
        """The same to several replicas at once, each of [receiver of rank 0, 1, ...]; their digests."""
        for bucket in self.buckets(senders):
            await asyncio.gather(*(asyncio.to_thread(r.take, bucket) for ranks in replicas for r in ranks))
        return [of_replica(r.digest for r in ranks) for ranks in replicas]

    def close(self):
        for one in reversed(self._open):
            one.close()


@pytest.fixture
def transfers(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    transfers = Transfers(tmp_path / "weights")
    yield transfers
    transfers.close()
