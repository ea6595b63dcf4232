"""How weights travel, by name, and which way a device mapping asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from roll_async.weight_sync.bucket import UpdatePlan

if TYPE_CHECKING:
    from torch import Tensor

    from roll_async.weight_sync.sending import BucketReader, BucketSender, BucketWriter

SENDERS: dict[str, str] = {
    "shm": "roll_async.weight_sync.shm.FileWriter",
    "filesystem": "roll_async.weight_sync.filesystem.FolderWriter",
    "gloo": "roll_async.weight_sync.gloo.writer",
    "nccl": "roll_async.weight_sync.nccl.writer",
    "cuda_ipc": "roll_async.weight_sync.cuda_ipc.IpcWriter",
}
RECEIVERS: dict[str, str] = {
    "shm": "roll_async.weight_sync.shm.FileReader",
    "filesystem": "roll_async.weight_sync.filesystem.FileReader",
    "gloo": "roll_async.weight_sync.gloo.reader",
    "nccl": "roll_async.weight_sync.nccl.reader",
    "cuda_ipc": "roll_async.weight_sync.cuda_ipc.IpcReader",
}
STAGED = frozenset({"shm", "filesystem", "gloo"})
"""They deliver into host memory beside the served weights: engines generate meanwhile and stop only for the swap."""


def choose_transport(
    wanted: str, *, trainer_devices: Sequence[int] | None, engine_devices: Sequence[int] | None, num_gpus_per_node: int
) -> tuple[str, str]:
    """(transport, reason). Devices None: CPU. Raises ValueError when the wanted transport cannot connect them."""
    trainer, engines = set(trainer_devices or ()), set(engine_devices or ())
    nodes = {d // num_gpus_per_node for d in trainer | engines}
    if wanted == "auto":
        if len(nodes) > 1:
            return "gloo", f"trainer and engines lie on nodes {sorted(nodes)}"
        return "shm", "trainer and engines share one host, and engines generate while the weights travel"
    if wanted not in SENDERS:
        raise ValueError(f"weight_sync.transport {wanted!r} is not one of auto | {' | '.join(SENDERS)}")
    if wanted in ("nccl", "cuda_ipc") and not (trainer and engines):
        raise ValueError(f"weight_sync.transport {wanted} needs actor_train and actor_infer on GPUs; use auto")
    if wanted == "nccl" and trainer & engines:
        shared = sorted(trainer & engines)
        raise ValueError(f"weight_sync.transport nccl: actor_train and actor_infer share devices {shared}; use auto")
    if wanted == "cuda_ipc" and not trainer == engines == {min(trainer)}:
        raise ValueError("weight_sync.transport cuda_ipc: actor_train and actor_infer must share one device; use auto")
    if wanted == "shm" and len(nodes) > 1:
        raise ValueError(f"weight_sync.transport shm: trainer and engines lie on nodes {sorted(nodes)}; use auto")
    return wanted, "as configured"


def open_sender(
    transport: str,
    *,
    tensors: Callable[[], Iterator[tuple[str, Tensor]]],
    version: int,
    verify: str,
    bucket_bytes: int,
    is_sender: bool,
    previous: BucketSender | None = None,
    folder: str | None = None,
) -> BucketSender:
    """Start sending one weight version.

    `previous`: the sender of the version before; its memory, files and connections are used again. `folder`: where the
    transport `filesystem` puts its files.
    """
    from roll_async.weight_sync.sending import BucketSender  # torch: who only chooses a transport needs none

    plan = UpdatePlan(version=version, transport=transport, verify=verify)
    writer = previous.writer if previous is not None else None
    if is_sender and writer is None:
        writer = _open_writer(transport, folder)
    return BucketSender(tensors, plan, bucket_bytes, writer)


def _open_writer(transport: str, folder: str | None) -> BucketWriter:
    make = _named(SENDERS[transport])
    if transport != "filesystem":
        return make()
    if folder is None:
        raise ValueError("weight_sync.transport filesystem needs a folder that every host sees")
    return make(folder)


def open_receiver(transport: str) -> BucketReader:
    """Start receiving one weight version."""
    return _named(RECEIVERS[transport])()


def _named(path: str):  # noqa: ANN202 (a class or function of a transport module)
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)
