"""Weights from trainer ranks to engine ranks, each a process of its own, against a plain copy of the same bytes.

    python tools/bench/weight_sync.py [--gb 0.1 0.5 1] [--transport shm gloo] [--layouts 1:1x1 4:2x2 8:4x1]
        [--bucket-mib 64] [--verify sample] [--rounds 3] [--changed 0] [--adapter-rank 0] [--link-mib-s 50]
        [--parts speed link growth pause]
    python tools/bench/weight_sync.py --bytes-of Qwen2.5-7B --adapter-rank 32

One line of JSON for each measurement, and a table of all ratios at the end.

speed: a layout is `trainer ranks : replicas x tensor-parallel ranks`. Senders cut, pack and digest; receivers take in
what they keep, digest it and put it into their model: one push without the engines. Medians over the rounds; the first
one, which allocates, is dropped. All processes share the cores of this machine: `ratio` is the bandwidth of all bytes
brought up to date together over that of a plain copy of as many by one process. `*_extra_mib`: the highest memory of
a sender and of a receiver beyond what it held before the first push, its mappings of shared memory included;
`*_buckets`: in buckets, without the one copy of the new weights that a transport over host memory keeps by design
(senders: shm, so that receivers map it; receivers: until the swap). `--changed`: between two pushes that share of the
values changes, at random places, and only these are sent (`weight_sync.sparse`). `--adapter-rank`: the weights travel
in the first round and low-rank adapters of every matrix alone in the others (`weight_sync.adapters`); `--bytes-of`
counts them for a known model or a folder.

link: a gloo group of two processes alone, one chunk after another between memory that both have touched before:
nothing is cut, packed, digested or put into a model. More than this no push over gloo can reach on this machine.

growth: the time of a push to 8 replicas over that to 1, over gloo. Bandwidth is not shared: every link is slowed down
to --link-mib-s by sleeping senders, so that the cores have time to spare. All in one bucket (the default of
`weight_sync.bucket_size_mb` is 1024): of n chunks of 16 MiB, the chain takes (n + 7) / n of the time of one replica.

pause: vLLM with its core in this process serves 8 requests while another process pushes to it in mode `keep`.
`value` is the longest gap between two reports of tokens, across all requests, from the interruption on; `swap_s` is the
commit, `step_s` the usual gap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core for each process, the engine's threads included
import torch  # noqa: E402

from roll_async.checkpoint.known_models import known_config  # noqa: E402
from roll_async.checkpoint.lora_targets import ALL_LINEAR, target_projections  # noqa: E402
from roll_async.weight_sync.bucket import (  # noqa: E402
    ADAPTER_HALVES,
    STAGED,
    Bucket,
    Content,
    UpdatePlan,
    adapter_half,
    is_adapter,
)
from roll_async.weight_sync.changes import LastExport  # noqa: E402
from roll_async.weight_sync.digest import of_replica, of_trainer  # noqa: E402
from roll_async.weight_sync.layout import Cut, EngineLayout  # noqa: E402
from roll_async.weight_sync.model_tensors import model_tensors  # noqa: E402
from roll_async.weight_sync.transfer import (  # noqa: E402
    TensorPart,
    open_receiver,
    open_sender,
)
from roll_async.weight_sync.transport import links  # noqa: E402

BUDGET, BUCKETS, GROWTH, PAUSE_S = 0.5, 2.0, 1.5, 0.05
"""Least share of the bandwidth of a copy; most extra memory; most time of 8 replicas over 1; pause beside the swap."""
GROWTH_GB = 0.5
PAUSED_LAYERS, PAUSED_WIDTH = 8, 512
"""Of the model of `pause`: 0.12 GB in float32."""
PARTS = ("speed", "link", "growth", "pause")
_LOOK_S = 0.005
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


def halves(name: str, shape: tuple[int, ...], rank: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the adapter of a matrix."""
    a, b = (adapter_half(name, half) for half in ADAPTER_HALVES)
    return [(a, (rank, shape[1])), (b, (shape[0], rank))] if rank and len(shape) == 2 else []


