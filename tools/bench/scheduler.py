"""What the rollout scheduler costs: 10,000 requests in flight on 1, 64 and 1,024 fake engines, in one process.

    python tools/bench/scheduler.py [--requests 10000] [--completions 40000] [--rounds 3]

Every caller waits for its completion and sends the next request at once, so the number in flight is constant. The
engines answer in random order, 16 requests per turn of the loop wherever they are, so a report of one of many engines
carries one reply. Each case prints completions per second of CPU time (fakes included; what a free core would give, and
the verdict) and of wall time; then how long it takes to pause everything, until every aborted reply is back.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from roll_async.inference.protocol import EngineCapabilities, EngineLoad, EngineReport
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.schema import Completion, FinishReason, GenerateRequest, SamplingParams

BUDGET_PER_S, BUDGET_FLAT, BUDGET_PAUSE_S = 5000, 0.8, 0.1
ANSWERS_PER_TURN = 16
TOKENS, LOGPROBS = array("i", range(8)), array("f", [-0.5] * 8)
LOAD = EngineLoad(running=0, waiting=0, free_kv_fraction=1.0)


def completion(request_id: str, reason: FinishReason) -> Completion:
    return Completion(
        request_id=request_id,
        token_ids=TOKENS,
        logprobs=LOGPROBS,
        version_runs=((0, 8),),
        finish_reason=reason,
        generation_s=1.0,
    )


class Engine:
    """Holds requests until it is told to answer one."""

    capabilities = EngineCapabilities(keep_in_place=True)

    def __init__(self, name: str, held: list[tuple[Engine, str]]) -> None:
        self.name, self._held = name, held
        self.running: dict[str, Completion] = {}
        self._done: list[Completion] = []
        self._news = asyncio.Event()

    async def submit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self.running[request.request_id] = completion(request.request_id, FinishReason.ABORT)
            self._held.append((self, request.request_id))

    def answer(self, request_id: str, reason: FinishReason = FinishReason.STOP) -> None:
        aborted = self.running.pop(request_id, None)
        if aborted is not None:
            self._done.append(aborted if reason is FinishReason.ABORT else completion(request_id, reason))
            self._news.set()

    async def collect(self) -> EngineReport:
        await self._news.wait()
        self._news.clear()
        done, self._done = self._done, []
        return EngineReport(completions=tuple(done), failures=(), load=LOAD)

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.answer(request_id, FinishReason.ABORT)

    async def pause(self, mode: object) -> None:
        if getattr(mode, "value", "") == "abort":
            await self.abort(list(self.running))

    async def resume(self) -> None:
        pass

    async def load(self) -> EngineLoad:
        return LOAD


async def case(num_engines: int, num_requests: int, num_completions: int) -> dict[str, float]:
    """Completions/s, CPU seconds per completion, and seconds to pause in both ways, of one manager."""
    rng = random.Random(num_engines)
    held: list[tuple[Engine, str]] = []
    engines = [Engine(f"engine-{i}", held) for i in range(num_engines)]
    limit = -(-num_requests // num_engines)
    manager = EnginePool(engines, ManagerOptions(max_concurrent_per_server=limit))
    await manager.start()
    done, running = 0, True
    sampling, prompt = SamplingParams(max_new_tokens=64), array("i", range(32))

    async def caller(number: int) -> None:
        nonlocal done
        while running:
            request_id = f"{number}.{done}"
            await manager.generate(GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
            done += 1

    callers = [asyncio.create_task(caller(i)) for i in range(num_requests)]
    while len(held) < num_requests:
        await asyncio.sleep(0)
    gc.collect()
    gc.freeze()  # the callers and what was imported: a full collection would count them again and again
    start, cpu, target = time.perf_counter(), time.process_time(), num_completions
    while done < target:
        for _ in range(min(ANSWERS_PER_TURN, len(held))):
            position = rng.randrange(len(held))
            held[position], held[-1] = held[-1], held[position]
            engine, request_id = held.pop()
            engine.answer(request_id)
        await asyncio.sleep(0)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    pauses = {}
    for mode in ("keep", "resume"):
        while sum(len(engine.running) for engine in engines) < num_requests:
            await asyncio.sleep(0)
        gc.collect()
        gc.freeze()  # as a run does every second; else a full collection may fall into the pause, and 0.1 s with it
        before, before_cpu = time.perf_counter(), time.process_time()
        await manager.interrupt(mode, 30.0)
        pauses[mode] = time.perf_counter() - before
        pauses[f"{mode} cpu"] = time.process_time() - before_cpu
        await manager.resume()
    running = False
    for task in callers:
        task.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    await manager.close()
    gc.unfreeze()
    return {"per_s": done / seconds, "cpu_s": cpu / done, **pauses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--completions", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    cases: dict[int, list[dict[str, float]]] = {1: [], 64: [], 1024: []}
    for _ in range(args.rounds):  # in turn, because other work on the machine slows all of them
        for engines, found in cases.items():
            found.append(asyncio.run(case(engines, args.requests, args.completions)))
    middle = {n: {k: statistics.median(f[k] for f in found) for k in found[0]} for n, found in cases.items()}
    for engines, figures in middle.items():
        line = {
            "name": f"scheduler_{engines}_engines",
            "value": round(1 / figures["cpu_s"]),
            "unit": "completions/s of one core",
            "ratio": round(1 / figures["cpu_s"] / BUDGET_PER_S, 3),
            "budget": 1.0,
            "ok": 1 / figures["cpu_s"] >= BUDGET_PER_S,
            "wall_per_s": round(figures["per_s"]),
            "cpu_us_per_completion": round(1e6 * figures["cpu_s"], 1),
            "in_flight": args.requests,
        }
        print(json.dumps(line))
    flat = statistics.median(b["cpu_s"] / a["cpu_s"] for a, b in zip(cases[1024], cases[64], strict=True))
    line = {"name": "scheduler_flat", "value": round(flat, 3), "unit": "speed at 1,024 engines / at 64"}
    print(json.dumps({**line, "ratio": round(flat, 3), "budget": BUDGET_FLAT, "ok": flat >= BUDGET_FLAT}))
    for engines, figures in middle.items():
        for mode in ("keep", "resume"):
            line = {
                "name": f"scheduler_pause_{mode}_{engines}_engines",
                "value": round(figures[f"{mode} cpu"], 4),
                "unit": "s of one core",
                "ratio": round(figures[f"{mode} cpu"], 4),
                "budget": BUDGET_PAUSE_S,
                "upper": True,
                "ok": figures[f"{mode} cpu"] <= BUDGET_PAUSE_S,
                "wall_s": round(figures[mode], 4),
                "in_flight": args.requests,
            }
            print(json.dumps(line))


if __name__ == "__main__":
    main()
