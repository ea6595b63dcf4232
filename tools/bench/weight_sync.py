"""Weights from trainer ranks to engine ranks, each a process of its own, against a plain copy of the same bytes.

    python tools/bench/weight_sync.py [--mib 256] [--bucket-mib 64] [--transport shm gloo] [--layouts 1:1x1 2:1x2 2:2x1]
        [--verify sample] [--rounds 4] [--link-mib-s 0] [--changed 0]

A layout is `trainer ranks : replicas x tensor-parallel ranks`. Senders cut, pack and digest; receivers take in what
they keep, digest it and put it into their model: one push without the engines. Medians over the rounds; the first
one, which allocates, is dropped. All processes share the cores of this machine: `ratio` is the bandwidth of all bytes
brought up to date together over that of a plain copy by one process. `--changed`: between two pushes that share of
the values changes, at random places, and only these are sent (`weight_sync.sparse`). `--link-mib-s` makes every link as
slow as that (16 MiB at a time, senders sleep): then bandwidth is not shared, and the time with 8 replicas over that
with 1 shows the chain.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from roll_async.weight_sync import links  # noqa: E402
from roll_async.weight_sync.bucket import Bucket, UpdatePlan  # noqa: E402
from roll_async.weight_sync.changes import LastExport  # noqa: E402
from roll_async.weight_sync.digest import of_replica, of_trainer  # noqa: E402
from roll_async.weight_sync.layout import Cut, EngineLayout  # noqa: E402
from roll_async.weight_sync.packing import TensorPart  # noqa: E402
from roll_async.weight_sync.transports import STAGED, open_receiver, open_sender  # noqa: E402

LAYER = {"up_proj": (4096, 1024), "down_proj": (1024, 4096), "o_proj": (1024, 1024), "norm": (1024,)}
"""Tensors of one layer: about 9 Mi elements, as in a model of 0.6 B parameters."""


def shapes(num_bytes: int) -> list[tuple[str, tuple[int, ...]]]:
    """Named bf16 tensors of about `num_bytes` altogether."""
    found, total, layer = [], 0, 0
    while total < num_bytes:
        for name, shape in LAYER.items():
            found.append((f"model.layers.{layer}.{name}.weight", shape))
            total += torch.Size(shape).numel() * 2
        layer += 1
    return found


def parts_of(num_bytes: int, rank: int, size: int) -> list[TensorPart]:
    """What trainer rank `rank` holds: its rows or columns; norms are sent by one rank each."""
    generator = torch.Generator().manual_seed(rank)
    parts = []
    for number, (name, shape) in enumerate(shapes(num_bytes)):
        dim = 1 if "down_proj" in name or "o_proj" in name else 0
        if len(shape) == 1 or size == 1:
            if number % size == rank:
                parts.append(TensorPart.whole(name, torch.rand(shape, generator=generator).bfloat16()))
            continue
        step = shape[dim] // size
        cut = Cut(dim=dim, start=rank * step, stop=(rank + 1) * step)
        tensor = torch.rand(cut.of(shape), generator=generator).bfloat16()
        parts.append(TensorPart(name=name, shape=shape, cut=cut, tensor=tensor))
    return parts


def trainer(pipe, args, rank: int, size: int, layout: EngineLayout) -> None:
    """One sending process: answers `next` with a block."""
    torch.set_num_threads(1)
    _slow_links(args.link_mib_s)
    parts, sender, version = parts_of(args.mib << 20, rank, size), None, 0
    while (word := pipe.recv()) is not None:
        if word == "train":
            _change(parts, args.changed, seed=version)
            pipe.send("trained")
        elif word == "begin":
            version += 1
            numbers = {"export": version, "base": version - 1 or None} if args.changed else {}
            plan = UpdatePlan(version=version, transport=args.transport, verify=args.verify, layout=layout, **numbers)
            block_bytes = (args.bucket_mib << 20) // size
            sender = open_sender(plan, parts, source=rank, block_bytes=block_bytes, previous=sender)
            pipe.send(plan)
        else:
            pipe.send(sender.next_block() if word == "next" else sender.sent)
    sender.close()
    pipe.send(_peak())


def _change(parts: list[TensorPart], share: float, *, seed: int) -> None:
    """Flip a bit of that share of the values, at random places."""
    generator = torch.Generator().manual_seed(seed)
    for part in parts:
        flat = part.tensor.view(-1).view(torch.int16)
        flat[torch.randint(0, len(flat), (int(share * len(flat)),), generator=generator)] ^= 1


def engine(pipe, args, rank: int, layout: EngineLayout) -> None:
    """One receiving process: answers every bucket, then the digest, then the swap."""
    torch.set_num_threads(1)
    _slow_links(args.link_mib_s)
    model = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes(args.mib << 20)}
    pipe.send(_peak())
    kept = LastExport()
    while (plan := pipe.recv()) is not None:
        receiver = open_receiver(plan, kept, rank=rank)
        pipe.send("ready")
        while (bucket := pipe.recv()) is not None:
            receiver.take(bucket)
            if plan.transport not in STAGED:
                _swap(model, receiver, layout, rank)
            pipe.send("taken")
        pipe.send(receiver.digest)
        pipe.recv()
        _swap(model, receiver, layout, rank)
        receiver.committed()
        receiver.close()
        pipe.send("swapped")
    pipe.send(_peak())


def _swap(model, receiver, layout: EngineLayout, rank: int) -> None:
    for name, tensor in receiver.tensors():
        kept = layout.kept(name, tuple(tensor.shape), rank)
        target = model[name]
        if kept is not None:
            place = (kept.dim, kept.start, kept.stop - kept.start)
            target, tensor = target.narrow(*place), tensor.narrow(*place)
        target.copy_(tensor)


def _peak() -> int:
    """Highest resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _slow_links(mib_per_s: float) -> None:
    """Every link sends its chunks no faster than this."""
    if not mib_per_s:
        return
    chunks = links._Published.chunks

    def slowly(self, segments):
        for chunk, end in chunks(self, segments):
            time.sleep(len(chunk) / (mib_per_s * 2**20))
            yield chunk, end

    links._Published.chunks = slowly