def count_bytes(model: str, rank: int) -> dict:
    """Bytes of one push of a model in bfloat16, all of it and adapters alone."""
    config = known_config(model)
    if config is None:
        raise SystemExit(f"--bytes-of {model}: neither a folder with config.json nor a known model")
    tensors, linear = model_tensors(config), target_projections([ALL_LINEAR])
    adapted = [t for t in tensors if t.name.endswith(".weight") and t.name.split(".")[-2] in linear]
    alone = sum(2 * math.prod(shape) for t in adapted for _, shape in halves(t.name, t.shape, rank))
    full = sum(t.num_bytes for t in tensors)
    return {"name": f"weight_sync bytes {model}", "adapter_rank": rank, "full": full, "adapters": alone,
            "share": round(alone / full, 5)}  # fmt: skip


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
    parts, sender, version = args.parts_of(args.num_bytes, rank, size), None, 0
    if rank == 0:
        own = [half for name, shape in shapes(args.num_bytes) for half in halves(name, shape, args.adapter_rank)]
        parts += [TensorPart.whole(name, torch.rand(shape).bfloat16()) for name, shape in own]
    memory = Memory()
    pipe.send(sum(part.tensor.nbytes for part in parts))
    while (word := pipe.recv()) is not None:
        if word == "train":
            _change(parts, args.changed, seed=version)
            pipe.send("trained")
        elif word == "begin":
            version += 1
            numbers = {"export": version, "base": version - 1 or None} if args.changed else {}
            if args.adapter_rank:
                numbers = {"content": Content.ADAPTERS if sender else Content.WHOLE}
            plan = UpdatePlan(version=version, transport=args.transport, verify=args.verify, layout=layout, **numbers)
            block_bytes = (args.bucket_mib << 20) // size
            sent = parts if plan.content is not Content.ADAPTERS else [part for part in parts if is_adapter(part.name)]
            sender = open_sender(plan, sent, source=rank, block_bytes=block_bytes, previous=sender)
            pipe.send(plan)
        else:
            pipe.send(sender.next_block() if word == "next" else sender.sent)
    sender.close()
    pipe.send(memory.most_extra())


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
    whole = shapes(args.num_bytes)
    whole += [half for name, shape in whole for half in halves(name, shape, args.adapter_rank)]
    model = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in whole}
    memory = Memory()
    pipe.send("up")
    kept, staged = LastExport(), 0
    while (plan := pipe.recv()) is not None:
        receiver = open_receiver(plan, kept, rank=rank)
        pipe.send("ready")
        staged = 0
        while (bucket := pipe.recv()) is not None:
            receiver.take(bucket)
            staged += sum(slot.num_bytes for slot in bucket.slots if rank in slot.ranks)
            if plan.transport not in STAGED:
                _swap(model, receiver, layout, rank)
            pipe.send("taken")
        pipe.send(receiver.digest)
        pipe.recv()
        _swap(model, receiver, layout, rank)
        receiver.committed()
        receiver.close()
        pipe.send("swapped")
    pipe.send((memory.most_extra(), staged if args.transport in STAGED else 0))


def _swap(model, receiver, layout: EngineLayout, rank: int) -> None:
    for name, tensor in receiver.tensors():
        kept = layout.kept(name, tuple(tensor.shape), rank)
        target = model[name]
        if kept is not None:
            place = (kept.dim, kept.start, kept.stop - kept.start)
            target, tensor = target.narrow(*place), tensor.narrow(*place)
        target.copy_(tensor)


class Memory:
    """The resident memory of this process, looked at many times a second by a thread of its own."""

    def __init__(self) -> None:
        self._before = self._most = self._now()
        threading.Thread(target=self._look, daemon=True).start()

    def most_extra(self) -> int:
        """Bytes of the highest value beyond the first."""
        return self._most - self._before

    def _look(self) -> None:
        while True:
            self._most = max(self._most, self._now())
            time.sleep(_LOOK_S)

    def _now(self) -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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


