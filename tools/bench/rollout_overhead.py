"""Generation through scheduler + Ray against the same vLLM engine called directly, same prompts.

    python tools/bench/rollout_overhead.py [--model output/demo_assets/model] [--requests 1024] [--rounds 5]
                                           [--kept 512 256] [--lengths equal mixed]

Two engines of the same settings, one in this process and one in a Ray actor behind the server manager, take turns; the
median round of each counts. Either runs 256 requests at once. The one in this process has all others waiting beside
it; the scheduler keeps twice as many at its engine as that runs, or exactly as many, so that a place is empty until
the driver has heard of it. Equal lengths: all requests generate 64 tokens, and 256 places are empty at once. Mixed: 32
to 96 tokens, 64 on average.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")

PROMPT_TOKENS, RUNNING = 16, 256
NEW_TOKENS = {"equal": (64,), "mixed": tuple(range(32, 97))}


def requests(count: int, lengths: str, round_name: str) -> list:
    from roll_async.schema import GenerateRequest, SamplingParams

    rng = random.Random(0)  # the same requests in each round
    new_tokens = [rng.choice(NEW_TOKENS[lengths]) for _ in range(count)]
    prompt = array("i", [3 + i % 10 for i in range(PROMPT_TOKENS)])
    return [
        GenerateRequest(
            request_id=f"{round_name}-{i}", prompt_token_ids=prompt, sampling=SamplingParams(max_new_tokens=length)
        )
        for i, length in enumerate(new_tokens)
    ]


def endless(model: Path, copy: Path) -> str:
    """A copy of the model that knows no end of a sequence: its answers are as long as was asked for."""
    shutil.copytree(model, copy)
    for name in ("config.json", "generation_config.json"):
        options = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**options, "eos_token_id": None}))
    return str(copy)


async def timed(generate, batch: list) -> float:
    """Tokens per second of one round."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    completions = await asyncio.gather(*(generate(r) for r in batch))
    seconds = loop.time() - started
    assert all(len(c.token_ids) == r.sampling.max_new_tokens for c, r in zip(completions, batch, strict=True))
    return sum(len(c.token_ids) for c in completions) / seconds


async def measure(
    args: argparse.Namespace, model: str, found: Callable[[str, int, list[float], list[float]], None]
) -> None:
    """`found` gets lengths, kept requests, and tokens per second of the rounds through the scheduler and without."""
    from roll_async.cluster.node_pool import NodePool
    from roll_async.cluster.placement import place
    from roll_async.cluster.roles.engine_group import EngineSpec, RayEngineClient
    from roll_async.inference.settings import EngineSettings
    from roll_async.inference.vllm.engine import VllmEngine
    from roll_async.rollout.dispatch.engine_pool import EnginePool
    from roll_async.rollout.dispatch.manager_options import ManagerOptions

    settings = EngineSettings(model_folder=model, dtype="fp32", device="cpu", max_model_len=256, max_running=RUNNING)
    placements = place(None, num_processes=1, num_gpus_per_node=8, num_threads=1)
    order = EngineSpec(strategy="vllm", settings=settings, env={}, rpc_timeout_s=300.0)
    pool = NodePool(placements)
    direct = VllmEngine(settings)
    await direct.start()
    for kept in args.kept:
        client = await RayEngineClient.start(order, placements[0], pool)
        manager = EnginePool([client], ManagerOptions(max_concurrent_per_server=kept))
        await manager.start()
        for lengths in args.lengths:
            through, straight = [], []
            for number in range(args.rounds + 1):
                straight.append(await timed(direct.generate, requests(args.requests, lengths, f"direct{number}")))
                through.append(await timed(manager.generate, requests(args.requests, lengths, f"ray{number}")))
            found(lengths, kept, through[1:], straight[1:])  # the first round warms both up
        await manager.close()
        await client.close()
    await direct.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="output/demo_assets/model")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kept", nargs="+", type=int, default=[2 * RUNNING, RUNNING], help="requests at the engine")
    parser.add_argument("--lengths", nargs="+", choices=list(NEW_TOKENS), default=list(NEW_TOKENS))
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    from roll_async.cluster.runtime import ray_runtime

    def found(lengths: str, kept: int, through: list[float], straight: list[float]) -> None:
        value, base = statistics.median(through), statistics.median(straight)
        line = {
            "name": f"rollout_overhead/{lengths}/{kept}_kept",
            "value": round(value),
            "unit": "tokens/s",
            "direct": round(base),
            "ratio": round(value / base, 3),
            "budget": 0.9,
            "ok": value / base >= 0.9,
            "requests": args.requests,
            "rounds_through": [round(x) for x in through],
            "rounds_direct": [round(x) for x in straight],
        }
        print(json.dumps(line), flush=True)

    with tempfile.TemporaryDirectory() as folder, ray_runtime(num_processes=2, env={}):
        asyncio.run(measure(args, endless(Path(args.model), Path(folder) / "model"), found))


if __name__ == "__main__":
    main()
