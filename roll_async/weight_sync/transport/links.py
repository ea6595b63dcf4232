"""Point-to-point transfer between processes, relayed from replica to replica: the common part of `gloo` and `nccl`.

    trainer rank --link--> rank j of replica 0 --link--> rank j of replica 1 --link--> ...

Receivers pull. A link is a TCP connection for control messages and a two-rank group for bytes. The receiver asks for
its segments of a block; the serving side answers chunk by chunk, and announces each chunk by a message before either
side uses the group. So no receive is pending on a device while its sender is still busy, and a trainer never waits for
a receiver.

A receiver relays what it has received to the next replica, chunk by chunk while it still receives: a push takes the
time of one copy plus one chunk per replica, and the trainer sends once, however many replicas there are. When an
upstream replica fails, the replica downstream of it pulls from the trainer.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from roll_async.weight_sync.bucket import Block, TensorSlot, UpdatePlan
from roll_async.weight_sync.transfer import ALIGNMENT, PlannedBlock, pack, unpack

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 << 20
_NUM_BUFFERS = 2
"""Blocks of each trainer rank that are served at a time: the one being pulled and the one being filled."""
_GROUP_TIMEOUT = timedelta(minutes=10)
"""For one chunk; the deadline of a push is the synchronizer's."""
_UPSTREAM_WITHIN_S = 10.0
"""How long a replica waits for its upstream replica before it pulls from the trainer."""
_SILENT_S = 30.0
"""How long an upstream replica may take for one chunk. A node that lost its power closes no connection."""
_SEND, _RECEIVE = 0, 1
_READY, _FAILED = b"+", b"-"

_Segments = list[tuple[int, int]]


class Medium(Protocol):
    """Where the bytes of a transport are and how they are transferred: the only difference between gloo and NCCL."""

    device: torch.device
    keeps_memory: bool
    """Received blocks stay valid until the update ends (host memory), not only until the block after next."""

    def group(self, store: dist.Store, rank: int, timeout: timedelta) -> dist.ProcessGroup:
        """A process group of two ranks."""
        ...

    def transfer_stream(self) -> AbstractContextManager[None]:
        """Context of one thread's transfers: on a device, a CUDA stream of its own that is synchronized at the end."""
        ...

    def synchronize(self) -> None:
        """Wait until all that this thread wrote to device memory has arrived."""


class _Published:
    """A block, or the segments of one, that may still be filling up."""

    def __init__(self, data: Tensor, segments: _Segments | None) -> None:
        self.data, self.segments = data, segments
        self.ready, self.failed = 0, False
        self.changed = threading.Condition()

    def advance(self, ready: int, *, failed: bool = False) -> None:
        with self.changed:
            self.ready, self.failed = ready, failed
            self.changed.notify_all()

    def wait(self, end: int) -> bool:
        """Wait until the bytes before `end` are there; False when they will not come."""
        with self.changed:
            self.changed.wait_for(lambda: self.ready >= end or self.failed, timeout=_GROUP_TIMEOUT.total_seconds())
            return self.ready >= end

    def chunks(self, segments: _Segments) -> Iterator[tuple[Tensor, int]]:
        """(bytes, end of them in `data`) of the wanted segments."""
        for whole, own in _steps(segments):
            begin, end = whole if self.segments is None else own  # a relay holds its segments without the gaps
            yield self.data[begin:end], end


