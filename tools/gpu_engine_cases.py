"""Cases of tools/gpu_suite.py with an engine or a transport: gpu_cases.py runs them, one JSON object each.

ipc, nccl: random weights from one process to another, bit by bit with equal digests: through the memory of one device,
and between two devices. On a CPU: through shared memory, and gloo.
engine2, fp8, pushes: vLLM on two tensor ranks, with fp8 weights, and with experts, against the trainer: log-probs of
the sampled tokens. The last two are pushed other weights first, so that the compared ones go to known places. On a CPU
fp8 pushes bf16 weights, there is no kernel.
sglang_ipc, sglang_nccl: SGLang, whose ranks receive three pushes themselves, against the trainer: from the memory of
their own device, and from another device. On a CPU one and two ranks, over gloo.
adapters: vLLM with adapters that were pushed alone after the weights, against the trainer with the sum of both.
sleep: a replica that slept goes on with the same tokens; what it holds meanwhile.
experts: vLLM's record of experts of every position (on a CPU: that of the Hugging Face engine).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from array import array
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import gpu_cases
import torch
from gpu_trainer import train_mask

BLOCK_BYTES, NUMBERS = 1 << 20, 3_000_000
FP8_BUDGET = 0.2
"""Mean absolute difference of log-probs: a weight of 8 bits is off by up to 6 %."""
PROMPTS, NEW_TOKENS = 8, 24
ADAPTER_RANK = 4
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ON_CPU = {"cuda_ipc": "shm", "nccl": "gloo"}


def ipc(device: str, scratch: str) -> dict:
    return _transfer(device, scratch, "cuda_ipc", receiver_device=0)


def nccl(device: str, scratch: str) -> dict:
    return _transfer(device, scratch, "nccl", receiver_device=1)


def engine2(device: str, scratch: str) -> dict:
    if (missing := _missing(device, devices=2)) is not None:
        return missing
    gpu_cases.write_tiny(scratch, experts=False)
    return asyncio.run(_agreement(device, scratch, gpu_cases.LOGPROB_BUDGET, tensor_parallel_size=2))


def fp8(device: str, scratch: str) -> dict:
    if (missing := _missing(device, devices=1)) is not None:
        return missing
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return {"ok": True, "skipped": "the device has no fp8"}
    gpu_cases.write_tiny(scratch, experts=False)
    kind = {"quantization": "fp8"} if device == "cuda" else {}
    return asyncio.run(_agreement(device, scratch, FP8_BUDGET, pushed=True, random_weights=True, **kind))


def pushes(device: str, scratch: str) -> dict:
    if (missing := _missing(device, devices=1)) is not None:
        return missing
    gpu_cases.write_tiny(scratch, experts=True)
    return asyncio.run(_agreement(device, scratch, gpu_cases.LOGPROB_BUDGET, pushed=True, random_weights=True))


def graphs(device: str, scratch: str) -> dict:
    """`pushes` into an engine that decodes by CUDA graphs."""
    if (missing := _missing(device, devices=1)) is not None:
        return missing
    gpu_cases.write_tiny(scratch, experts=False)
    common = {"pushed": True, "random_weights": True, "enforce_eager": device == "cpu"}
    return asyncio.run(_agreement(device, scratch, gpu_cases.LOGPROB_BUDGET, **common))


def adapters(device: str, scratch: str) -> dict:
    if (missing := _missing(device, devices=1)) is not None:
        return missing
    base, both = Path(scratch, "base"), Path(scratch, "both")
    gpu_cases.write_tiny(str(base), experts=False)
    halves = _write_adapted(base, both)
    from roll_async.weight_sync.adapters import AdapterShape

    shape = AdapterShape(rank=ADAPTER_RANK, layers=ADAPTED)
    common = {"pushed": True, "random_weights": True, "adapter": shape, "halves": halves, "trained": str(both)}
    return asyncio.run(_agreement(device, str(base), gpu_cases.LOGPROB_BUDGET, **common))


def sglang_ipc(device: str, scratch: str) -> dict:
    return _sglang(device, scratch, "cuda_ipc", devices=1)


def sglang_nccl(device: str, scratch: str) -> dict:
    on_another = {"extra": {"base_gpu_id": 1}} if device == "cuda" else {"tensor_parallel_size": 2}
    return _sglang(device, scratch, "nccl", devices=2, **on_another)


def _sglang(device: str, scratch: str, transport: str, *, devices: int, **changes) -> dict:
    from roll_async.inference.backends import SGLANG_ON_CPU

    there = Path(SGLANG_ON_CPU, "sglang").is_dir() if device == "cpu" else find_spec("sglang") is not None
    if not there:
        return {"ok": True, "skipped": "the package sglang is not installed"}
    if (missing := _too_few(device, devices)) is not None:
        return missing
    gpu_cases.write_tiny(scratch, experts=False)
    way = transport if device == "cuda" else "gloo"
    common = {"strategy": "sglang", "random_weights": True, "push_over": way, **changes}
    return asyncio.run(_agreement(device, scratch, gpu_cases.LOGPROB_BUDGET, pushed=True, **common))


def sleep(device: str, scratch: str) -> dict:
    if (missing := _missing(device, devices=1)) is not None:
        return missing
    gpu_cases.write_tiny(scratch, experts=False)
    return asyncio.run(_sleep(device, scratch))


def experts(device: str, scratch: str) -> dict:
    strategy = "vllm" if device == "cuda" else "hf_infer"
    if device == "cuda" and (missing := _missing(device, devices=1)) is not None:
        return missing
    gpu_cases.write_tiny(scratch, experts=True)
    return asyncio.run(_experts(device, scratch, strategy))


CASES = {
    "ipc": ipc,
    "nccl": nccl,
    "engine2": engine2,
    "sglang_ipc": sglang_ipc,
    "sglang_nccl": sglang_nccl,
    "sleep": sleep,
    "fp8": fp8,
    "pushes": pushes,
    "graphs": graphs,
    "adapters": adapters,
    "experts": experts,
}


def _missing(device: str, *, devices: int) -> dict | None:
    if find_spec("vllm") is None:
        return {"ok": True, "skipped": "the package vllm is not installed"}
    return _too_few(device, devices)


def _too_few(device: str, devices: int) -> dict | None:
    if device == "cpu" or torch.cuda.device_count() >= devices:
        return None
    return {"ok": True, "skipped": f"needs {devices} devices, there are {torch.cuda.device_count()}"}


# Transports


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    large = torch.randn(NUMBERS, generator=generator)
    return {"large": large, "half": large[:1001].bfloat16(), "one": large[:1]}


def _transfer(device: str, scratch: str, transport: str, *, receiver_device: int) -> dict:
    if (missing := _too_few(device, receiver_device + 1)) is not None:
        return missing
    way = transport if device == "cuda" else ON_CPU[transport]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    (here, there), answers = context.Pipe(), context.Queue()
    ends = [
        context.Process(target=_send, args=(here, answers, device, way, scratch)),
        context.Process(target=_receive, args=(there, answers, device, receiver_device)),
    ]
    started = time.perf_counter()
    for end in ends:
        end.start()
    try:
        found = dict(answers.get(timeout=100) for _ in ends)
    finally:
        for end in ends:
            end.join(10)
            end.kill()
    same = found["sent"] == found["received"][0]
    return {
        "ok": same and found["received"][1],
        "transport": way,
        "value": round(time.perf_counter() - started, 2),
        "unit": "s with both processes' start",
        "bytes": sum(t.numel() * t.element_size() for t in _weights().values()),
        "digest_equal": same,
        "bitwise": found["received"][1],
    }


def _send(peer: Connection, answers, device: str, transport: str, scratch: str) -> None:
    _see(device, 0)
    from roll_async.weight_sync.bucket import Bucket, UpdatePlan
    from roll_async.weight_sync.digest import of_trainer
    from roll_async.weight_sync.transfer import TensorPart, open_sender

    plan = UpdatePlan(version=1, transport=transport, verify="full")
    parts = [TensorPart.whole(name, tensor.to(device)) for name, tensor in _weights().items()]
    sender = open_sender(plan, parts, block_bytes=BLOCK_BYTES, folder=scratch)
    peer.send(sender.plan)
    index = 0
    while (block := sender.next_block()) is not None:
        peer.send(Bucket(index=index, blocks=(block,)))
        peer.recv()  # it has taken the bucket: the block's memory may be written again
        index += 1
    peer.send(None)
    answers.put(("sent", of_trainer([sender.sent])))
    peer.recv()
    sender.close()


def _receive(peer: Connection, answers, device: str, number: int) -> None:
    _see(device, number)
    from roll_async.weight_sync.changes import LastExport
    from roll_async.weight_sync.digest import of_replica
    from roll_async.weight_sync.transfer import open_receiver

    receiver = open_receiver(peer.recv(), LastExport())
    found = {}
    while (bucket := peer.recv()) is not None:
        receiver.take(bucket)
        found |= {name: tensor.cpu().clone() for name, tensor in receiver.tensors()}
        peer.send("taken")
    same = all(name in found and torch.equal(found[name], tensor) for name, tensor in _weights().items())
    answers.put(("received", (of_replica([receiver.digest]), same)))
    receiver.close()
    peer.send("closed")


def _see(device: str, number: int) -> None:
    """This process sees one device, as the processes of a run do."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(number) if device == "cuda" else ""


