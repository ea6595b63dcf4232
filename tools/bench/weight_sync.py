"""Weights from a trainer process into an engine process, against a plain copy of the same bytes.

    python tools/bench/weight_sync.py [--mib 512] [--bucket-mib 128] [--transport shm] [--verify sample] [--rounds 7]

The sender packs and digests bucket after bucket, the receiver (a process of its own) takes them in and digests them,
then copies them into its model: what one push does, without the engines. Medians over the rounds; the first one,
which allocates, is dropped. The budget holds for the transfer; engines stop for the swap only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from roll_async.weight_sync.digest import Digest  # noqa: E402
from roll_async.weight_sync.transports import SENDERS, STAGED, open_receiver, open_sender  # noqa: E402

LAYER_SHAPES = ((4096, 1024), (1024, 4096), (1024, 1024), (1024,))
"""Tensors of one layer: about 9 Mi elements, as in a model of 0.6 B parameters."""


def model_tensors(num_bytes: int, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Named bf16 tensors of about `num_bytes` altogether."""
    generator = torch.Generator().manual_seed(seed)
    tensors, total = [], 0
    while total < num_bytes:
        shape = LAYER_SHAPES[len(tensors) % len(LAYER_SHAPES)]
        tensor = torch.rand(shape, generator=generator).bfloat16()
        tensors.append((f"layers.{len(tensors)}.weight", tensor))
        total += tensor.numel() * 2
    return tensors


def engine(pipe, transport: str, verify: str, num_bytes: int) -> None:
    """The receiving process: answers every bucket, then the digest, then the swap."""
    torch.set_num_threads(1)
    model = dict(model_tensors(num_bytes, seed=0))
    pipe.send("ready")
    while pipe.recv() == "begin":
        receiver, digest, staged = open_receiver(transport), Digest(verify), []
        while (bucket := pipe.recv()) is not None:
            for slot, raw, tensor in receiver.read(bucket):
                digest.update(slot, raw)
                staged.append((slot.name, tensor))
            pipe.send("taken")
        pipe.send(digest.hexdigest())
        pipe.recv()
        for name, tensor in staged:
            model[name].copy_(tensor)
        receiver.close()
        del staged, tensor, raw
        pipe.send("swapped")


def push(pipe, sender) -> tuple[float, float]:
    """(seconds of the transfer, seconds of the swap) of one version."""
    started = time.perf_counter()
    pipe.send("begin")
    bucket = sender.next_bucket()
    while bucket is not None:
        pipe.send(bucket)
        bucket = sender.next_bucket()  # gathered while the receiver takes the one before
        assert pipe.recv() == "taken"
    pipe.send(None)
    assert pipe.recv() == sender.digest
    transferred = time.perf_counter()
    pipe.send("swap")
    assert pipe.recv() == "swapped"
    return transferred - started, time.perf_counter() - transferred


def plain_copy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds of one plain copy into memory that is already there."""
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--transport", default="shm", choices=sorted(STAGED & SENDERS.keys() - {"filesystem"}))
    parser.add_argument("--verify", default="sample", choices=["full", "sample", "none"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors = model_tensors(args.mib << 20, seed=1)
    num_bytes = sum(t.numel() * t.element_size() for _, t in tensors)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=engine, args=(other, args.transport, args.verify, args.mib << 20), daemon=True)
    process.start()
    pipe.recv()
    source = torch.cat([t.reshape(-1) for _, t in tensors])
    target = torch.zeros_like(source)
    sender, rounds = None, []
    for version in range(args.rounds + 1):
        sender = open_sender(
            args.transport,
            tensors=lambda: iter(tensors),
            version=version,
            verify=args.verify,
            bucket_bytes=args.bucket_mib << 20,
            is_sender=True,
            previous=sender,
        )
        # Side by side, because other work on the machine slows both.
        rounds.append((*push(pipe, sender), plain_copy_s(source, target)))
    pipe.send("end")
    process.join(timeout=30)
    assert sender is not None
    sender.close()
    transfer_s, swap_s, plain_s = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
    ratio = statistics.median(plain / transfer for transfer, _, plain in rounds[1:])
    line = {
        "name": f"weight_sync_{args.transport}",
        "value": round(num_bytes / transfer_s / 2**30, 2),
        "unit": "GiB/s",
        "ratio": round(ratio, 3),
        "budget": 0.5,
        "ok": ratio >= 0.5,
        "plain_copy_gib_s": round(num_bytes / plain_s / 2**30, 2),
        "swap_gib_s": round(num_bytes / swap_s / 2**30, 2),
        "ratio_with_swap": round(plain_s / (transfer_s + swap_s), 3),
        "verify": args.verify,
        "mib": num_bytes >> 20,
        "bucket_mib": args.bucket_mib,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
