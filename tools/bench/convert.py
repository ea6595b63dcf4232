"""Conversion of a 1 B parameter checkpoint, both ways, against copying the same files: time and memory.

    python tools/bench/convert.py [--scratch DIR] [--rounds 3] [--shard-mb 500]

A random bf16 model of Llama-3.2-1B's shapes (1.24 B parameters, 2.5 GB) is written first. Copy and conversion take
turns, each ends when its files are on disk; medians count. Memory is the growth of the resident set. About
8 GB of disk are needed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}  # the second as roll-async convert sets it
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from roll_async.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.folders.hf_folder import HfFolder, write_known_tensors
from roll_async.checkpoint.folders.manifest import sync
from roll_async.checkpoint.folders.safetensors_files import TensorSpec
from roll_async.checkpoint.hf_names.families import family_of
from roll_async.checkpoint.hf_names.table import ModelShape

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "max_position_embeddings": 131072, "rope_theta": 500000.0, "hidden_act": "silu",
}  # fmt: skip
SHAPES = {
    "embed_tokens": (128256, 2048), "q_proj": (2048, 2048), "k_proj": (512, 2048), "v_proj": (512, 2048),
    "o_proj": (2048, 2048), "gate_proj": (8192, 2048), "up_proj": (8192, 2048), "down_proj": (2048, 8192),
}  # fmt: skip


def write_model(folder: Path, shard_bytes: int) -> None:
    """Random bits that are finite bf16 numbers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    family = family_of(HfConfig(CONFIG, "").architecture())
    specs = [
        TensorSpec(name=name, shape=SHAPES.get(name.split(".")[-2], (2048,)), dtype=torch.bfloat16)
        for match in family.parameters(ModelShape(moe_layers=(False,) * 16))
        for name in match.hf_names
        if name != "lm_head.weight"
    ]
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7000, (1 << 22,), dtype=torch.int16, generator=generator).view(torch.bfloat16)

    def tensors():
        for spec in specs:
            count = spec.num_bytes // 2
            yield spec.name, bits.repeat(-(-count // len(bits)))[:count].view(spec.shape)

    write_known_tensors(folder, specs, tensors(), shard_bytes=shard_bytes)


def resident_bytes(field: str) -> int:
    """VmRSS now, or VmHWM since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def copy(source: Path, target: Path) -> None:
    """All files of a folder, on disk when done."""
    shutil.copytree(source, target)
    for path in (*target.rglob("*"), target.parent):
        sync(path)


def timed(action, target: Path) -> tuple[float, int]:
    """Seconds and growth of the resident set; the target is removed again."""
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")
    before, started = resident_bytes("VmRSS"), time.perf_counter()
    action()
    seconds, grown = time.perf_counter() - started, resident_bytes("VmHWM") - before
    shutil.rmtree(target)
    return seconds, grown


def compare(name: str, source: Path, convert, scratch: Path, rounds: int, limits: dict) -> list[dict]:
    target = scratch / "target"
    copies, conversions = [], []
    for _ in range(rounds):
        copies.append(timed(lambda: copy(source, target), target)[0])
        conversions.append(timed(lambda: convert(source, target), target))
    copied, converted = statistics.median(copies), statistics.median(seconds for seconds, _ in conversions)
    peak = max(grown for _, grown in conversions)
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    allowed = 1.5 * limits["largest"] + limits["shard"]
    ratio = converted / copied
    return [
        {"name": f"convert/{name}/time", "value": round(converted, 3), "unit": "s", "copy_s": round(copied, 3),
         "ratio": round(ratio, 3), "budget": 1.3, "upper": True, "ok": ratio <= 1.3,
         "gb_per_s": round(size / converted / 1e9, 3), "rounds": [round(s, 2) for s, _ in conversions],
         "copy_rounds": [round(s, 2) for s in copies]},
        {"name": f"convert/{name}/memory", "value": round(peak / 1e6), "unit": "MB", "ratio": round(peak / allowed, 3),
         "budget": 1.0, "upper": True, "ok": peak <= allowed, "largest_tensor_mb": round(limits["largest"] / 1e6),
         "shard_mb": round(limits["shard"] / 1e6), "over_largest_tensor": round(peak / limits["largest"], 3)},
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", help="where to write; default: the system's temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shard-mb", type=int, default=500)
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    torch.set_num_threads(1)
    options = ConversionOptions(file_bytes=args.shard_mb * 1_000_000)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        scratch = Path(folder)
        if shutil.disk_usage(scratch).free < 9e9:
            print(f"{scratch} has less than 9 GB free; pass --scratch", file=sys.stderr)
            return 2
        write_model(scratch / "hf", options.file_bytes)
        hf_to_megatron(scratch / "hf", scratch / "megatron", options)
        read = HfFolder(scratch / "hf")
        limits = {"largest": max(read.spec(name).num_bytes for name in read.names()), "shard": options.file_bytes}
        for name, source, convert in (
            ("hf_to_megatron", scratch / "hf", lambda a, b: hf_to_megatron(a, b, options)),
            ("megatron_to_hf", scratch / "megatron", lambda a, b: megatron_to_hf(a, b, options)),
        ):
            for line in compare(name, source, convert, scratch, args.rounds, limits):
                print(
                    json.dumps({**line, "parameters": sum(read.spec(n).num_bytes // 2 for n in read.names())}),
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