# Engines


def _engine(device: str, folder: str, strategy: str = "vllm", **changes):
    from roll_async.inference.backends import create_engine
    from roll_async.inference.settings import EngineSettings

    common = {"dtype": "bf16", "max_model_len": 256, "max_running": 16, "memory_fraction": 0.2, "enforce_eager": True}
    return create_engine(strategy, EngineSettings(model_folder=folder, device=device, **{**common, **changes}))


def _requests(**sampling):
    from roll_async.schema import GenerateRequest, SamplingParams

    chosen = SamplingParams(max_new_tokens=NEW_TOKENS, **sampling)
    return [
        GenerateRequest(request_id=f"r{i}", prompt_token_ids=array("i", [5 + i, 7, 11, 13]), sampling=chosen)
        for i in range(PROMPTS)
    ]


async def _answers(engine, requests: Sequence) -> list:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def _tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for path in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(path).items()}


def _write_adapted(base: Path, both: Path) -> dict[str, torch.Tensor]:
    """Random adapters on all linear layers of `base`, by the names that are pushed; `both` gets the sum of the two."""
    from safetensors.torch import save_file

    from roll_async.weight_sync.bucket import adapter_half

    torch.manual_seed(1)
    weights, halves = _tensors(base), {}
    for name in [name for name in weights if name.split(".")[-2] in ADAPTED and name.endswith(".weight")]:
        rows, columns = weights[name].shape
        down, up = torch.randn(ADAPTER_RANK, columns) * columns**-0.5, torch.randn(rows, ADAPTER_RANK) * 0.05
        halves[adapter_half(name, "lora_A")], halves[adapter_half(name, "lora_B")] = down.bfloat16(), up.bfloat16()
        weights[name] = (weights[name].float() + up.bfloat16().float() @ down.bfloat16().float()).bfloat16()
    both.mkdir()
    save_file(weights, both / "model.safetensors", {"format": "pt"})
    (both / "config.json").write_text((base / "config.json").read_text())
    return halves