def start(target: Callable, *arguments: object) -> Connection:
    """The pipe to a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=target, args=(there, *arguments), daemon=True).start()
    return here


def measure(args, layout_name: str) -> dict:
    """One layout over one transport."""
    ranks, engines = layout_name.split(":")
    num_replicas, tensor = (int(n) for n in engines.split("x"))
    layout = EngineLayout(tensor=tensor)
    trainers = [start(trainer, args, rank, int(ranks), layout) for rank in range(int(ranks))]
    replicas = [[start(engine, args, rank, layout) for rank in range(tensor)] for _ in range(num_replicas)]
    receivers = [pipe for pipes in replicas for pipe in pipes]
    held = max(pipe.recv() for pipe in trainers)
    assert all(pipe.recv() == "up" for pipe in receivers)
    rounds = [push(trainers, replicas) for _ in range(args.rounds + 1)][1:]
    for pipe in [*trainers, *receivers]:
        pipe.send(None)
    sent_from = max(pipe.recv() for pipe in trainers)
    taken_into = [pipe.recv() for pipe in receivers]
    for process in multiprocessing.active_children():
        process.join(timeout=30)
    seconds, swap, num_bytes = (statistics.median(column) for column in zip(*rounds, strict=True))
    updated = num_replicas * sum(2 * math.prod(shape) for _, shape in shapes(args.num_bytes))
    bucket = args.bucket_mib << 20
    return {
        "seconds": seconds, "swap_s": round(swap, 3), "updated": updated,
        "sent_mib": round(num_bytes / 2**20, 1), "adapter_rank": args.adapter_rank,
        "trainer_extra_mib": sent_from >> 20,
        "trainer_buckets": round((sent_from - (held if args.transport == "shm" else 0)) / bucket, 2),
        "engine_extra_mib": max(extra for extra, _ in taken_into) >> 20,
        "engine_buckets": round(max(extra - staged for extra, staged in taken_into) / bucket, 2),
    }  # fmt: skip


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes per second of one process that copies host memory."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return num_bytes / statistics.median(times[1:])


def speed(args, copy: float) -> Iterator[dict]:
    """Every transport, layout and size."""
    for transport in args.transport:
        for layout in args.layouts:
            for gb in args.gb:
                found = measure(_case(args, transport=transport, num_bytes=round(gb * 1e9), link_mib_s=0), layout)
                rate = found.pop("updated") / found["seconds"]
                seconds = found.pop("seconds")
                yield {
                    "name": f"weight_sync {transport} {layout} {gb:g} GB", "value": round(seconds, 3), "unit": "s",
                    "ratio": round(rate / copy, 3), "budget": BUDGET, "ok": rate / copy >= BUDGET,
                    "gb_s": round(rate / 1e9, 2), "copy_gb_s": round(copy / 1e9, 2), **found,
                }  # fmt: skip
                most = max(found["trainer_buckets"], found["engine_buckets"])
                yield {
                    "name": f"extra memory {transport} {layout} {gb:g} GB", "value": most, "unit": "buckets",
                    "ratio": most, "budget": BUCKETS, "upper": True, "ok": most <= BUCKETS,
                }  # fmt: skip


def link(args, copy: float) -> Iterator[dict]:
    """The bandwidth of gloo itself."""
    num_bytes = round(max(args.gb) * 1e9) // links.CHUNK_BYTES * links.CHUNK_BYTES
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for rank in (0, 1):
            ours, theirs = context.Pipe()
            ends.append(ours)
            context.Process(target=_bare_end, args=(rank, f"{folder}/store", num_bytes, theirs), daemon=True).start()
        seconds = max(end.recv() for end in ends)
    rate = num_bytes / seconds
    yield {
        "name": f"gloo itself {num_bytes / 1e9:.2g} GB", "value": round(seconds, 3), "unit": "s",
        "ratio": round(rate / copy, 3), "budget": 0.0, "ok": True, "gb_s": round(rate / 1e9, 2),
        "copy_gb_s": round(copy / 1e9, 2),
    }  # fmt: skip


def _bare_end(rank: int, store: str, num_bytes: int, pipe: Connection) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    memory = torch.ones(num_bytes, dtype=torch.uint8)
    group = dist.ProcessGroupGloo(dist.FileStore(store, 2), rank, 2, timedelta(minutes=2))
    times = []
    for _ in range(4):
        started = time.perf_counter()
        for chunk in memory.split(links.CHUNK_BYTES):
            (group.send if rank == 0 else group.recv)([chunk], 1 - rank, 0).wait()
        times.append(time.perf_counter() - started)
    pipe.send(statistics.median(times[1:]))


def growth(args) -> Iterator[dict]:
    """Eight replicas over one, where every link is as slow as --link-mib-s."""
    case = _case(args, transport="gloo", num_bytes=round(GROWTH_GB * 1e9), rounds=1, bucket_mib=1024)
    one, eight = (measure(case, f"1:{replicas}x1")["seconds"] for replicas in (1, 8))
    yield {
        "name": f"8 replicas over 1, gloo {GROWTH_GB:g} GB", "value": round(eight, 3), "unit": "s",
        "ratio": round(eight / one, 3), "budget": GROWTH, "upper": True, "ok": eight / one <= GROWTH,
        "one_s": round(one, 3), "link_mib_s": args.link_mib_s,
    }  # fmt: skip


def pause(args) -> Iterator[dict]:
    """A push in mode `keep` as eight requests see it."""
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        return
    for transport in args.transport:
        with tempfile.TemporaryDirectory() as folder:
            _save_model(folder)
            case = _case(args, transport=transport, parts_of=WholeParts(folder), num_bytes=0, link_mib_s=0)
            sender = start(trainer, case, 0, 1, EngineLayout())
            num_bytes = sender.recv()
            gaps, swaps, steps = zip(*asyncio.run(_served(folder, sender, args.rounds)), strict=True)
        gap, swap = statistics.median(gaps), statistics.median(swaps)
        yield {
            "name": f"pause seen by requests, keep, {transport} {num_bytes / 1e9:.2f} GB", "value": round(gap, 4),
            "unit": "s", "ratio": round(gap / (swap + PAUSE_S), 3), "budget": 1.0, "upper": True,
            "ok": gap <= swap + PAUSE_S, "swap_s": round(swap, 4), "step_s": round(statistics.median(steps), 4),
        }  # fmt: skip


def _save_model(folder: str) -> None:
    import transformers

    width = PAUSED_WIDTH
    config = transformers.Qwen2Config(
        vocab_size=4096, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=PAUSED_LAYERS,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=4096, dtype="float32",
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


class WholeParts:
    """`parts_of` of one rank that holds the model in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, num_bytes: int, rank: int, size: int) -> list[TensorPart]:
        from safetensors.torch import load_file

        return [TensorPart.whole(*item) for item in load_file(f"{self.folder}/model.safetensors").items()]