def push(trainers, replicas) -> tuple[float, float, int]:
    """(seconds of the transfer, of the swap, bytes sent by the trainer) of one version."""
    for pipe in trainers:
        pipe.send("train")
    assert all(pipe.recv() == "trained" for pipe in trainers)
    started = time.perf_counter()
    for pipe in trainers:
        pipe.send("begin")
    plan = [pipe.recv() for pipe in trainers][0]
    names = [f"r{i}" for i in range(len(replicas))]
    for i, pipes in enumerate(replicas):
        for pipe in pipes:
            pipe.send(replace(plan, replica=names[i], upstream=names[i - 1] if i else None))
    engines = [pipe for pipes in replicas for pipe in pipes]
    assert all(pipe.recv() == "ready" for pipe in engines)
    index = num_bytes = 0
    pending = _next(trainers)
    while pending:
        bucket = Bucket(index=index, blocks=pending)
        for pipe in engines:
            pipe.send(bucket)
        pending = _next(trainers)  # filled while the receivers take the one before
        assert all(pipe.recv() == "taken" for pipe in engines)
        index, num_bytes = index + 1, num_bytes + bucket.num_bytes
    for pipe in engines:
        pipe.send(None)
    held = {of_replica(pipe.recv() for pipe in pipes) for pipes in replicas}
    for pipe in trainers:
        pipe.send("digest")
    assert held == {of_trainer([pipe.recv() for pipe in trainers])}, "a replica holds something else"
    transferred = time.perf_counter()
    for pipe in engines:
        pipe.send("swap")
    assert all(pipe.recv() == "swapped" for pipe in engines)
    return transferred - started, time.perf_counter() - transferred, num_bytes


def _next(trainers) -> tuple:
    for pipe in trainers:
        pipe.send("next")
    return tuple(block for pipe in trainers if (block := pipe.recv()) is not None)


def measure(args, layout_name: str) -> dict:
    """One layout over one transport."""
    ranks, engines = layout_name.split(":")
    num_replicas, tensor = (int(n) for n in engines.split("x"))
    layout, context = EngineLayout(tensor=tensor), multiprocessing.get_context("spawn")
    processes = []

    def start(target, *arguments):
        here, there = context.Pipe()
        processes.append(context.Process(target=target, args=(there, args, *arguments), daemon=True))
        processes[-1].start()
        return here

    trainers = [start(trainer, rank, int(ranks), layout) for rank in range(int(ranks))]
    replicas = [[start(engine, rank, layout) for rank in range(tensor)] for _ in range(num_replicas)]
    before = [pipe.recv() for pipes in replicas for pipe in pipes]
    rounds = [push(trainers, replicas) for _ in range(args.rounds + 1)][1:]
    for pipe in [*trainers, *(p for pipes in replicas for p in pipes)]:
        pipe.send(None)
    extra = [pipe.recv() - b for pipe, b in zip((p for pipes in replicas for p in pipes), before, strict=True)]
    for process in processes:
        process.join(timeout=30)
    seconds, swap, num_bytes = (statistics.median(column) for column in zip(*rounds, strict=True))
    updated = num_replicas * sum(2 * math.prod(shape) for _, shape in shapes(args.mib << 20))
    return {"seconds": seconds, "swap_s": swap, "bytes_sent": num_bytes, "bytes_updated": updated,
            "engine_extra_bytes": max(extra)}  # fmt: skip


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes per second of one process that copies host memory."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return num_bytes / statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--transport", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--layouts", nargs="+", default=["1:1x1", "2:1x2", "1:2x1"])
    parser.add_argument("--verify", default="sample")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--link-mib-s", type=float, default=0.0)
    parser.add_argument("--changed", type=float, default=0.0)
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    torch.set_num_threads(1)
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    copy = copy_bandwidth(args.mib << 20)
    for transport in args.transport:
        for layout in args.layouts:
            case = argparse.Namespace(**{**vars(args), "transport": transport})
            found = measure(case, layout)
            ratio = found["bytes_updated"] / found["seconds"] / copy
            line = {
                "name": f"weight_sync {transport} {layout}", "value": round(found["seconds"], 3), "unit": "s",
                "ratio": round(ratio, 3), "budget": 0.5, "ok": ratio >= 0.5, "swap_s": round(found["swap_s"], 3),
                "sent_mib": round(found["bytes_sent"] / 2**20, 1), "mib": args.mib,
                "engine_extra_mib": found["engine_extra_bytes"] >> 20,
                "bucket_mib": args.bucket_mib, "copy_gb_s": round(copy / 1e9, 2),
                "link_mib_s": args.link_mib_s, "changed": args.changed,
            }  # fmt: skip
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