async def _push(
    engine,
    tensors: dict[str, torch.Tensor],
    version: int,
    transport: str,
    ranks: int,
    *,
    before=None,
    alone: bool = False,
):
    """Tensors as a trainer sends them; returns the sender, to be closed. `ranks`: of the engine, each of which receives
    its part itself. `before`: the sender of the last push. `alone`: they are adapters on what that one sent.
    """
    from roll_async.inference.protocol import PauseMode
    from roll_async.weight_sync.bucket import STAGED, Bucket, Content, UpdatePlan
    from roll_async.weight_sync.digest import of_trainer
    from roll_async.weight_sync.layout import EngineLayout
    from roll_async.weight_sync.transfer import TensorPart, open_sender

    place = "cpu" if transport in STAGED else "cuda"
    layout = EngineLayout(tensor=ranks, num_kv_heads=2)
    content = Content.ADAPTERS if alone else Content.WHOLE
    plan = UpdatePlan(version=version, transport=transport, verify="full", layout=layout, content=content)
    parts = [TensorPart.whole(name, tensor.to(place)) for name, tensor in tensors.items()]
    sender = open_sender(plan, parts, block_bytes=BLOCK_BYTES, previous=before)
    await engine.pause(PauseMode.ABORT)
    await engine.begin_update(sender.plan)
    index = 0
    while (block := await asyncio.to_thread(sender.next_block)) is not None:
        await engine.load_bucket(Bucket(index=index, blocks=(block,)))
        index += 1
    if await engine.finish_update() != of_trainer([sender.sent]):
        raise RuntimeError("the replica's digest is not the sender's")
    await engine.commit(version)
    await engine.resume()
    return sender