async def _served(folder: str, sender: Connection, rounds: int) -> list[tuple[float, float, float]]:
    """(longest gap from the interruption on, swap, usual gap) of each push but the first."""
    from roll_async.inference.backends import create_engine
    from roll_async.inference.protocol import PauseMode
    from roll_async.inference.settings import EngineSettings
    from roll_async.schema import GenerateRequest, SamplingParams

    tokens = 4000
    engine = create_engine("vllm", EngineSettings(
        model_folder=folder, dtype="fp32", device="cpu", max_model_len=tokens + 8, max_running=8,
        cpu_kv_cache_bytes=2 << 30, enable_prefix_caching=False,
    ))  # fmt: skip
    await engine.start()
    sampling = SamplingParams(max_new_tokens=tokens, temperature=1.0)
    names = [f"r{i}" for i in range(8)]
    asked = [GenerateRequest(request_id=n, prompt_token_ids=array("i", [5, 6, 7]), sampling=sampling) for n in names]
    running = [asyncio.ensure_future(engine.generate(request)) for request in asked]
    arrivals: list[float] = []

    async def look() -> None:
        """Note when the first request has a further token: all of them advance together."""
        known = 0
        while True:
            piece = engine.progress(names[0], known)
            if piece is not None:
                known += len(piece.token_ids)
                arrivals.append(time.perf_counter())
            await asyncio.sleep(0.0005)

    looking, found = asyncio.ensure_future(look()), []
    loop = asyncio.get_running_loop()

    async def told(word: object) -> object:
        sender.send(word)
        return await loop.run_in_executor(None, sender.recv)

    for version in range(1, rounds + 2):
        while len(arrivals) < 20 * version:
            await asyncio.sleep(0.01)
        await told("train")
        plan = await told("begin")
        await engine.begin_update(replace(plan, replica="r"))  # type: ignore[type-var]
        index = 0
        while (block := await told("next")) is not None:
            await engine.load_bucket(Bucket(index=index, blocks=(block,)))  # type: ignore[arg-type]
            index += 1
        digest = of_trainer([await told("digest")])  # type: ignore[list-item]
        assert await engine.finish_update() == digest
        usual, before = _gaps(arrivals[-15:]), len(arrivals)
        await engine.pause(PauseMode.KEEP)
        swapping = time.perf_counter()
        await engine.commit(version)
        swap = time.perf_counter() - swapping
        await engine.resume()
        while len(arrivals) < before + 5:
            await asyncio.sleep(0.001)
        found.append((max(_gaps(arrivals[before - 1 :])), swap, statistics.median(usual)))
    looking.cancel()
    await engine.abort(names)
    await asyncio.gather(*running)
    await engine.close()
    sender.send(None)
    sender.recv()
    return found[1:]


