"""Through torch.distributed, one two-rank group per receiver: what `gloo` and `nccl` have in common.

Receivers pull: each joins through a TCPStore that the sender opens, gets a group of its own with the sender, and asks
for buckets by number. So the sender need not know how many receivers there are, and one that dies or joins late
disturbs no other.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from roll_async.weight_sync.bucket import Bucket, TensorSlot
from roll_async.weight_sync.packing import PlannedBucket, pack, unpack

logger = logging.getLogger(__name__)

_NUM_BUFFERS = 2
"""The bucket being pulled and the one being gathered."""
_CHUNK_BYTES = 256 << 20
_PATIENCE = timedelta(minutes=30)
"""How long a group may be idle: longer than a training step. Deadlines of a push are the synchronizer's."""
_JOIN_POLL_S = 0.02
_GOODBYE = -1
_GOODBYE_S = 1.0

MakeGroup = Callable[[dist.Store, int, int, timedelta], dist.ProcessGroup]
"""(store, rank, size, timeout) -> group."""


def reachable_host() -> str:
    """The address other hosts reach this one by; loopback when the run is confined to it."""
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation address: picks the outgoing interface, sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


class PairWriter:
    """Serves buckets to whoever joins. `location`: host:port/version count/bucket index."""

    def __init__(self, make_group: MakeGroup, device: torch.device) -> None:
        self._make_group, self._device = make_group, device
        host = reachable_host()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
        self._address = f"{host}:{self._store.port}"
        self._lock = threading.Condition()
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(_NUM_BUFFERS)]
        self._published: dict[tuple[int, int], Tensor] = {}
        self._version_count = 0
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._accept, name="weight receivers")

    def _start(self, target: Callable[..., None], *args: int, name: str) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        thread.start()

    def write(self, index: int, planned: PlannedBucket, num_bytes: int) -> tuple[str, Tensor]:
        if index == 0:
            self._version_count += 1
        slot = index % _NUM_BUFFERS
        with self._lock:
            for key in [k for k in self._published if k[0] != self._version_count or k[1] % _NUM_BUFFERS == slot]:
                del self._published[key]
        if len(self._buffers[slot]) < num_bytes:
            self._buffers[slot] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        data = self._buffers[slot]
        pack(planned, data)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the serving threads send on streams of their own
        with self._lock:
            self._published[(self._version_count, index)] = data[:num_bytes]
        return f"{self._address}/{self._version_count}/{index}", data

    def _accept(self) -> None:
        """Give every receiver a group and a thread of its own."""
        store = dist.TCPStore(*_host_port(self._address), is_master=False, timeout=_PATIENCE)
        joined = 0
        while not self._closed.wait(_JOIN_POLL_S):
            while store.check([f"join/{joined}"]):
                self._start(self._serve, joined, name=f"weight receiver {joined}")
                joined += 1

    def _serve(self, number: int) -> None:
        try:
            store = dist.TCPStore(*_host_port(self._address), is_master=False, timeout=_PATIENCE)
            group = self._make_group(dist.PrefixStore(f"pair/{number}", store), 0, 2, _PATIENCE)
            request = torch.empty(2, dtype=torch.int64, device=self._device)
            while not self._closed.is_set():
                group.recv([request], 1, 0).wait()
                version_count, index = request.tolist()
                if version_count == _GOODBYE:
                    return
                with self._lock:
                    data = self._published.get((version_count, index))
                size = torch.tensor([-1 if data is None else len(data)], dtype=torch.int64, device=self._device)
                group.send([size], 1, 1).wait()
                for chunk in () if data is None else data.split(_CHUNK_BYTES):
                    group.send([chunk], 1, 2).wait()
        except RuntimeError as error:
            logger.warning("Parameter sync: receiver %d is gone: %s", number, str(error).splitlines()[0])

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:  # a receiver that never said goodbye keeps its thread until the process ends
            thread.join(_GOODBYE_S)
        with self._lock:
            self._published.clear()


class PairReader:
    """Pulls buckets. The connection is opened by the first bucket and closed with the update."""

    def __init__(self, make_group: MakeGroup, device: torch.device) -> None:
        self._make_group, self._device = make_group, device
        self._address = ""
        self._group: dist.ProcessGroup | None = None

    def read(self, bucket: Bucket) -> Iterator[tuple[TensorSlot, Tensor, Tensor]]:
        address, version_count, index = bucket.location.rsplit("/", 2)
        group = self._join(address)
        request = torch.tensor([int(version_count), int(index)], dtype=torch.int64, device=self._device)
        group.send([request], 0, 0).wait()
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        group.recv([size], 0, 1).wait()
        if int(size) != bucket.num_bytes:
            raise RuntimeError(f"bucket {bucket.location} is not there any more: a newer one took its place")
        data = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
        for chunk in data.split(_CHUNK_BYTES):
            group.recv([chunk], 0, 2).wait()
        yield from unpack(bucket, data)

    def _join(self, address: str) -> dist.ProcessGroup:
        if self._group is None or self._address != address:
            store = dist.TCPStore(*_host_port(address), is_master=False, timeout=_PATIENCE)
            number = store.add("receivers", 1) - 1
            store.set(f"join/{number}", "")
            self._group = self._make_group(dist.PrefixStore(f"pair/{number}", store), 1, 2, _PATIENCE)
            self._address = address
        return self._group

    def close(self) -> None:
        if self._group is not None:
            goodbye = torch.tensor([_GOODBYE, _GOODBYE], dtype=torch.int64, device=self._device)
            group, self._group = self._group, None
            group.send([goodbye], 0, 0).wait()


def _host_port(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)