async def _agreement(
    device: str,
    folder: str,
    budget: float,
    *,
    pushed: bool = False,
    push_over: str = "shm",
    halves: dict[str, torch.Tensor] | None = None,
    trained: str | None = None,
    **changes,
) -> dict:
    """Sampled tokens' log-probs, the engine's against one rank of the trainer's local layers. `halves`: adapters that
    are pushed alone after the weights; `trained`: the folder of the sum of both.
    """
    engine, requests, ranks = _engine(device, folder, **changes), _requests(temperature=1.0), 1
    if push_over == "gloo":  # a CPU stands in for devices: the ranks receive themselves here, too
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        engine.loads_in_place = lambda plan: True
    if push_over != "shm":
        ranks = changes.get("tensor_parallel_size", 1)
    await engine.start()
    sender = None
    try:
        if pushed:
            # A whole push has adapters, too; these are of another version.
            weights = {**_tensors(folder), **(halves or {})}
            for version, scale in enumerate((-1.0, 0.5, 1.0), start=1):
                sent = {name: tensor * scale for name, tensor in weights.items()}
                sender = await _push(engine, sent, version, push_over, ranks, before=sender)
        if halves is not None:
            sender = await _push(engine, halves, 4, push_over, ranks, before=sender, alone=True)
        completions = await _answers(engine, requests)
    finally:
        if sender is not None:
            sender.close()
        await engine.close()
    rows = [[*r.prompt_token_ids, *c.token_ids] for r, c in zip(requests, completions, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    mask = train_mask(tokens, lengths)
    local, rows_of_trainer = {"transformer_impl": "local"}, (tokens, lengths, mask)
    scored = await asyncio.to_thread(gpu_cases.scored, device, trained or folder, local, 1, rows_of_trainer)
    difference = torch.cat([
        (scored[i, len(r.prompt_token_ids) : len(rows[i])] - torch.tensor(c.logprobs)).abs()
        for i, (r, c) in enumerate(zip(requests, completions, strict=True))
    ])  # fmt: skip
    mean = float(difference.mean())
    return {
        "ok": mean <= budget,
        "value": mean,
        "largest": float(difference.max()),
        "unit": "nat",
        "budget": budget,
        "tokens": len(difference),
        "settings": {name: value for name, value in changes.items() if name != "adapter"},
    }


async def _sleep(device: str, folder: str) -> dict:
    from roll_async.inference.protocol import PauseMode

    engine = _engine(device, folder, sleep_level=1)
    await engine.start()
    try:
        awake = engine.memory()
        before = [list(c.token_ids) for c in await _answers(engine, _requests(temperature=0.0))]
        await engine.pause(PauseMode.ABORT)
        await engine.sleep(1)
        asleep = engine.memory()
        await engine.wake(["weights"])
        await engine.wake(["kv_cache"])
        await engine.resume()
        after = [list(c.token_ids) for c in await _answers(engine, _requests(temperature=0.0))]
        same_memory = engine.memory() == awake
    finally:
        await engine.close()
    gave_back = asleep.kv_cache_bytes == 0 and (device == "cpu" or asleep.weights_bytes == 0)
    return {
        "ok": before == after and same_memory and gave_back,
        "value": asleep.weights_bytes + asleep.kv_cache_bytes,
        "unit": "bytes held asleep",
        "awake": awake.weights_bytes + awake.kv_cache_bytes,
        "same_tokens": before == after,
    }


async def _experts(device: str, folder: str, strategy: str) -> dict:
    engine, requests = _engine(device, folder, strategy, record_experts=True), _requests(temperature=1.0)
    await engine.start()
    try:
        completions = await _answers(engine, requests)
    finally:
        await engine.close()
    records = [c.experts for c in completions]
    wanted = [len(r.prompt_token_ids) + len(c.token_ids) - 1 for r, c in zip(requests, completions, strict=True)]
    whole = all(x is not None and x.num_positions == n for x, n in zip(records, wanted, strict=True))
    known = all(x is not None and x.top_k == 2 and 0 <= min(x.ids) and max(x.ids) < 8 for x in records)
    return {"ok": whole and known, "engine": strategy, "value": sum(wanted), "unit": "positions recorded"}