def _gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def _case(args: argparse.Namespace, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "parts_of": parts_of, **changes})


def table(lines: list[dict]) -> str:
    """Markdown: what, measured, ratio, budget."""
    rows = ["| what | measured | GB/s | ratio | budget | holds |", "|---|---|---|---|---|---|"]
    for line in lines:
        bound = f"{'<=' if line.get('upper') else '>='} {line['budget']:g}"
        value, rate = f"{line['value']:g} {line['unit']}", line.get("gb_s", "")
        rows.append(
            f"| {line['name']} | {value} | {rate} | {line['ratio']} | {bound} | {'yes' if line['ok'] else 'no'} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 0.5, 1.0])
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--transport", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--layouts", nargs="+", default=["1:1x1", "4:2x2", "8:4x1"])
    parser.add_argument("--verify", default="sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--link-mib-s", type=float, default=50.0)
    parser.add_argument("--changed", type=float, default=0.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--adapter-rank", type=int, default=0)
    parser.add_argument("--bytes-of", nargs="*", default=[])
    args = parser.parse_args()
    if args.bytes_of:
        for model in args.bytes_of:
            print(json.dumps(count_bytes(model, args.adapter_rank or 32)), flush=True)
        return
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    found = []
    copy = copy_bandwidth(round(max(args.gb) * 1e9))
    if "speed" in args.parts:
        found.append(speed(args, copy))
    if "link" in args.parts:
        found.append(link(args, copy))
    if "growth" in args.parts:
        found.append(growth(args))
    if "pause" in args.parts:
        found.append(pause(args))
    lines = []
    for line in chain(*found):
        lines.append(line)
        print(json.dumps(line), flush=True)
    print("\n" + table(lines))


if __name__ == "__main__":
    main()
