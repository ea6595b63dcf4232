"""How weights travel, by name, and which way a device mapping asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from roll_async.weight_sync import shm
from roll_async.weight_sync.bucket import Bucket, TensorSlot, UpdatePlan

SENDERS = {"shm": shm.ShmSender}
RECEIVERS: dict[str, Callable[[Bucket], Iterator[tuple[TensorSlot, Tensor, Tensor]]]] = {"shm": shm.open_bucket}


def choose_transport(
    wanted: str, *, trainer_devices: Sequence[int] | None, engine_devices: Sequence[int] | None, num_gpus_per_node: int
) -> tuple[str, str]:
    """(transport, reason). Raises ValueError when the wanted transport cannot connect these devices."""
    if wanted != "auto":
        if wanted not in SENDERS:
            raise ValueError(f"weight_sync.transport {wanted!r} is not available; use one of auto | {' | '.join(SENDERS)}")
        return wanted, "as configured"
    nodes = {d // num_gpus_per_node for devices in (trainer_devices, engine_devices) for d in devices or ()}
    if len(nodes) > 1:
        raise ValueError(
            f"weight_sync.transport auto: trainer and engines lie on nodes {sorted(nodes)}, and shared memory connects one host only; "
            "keep actor_train and actor_infer on one node"
        )
    return "shm", "trainer and engines share one host"


def open_sender(
    transport: str,
    *,
    tensors: Callable[[], Iterator[tuple[str, Tensor]]],
    version: int,
    verify: str,
    bucket_bytes: int,
    is_sender: bool,
) -> shm.ShmSender:
    """Start sending one weight version."""
    plan = UpdatePlan(version=version, transport=transport, verify=verify)
    return SENDERS[transport](tensors, plan, bucket_bytes, is_sender=is_sender)
