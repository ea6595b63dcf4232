"""What each way to generate costs on CPU: vLLM with its core in the replica's process, in a process of its own, on two
ranks; hf_infer with its attention by request, and with that of Transformers.

    python tools/bench/engine_cores.py [--requests 256] [--tokens 64] [--running 128] [--only WORD]

Each case is a process of its own: seconds until the engine has started, resident memory of all its processes, tokens
per second of one round of requests (the best of three), core-seconds of all processes for 1,000 tokens (also true on a
busy machine), milliseconds of `pause` and `resume`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

UNITS = {
    "start_s": "s",
    "resident_mib": "MiB",
    "tokens_per_s": "tokens/s",
    "core_s_per_1000_tokens": "s",
    "pause_ms": "ms",
}
CASES = {
    "vLLM, core in the replica's process": ("vllm", {}),
    "vLLM, core in a process of its own": ("vllm", {"core_in_process": False}),
    "vLLM, tensor parallel 2": ("vllm", {"tensor_parallel_size": 2}),
    "hf_infer": ("hf_infer", {}),
    "hf_infer, attention of Transformers": ("hf_infer", {}),
}
"""Strategy and what differs in its settings."""


async def measure(folder: str, case: str, args: argparse.Namespace) -> dict:
    import psutil

    from roll_async.inference.backends import create_engine
    from roll_async.inference.hf import attention as hf_attention
    from roll_async.inference.protocol import PauseMode
    from roll_async.inference.settings import EngineSettings
    from roll_async.schema import GenerateRequest, SamplingParams

    strategy, changes = CASES[case]
    if case.endswith("of Transformers"):
        hf_attention.install = lambda: None
    started = time.perf_counter()
    settings = EngineSettings(
        model_folder=folder, dtype="fp32", device="cpu", max_model_len=256, max_running=args.running, **changes
    )
    engine = create_engine(strategy, settings)
    await engine.start()
    start_s = time.perf_counter() - started

    async def one_round(name: str) -> float:
        requests = [
            GenerateRequest(
                request_id=f"{name}/{i}",
                prompt_token_ids=array("i", [3 + i % 500, 4, 5]),
                sampling=SamplingParams(max_new_tokens=args.tokens),
            )
            for i in range(args.requests)
        ]
        began = time.perf_counter()
        completions = await asyncio.gather(*map(engine.generate, requests))
        return sum(len(c.token_ids) for c in completions) / (time.perf_counter() - began)

    def processes() -> list[psutil.Process]:
        me = psutil.Process()
        return [me, *me.children(recursive=True)]

    def busy_s() -> float:
        return sum(p.cpu_times().user + p.cpu_times().system for p in processes())

    await one_round("warm")
    before = busy_s()
    speed = max([await one_round(str(i)) for i in range(3)])
    busy = busy_s() - before
    resident = sum(p.memory_info().rss for p in processes())
    began = time.perf_counter()
    await engine.pause(PauseMode.ABORT)
    await engine.resume()
    pause_ms = (time.perf_counter() - began) * 1e3
    await engine.close()
    return {
        "start_s": start_s,
        "resident_mib": resident / 2**20,
        "tokens_per_s": speed,
        "core_s_per_1000_tokens": busy / (3 * args.requests * args.tokens / 1000),
        "pause_ms": pause_ms,
    }


def save_model(folder: str) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.Qwen2Config(
        vocab_size=512, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, dtype="float32", **sizes
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--folder")
    args = parser.parse_args()
    if args.case:
        print("RESULT", json.dumps(asyncio.run(measure(args.folder, args.case, args))), flush=True)
        return
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for case in (name for name in CASES if args.only in name):
            command = [sys.executable, __file__, *sys.argv[1:], "--case", case, "--folder", folder]
            output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
            result = next(line for line in output.splitlines() if line.startswith("RESULT")).removeprefix("RESULT ")
            for name, value in json.loads(result).items():
                line = {"name": f"{case}: {name}", "value": round(value, 2), "unit": UNITS[name]}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
