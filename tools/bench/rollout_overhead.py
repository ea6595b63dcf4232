"""Generation through scheduler + Ray against the same vLLM engine called directly, same prompts.

    python tools/bench/rollout_overhead.py [--model output/demo_assets/model] [--requests 1024] [--rounds 5]

Two engines of the same settings, one in this process and one in a Ray actor behind the server manager, take turns; the
median round of each counts. Every request generates the same number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from array import array
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")

PROMPT_TOKENS, NEW_TOKENS = 16, 64


def requests(count: int, round_name: str) -> list:
    from roll_async.schema import GenerateRequest, SamplingParams

    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    prompt = array("i", [3 + i % 10 for i in range(PROMPT_TOKENS)])
    return [
        GenerateRequest(request_id=f"{round_name}-{i}", prompt_token_ids=prompt, sampling=sampling)
        for i in range(count)
    ]


async def timed(generate, batch: list) -> float:
    """Tokens per second of one round."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    completions = await asyncio.gather(*(generate(r) for r in batch))
    return sum(len(c.token_ids) for c in completions) / (loop.time() - started)


async def measure(model: str, count: int, rounds: int) -> tuple[list[float], list[float]]:
    from roll_async.cluster.engine_group import EngineSpec, RayEngineClient
    from roll_async.cluster.node_pool import NodePool
    from roll_async.cluster.placement import place
    from roll_async.inference.settings import EngineSettings
    from roll_async.inference.vllm_engine import VllmEngine
    from roll_async.rollout.manager_options import ManagerOptions
    from roll_async.rollout.server_manager import AsyncLLMServerManager

    settings = EngineSettings(model_folder=model, dtype="fp32", device="cpu", max_model_len=256, max_running=256)
    placements = place(None, num_processes=1, num_gpus_per_node=8, num_threads=1)
    order = EngineSpec(strategy="vllm", settings=settings, env={}, rpc_timeout_s=300.0)
    pool = NodePool(placements)
    client = await RayEngineClient.start(order, placements[0], pool)
    manager = AsyncLLMServerManager([client], ManagerOptions(max_concurrent_per_server=512))
    await manager.start()
    direct = VllmEngine(settings)
    await direct.start()
    through, straight = [], []
    for number in range(rounds + 1):
        straight.append(await timed(direct.generate, requests(count, f"direct{number}")))
        through.append(await timed(manager.generate, requests(count, f"ray{number}")))
    await manager.close()
    await client.close()
    await direct.close()
    return through[1:], straight[1:]  # the first round warms both up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="output/demo_assets/model")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    from roll_async.cluster.runtime import ray_runtime

    with ray_runtime(num_processes=2, env={}):
        through, straight = asyncio.run(measure(str(Path(args.model).resolve()), args.requests, args.rounds))
    value, base = statistics.median(through), statistics.median(straight)
    line = {
        "name": "rollout_overhead",
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
    print(json.dumps(line))


if __name__ == "__main__":
    main()