class LinkServer:
    """Serves blocks by key, one thread per link, and tells replicas the addresses of their upstream replicas."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._blocks: dict[str, _Published] = {}
        self._addresses: dict[str, str] = {}
        self._changed = threading.Condition()
        host = reachable_host()
        # One for all links: the groups are told apart by the prefix of their keys.
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_GROUP_TIMEOUT)
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._links: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="weight links", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        """Not `socketserver`: that looks for its end twice a second, and the end of each push would wait for it."""
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    logger.error("Parameter sync: no further receiver of weights can connect: %s", error)
                return
            self._links.add(link)
            # One for each: a send returns only when the receiver has taken it.
            threading.Thread(target=self._serve, args=(link,), name="weight link", daemon=True).start()

    def publish(self, key: str, block: _Published) -> None:
        """Serve a block from now on."""
        with self._changed:
            self._blocks[key] = block
            self._changed.notify_all()

    def withdraw(self, keys: Sequence[str]) -> None:
        """Stop serving these blocks."""
        with self._changed:
            for key in keys:
                self._blocks.pop(key, None)

    def _serve(self, link: socket.socket) -> None:
        """Serve one link until the other side closes it."""
        channel = _ControlChannel(link)
        group: dist.ProcessGroup | None = None
        try:
            while (request := channel.read()) is not None:
                if "address_of" in request:
                    channel.write({"address": self._address_of(request["address_of"])})
                elif "address" in request:
                    with self._changed:
                        # The trainer knows all replicas of a push, so it is where they find each other.
                        self._addresses[request["of"]] = request["address"]
                        self._changed.notify_all()
                else:
                    if group is None:
                        name = uuid.uuid4().hex  # two links must not meet in one group
                        channel.write({"store": f"{self._store.host}:{self._store.port}", "name": name})
                        group = self._medium.group(dist.PrefixStore(name, self._store), _SEND, _GROUP_TIMEOUT)
                    self._send(channel, group, request)
        except (RuntimeError, OSError) as error:
            logger.warning(
                "Parameter sync: lost the connection to a receiver of weights: %s", str(error).splitlines()[0]
            )
        finally:
            self._links.discard(link)
            _close_socket(link)

    def _address_of(self, name: str) -> str | None:
        """The address of another replica's server; waits for it, because that may start later than this one."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._addresses, timeout=_UPSTREAM_WITHIN_S)
            return self._addresses.get(name)

    def _send(self, channel: _ControlChannel, group: dist.ProcessGroup, request: dict) -> None:
        segments: _Segments = [(start, stop) for start, stop in request["segments"]]
        with self._changed:
            if request["waits"]:
                self._changed.wait_for(lambda: request["key"] in self._blocks, timeout=_UPSTREAM_WITHIN_S)
            block = self._blocks.get(request["key"])
        # A relay has its own rank's segments only, and cannot serve others.
        if block is None or block.segments not in (None, segments):
            channel.signal(_FAILED)
            return
        for chunk, end in block.chunks(segments):
            if not block.wait(end):
                channel.signal(_FAILED)
                return
            # Only now: a receive that is begun blocks its device until the sender's part comes.
            channel.signal(_READY)
            with self._medium.transfer_stream():
                group.send([chunk], _RECEIVE, 0).wait()

    def close(self) -> None:
        """Close all links and serve nothing more."""
        self._closed = True  # first: `_accept` tells by it whether the listener was closed or failed
        _close_socket(self._listener)  # wakes `accept`
        for link in list(self._links):  # a copy: each thread takes its own out as it ends
            _close_socket(link)
        self._blocks.clear()
        self._thread.join()


