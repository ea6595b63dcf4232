"""The math verify service under load: clients that always have one request under way, on real GSM8K solutions.

    python tools/bench/verify_service.py [--data data/gsm8k/test.jsonl] [--clients 64] [--seconds 60]

Every reply is compared with the verdict the sample must get. Budget: no reply is lost or wrong. Latency and rate are
printed beside it; with more clients than workers a request waits for clients / rate seconds, which is no fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from verification import Sample, samples  # noqa: E402

from roll_async.cluster.network import held_port  # noqa: E402

SCRIPT = ROOT / "examples" / "async_dapo" / "math_verify_service.py"


async def client(http, url: str, asked: list[Sample], ends: float, latencies: list[float], found: Counter) -> None:
    """One request after the other until the time is over."""
    place = 0
    while time.perf_counter() < ends:
        text, gold, right = asked[place % len(asked)]
        place += 1
        started = time.perf_counter()
        try:
            async with http.post(url, json={"text": text, "ground_truth": gold}) as reply:
                verdict = await reply.json()
                if reply.status != 200:
                    found[f"status {reply.status}"] += 1
                elif (verdict["score"] == 1.0) != right:
                    found["wrong"] += 1
                else:
                    found["right"] += 1
        except OSError as error:
            found[type(error).__name__] += 1
        latencies.append(time.perf_counter() - started)


async def load(url: str, clients: int, seconds: float, asked: list[Sample]) -> tuple[list[float], Counter]:
    import aiohttp

    latencies: list[float] = []
    found: Counter = Counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as http:
        while True:
            try:
                async with http.get(f"{url}/health"):
                    break
            except OSError:
                await asyncio.sleep(0.2)
        ends = time.perf_counter() + seconds
        share = [asked[number::clients] for number in range(clients)]
        await asyncio.gather(*(client(http, f"{url}/score", part, ends, latencies, found) for part in share))
    return latencies, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/gsm8k/test.jsonl")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    try:
        asked = samples(args.data, 2000, 0)
    except ValueError as error:
        sys.exit(f"verify_service: {error}")
    with held_port("127.0.0.1") as port:
        command = [sys.executable, str(SCRIPT), "--port", str(port), "--workers", str(args.workers)]
        service = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            started = time.perf_counter()
            url = f"http://127.0.0.1:{port}"
            latencies, found = asyncio.run(load(url, args.clients, args.seconds, asked))
        finally:
            service.terminate()
            service.wait(60)
    assert time.perf_counter() - started >= args.seconds
    cuts = statistics.quantiles(latencies, n=100)
    lost = found.total() - found["right"]
    line = {"name": f"verify_service_{args.clients}_clients", "value": round(len(latencies) / args.seconds, 1)}
    line |= {"unit": "replies/s", "ratio": found["right"] / len(latencies), "budget": 1.0, "ok": lost == 0}
    line |= {"p50_ms": round(cuts[49] * 1e3, 1), "p99_ms": round(cuts[98] * 1e3, 1), "seconds": args.seconds}
    print(json.dumps({**line, "replies": dict(found), "service_exit": service.returncode}), flush=True)


if __name__ == "__main__":
    main()