class LinkWriter:
    """Publishes the blocks of a trainer rank. `location`: address/unguessable key."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._server = LinkServer(medium)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=medium.device) for _ in range(_NUM_BUFFERS)]
        self._keys: list[str] = []

    def write(self, index: int, planned: PlannedBlock, num_bytes: int) -> tuple[str, Tensor]:
        gone = self._keys if index == 0 else self._keys[: index - _NUM_BUFFERS + 1]
        # Before their buffer is filled again: a late receiver must not get a mixture of two blocks.
        self._server.withdraw(gone)
        if index == 0:
            self._keys = []
        slot = index % _NUM_BUFFERS
        if len(self._buffers[slot]) < num_bytes:
            self._buffers[slot] = torch.empty(num_bytes, dtype=torch.uint8, device=self._medium.device)
        data = self._buffers[slot]
        pack(planned, data)
        self._medium.synchronize()  # the serving threads send on streams of their own
        block = _Published(data[:num_bytes], segments=None)
        block.ready = num_bytes  # whole from the start, unlike a relay's
        key = uuid.uuid4().hex
        self._keys.append(key)
        self._server.publish(key, block)
        return f"{self._server.address}/{key}", data

    def close(self) -> None:
        self._server.close()


class LinkReader:
    """Pulls what one engine rank keeps of each block, from the upstream replica or the trainer, and relays it."""

    def __init__(self, medium: Medium, plan: UpdatePlan, rank: int) -> None:
        self._medium, self._plan, self._rank = medium, plan, rank
        self._links: dict[str, _ReceivingLink] = {}
        self._server: LinkServer | None = None
        self._upstream: _ReceivingLink | None = None
        self._keys: list[str] = []

    def read(self, block: Block, rank: int) -> Iterator[tuple[TensorSlot, Tensor]]:
        segments = _segments(block, rank)
        if not segments:
            return
        address, key = block.location.rsplit("/", 1)
        # Kept for the whole update: making a group of two ranks is a rendezvous of its own.
        source = self._link(address)
        if self._server is None and self._plan.replica:  # with the first block the trainer's address is known
            self._join_chain(source)
        memory = torch.empty(_num_bytes(segments), dtype=torch.uint8, device=self._medium.device)
        published = _Published(memory, segments)
        if self._server is not None:
            self._server.publish(key, published)
            self._keys.append(key)
            if not self._medium.keeps_memory:
                self._server.withdraw(self._keys[: -_NUM_BUFFERS * len(self._links)])  # a link per trainer rank
        try:
            if not self._pull_from_upstream(key, published):
                source.pull(key, published, waits=False)  # the trainer published it before it announced it
        except BaseException:  # also at the end of the process: relays must not wait for bytes that will not come
            published.advance(0, failed=True)
            raise
        yield from _unpacked(block, rank, segments, published.data)

    def _pull_from_upstream(self, key: str, published: _Published) -> bool:
        """False: pull from the trainer from now on."""
        if self._upstream is None:
            return False
        try:
            self._upstream.pull(key, published, waits=True)
        except (RuntimeError, OSError) as error:
            self._leave_chain(error)
            self._upstream.close()
            self._upstream = None
            return False
        return True

    def _leave_chain(self, error: Exception) -> None:
        logger.warning(
            "Parameter sync: %s pulls from the trainer instead of its upstream replica: %s",
            self._own_name,
            str(error).splitlines()[0],  # torch's errors go on with a stack of C++
        )

    def _join_chain(self, source: _ReceivingLink) -> None:
        """Publish the address that the downstream replica pulls from, and connect to the upstream one."""
        self._server = LinkServer(self._medium)
        source.channel.write({"of": self._own_name, "address": self._server.address})
        if self._plan.upstream is None:
            return
        source.channel.write({"address_of": self._name_of(self._plan.upstream)})
        address = (source.channel.read() or {}).get("address")
        if address is not None:
            try:
                self._upstream = _ReceivingLink(self._medium, address, timedelta(seconds=_SILENT_S))
            except OSError as error:
                self._leave_chain(error)

    @property
    def _own_name(self) -> str:
        return self._name_of(self._plan.replica)

    def _name_of(self, replica: str) -> str:
        return f"{self._plan.version}/{self._plan.attempt}/{replica}/{self._rank}"

    def _link(self, address: str) -> _ReceivingLink:
        if address not in self._links:
            self._links[address] = _ReceivingLink(self._medium, address)
        return self._links[address]

    def close(self) -> None:
        for link in (*self._links.values(), *([self._upstream] if self._upstream else [])):
            link.close()
        self._links, self._upstream = {}, None
        if self._server is not None:
            self._server.close()
            self._server = None


class _ReceivingLink:
    """The receiving side of one link."""

    def __init__(self, medium: Medium, address: str, timeout: timedelta = _GROUP_TIMEOUT) -> None:
        """`timeout`: of one chunk, and of the connection."""
        self._medium, self._address, self._timeout = medium, address, timeout
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=timeout.total_seconds())
        self.channel = _ControlChannel(self._socket)
        self._group: dist.ProcessGroup | None = None

    def pull(self, key: str, into: _Published, *, waits: bool) -> None:
        """Fill `into`. `waits`: wait for the block, which the other side may not have received yet. Raises RuntimeError
        when the other side does not have it, OSError when the connection is lost.
        """
        assert into.segments is not None
        self.channel.write({"key": key, "segments": into.segments, "waits": waits})
        if self._group is None:
            self._group = self._joined(self.channel.read())
        for _, (begin, end) in _steps(into.segments):
            if self.channel.expect() != _READY:
                gone = f"block {key[:8]} of {self._address}"
                raise RuntimeError(f"{gone} is not there any more: a newer one took its place")
            with self._medium.transfer_stream():
                self._group.recv([into.data[begin:end]], _SEND, 0).wait()
            into.advance(end)

    def _joined(self, answer: dict | None) -> dist.ProcessGroup:
        if answer is None:
            raise ConnectionError(f"{self._address} closed the connection")
        host, port = answer["store"].rsplit(":", 1)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
        return self._medium.group(dist.PrefixStore(answer["name"], store), _RECEIVE, self._timeout)

    def close(self) -> None:
        _close_socket(self._socket)


class _ControlChannel:
    """JSON messages and single-byte signals over a socket."""

    def __init__(self, link: socket.socket) -> None:
        # Signals are single bytes, which Nagle's algorithm would hold back.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link, self._file = link, link.makefile("rb")

    def write(self, message: dict) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> dict | None:
        """None when the other side closed the connection."""
        line = self._file.readline()
        return json.loads(line) if line.endswith(b"\n") else None  # a broken connection may leave half a line

    def signal(self, byte: bytes) -> None:
        self._link.sendall(byte)

    def expect(self) -> bytes:
        """One signal. Raises ConnectionError when the other side closed the connection."""
        byte = self._file.read(1)
        if not byte:
            raise ConnectionError("the sender of weights closed the connection")
        return byte


def _segments(block: Block, rank: int) -> _Segments:
    """[start, stop) of the bytes of a block that an engine rank keeps; neighbouring slots are one segment."""
    segments: _Segments = []
    for slot in block.slots:
        if rank not in slot.ranks:
            continue
        stop = slot.offset + slot.num_bytes
        if segments and slot.offset - segments[-1][1] < ALIGNMENT:  # the padding between two goes along
            segments[-1] = (segments[-1][0], stop)
        else:
            segments.append((slot.offset, stop))
    return [(start, stop) for start, stop in segments if stop > start]  # an empty tensor has no bytes


def _steps(segments: _Segments) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """For each chunk: its range in the block, and its range where the segments are stored without gaps."""
    at = 0
    for start, stop in segments:
        for begin in range(start, stop, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, stop)
            yield (begin, end), (at, at + end - begin)
            at += end - begin
        at = -(-at // ALIGNMENT) * ALIGNMENT  # tensors must begin at a multiple here, too


def _num_bytes(segments: _Segments) -> int:
    """Bytes of all segments together."""
    return max((end for _, (_, end) in _steps(segments)), default=0)


def _unpacked(block: Block, rank: int, segments: _Segments, data: Tensor) -> Iterator[tuple[TensorSlot, Tensor]]:
    """As `transfer.py: unpack`, from segments that are stored without gaps."""
    shifts, at = [], 0
    for start, stop in segments:
        shifts.append((start, stop, at - start))
        at = -(-(at + stop - start) // ALIGNMENT) * ALIGNMENT
    moved = []
    for slot in block.slots:
        if rank in slot.ranks:
            # 0 for an empty slot, which lies in no segment.
            shift = next((by for start, stop, by in shifts if start <= slot.offset < stop), 0)
            moved.append(slot if not shift else replace(slot, offset=slot.offset + shift))
    yield from unpack(replace(block, slots=tuple(moved)), data, rank)


def reachable_host() -> str:
    """The address at which other hosts reach this one; loopback when the run is confined to it."""
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        return "127.0.0.1"
    if known := os.environ.get("ROLL_ASYNC_HOST_IP"):  # set by `cluster/`: the address of this host in the cluster
        return known
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation address: picks the outgoing interface, sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _close_socket(link: socket.socket) -> None:
    try:
        link.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it; `close` alone does not
    except OSError:
        pass  # the other side has closed it already
    link.close()
