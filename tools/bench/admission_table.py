"""Admission by KV budget against the best fixed number of requests per replica, on the virtual clock.

    python tools/bench/admission_table.py [--seed 1] [--markdown] [--only WORD]   # exit 1 below the budget

The real server manager runs over replicas whose KV cache is bounded: when it is full the youngest request is preempted,
and read again when there is room. There are always more requests than run. Of every setting the tokens that are
generated within a time are counted, once with `admission: kv` under a cap of 256, and once for each fixed number of
requests of a geometric search. The figure is the quotient of kv and the best of them. `short wait` is how long the
shortest tenth of the answers took at most, from the request to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.schema import Completion, GenerateRequest, SamplingParams
from roll_async.simulator.clock import VirtualLoop, run_virtual
from roll_async.simulator.parts.engine import SimEngine
from roll_async.simulator.parts.models import EngineFaults, LengthModel, SpeedModel, uniform
from roll_async.simulator.parts.replica import SimReplica
from roll_async.simulator.parts.text import ScriptedTurn

BUDGET = 0.95
CAP = 256
FIXED = (4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256)
TOKEN_S, PREFILL_S = 0.02, 0.0002
ROUNDING_S = 1e-6
"""A sleep shorter than the resolution of the loop's clock takes no time, and would be repeated for ever; one may end
by so much early.
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row: lengths in tokens, times in seconds."""

    name: str
    kv_tokens: int = 64_000
    lengths: LengthModel
    prompts: LengthModel = field(default_factory=lambda: LengthModel(mean_tokens=200, sigma=0.3, max_tokens=400))
    limit: int
    """max_new_tokens."""
    longer_from_s: float | None = None
    """From then on, answers are `factor` times as long."""
    factor: float = 10.0
    short_share: float = 0.0
    """Of requests that are answered in a tenth of the tokens."""
    per_request_s: float = 0.0
    """What one more request adds to the time of a token."""
    push_s: float | None = None
    """Interval of weight pushes, for which running requests stop and go on (interrupt.mode resume)."""
    replicas: int = 1
    seconds: float


def lognormal(mean: float, sigma: float, longest: int) -> LengthModel:
    return LengthModel(mean_tokens=mean, sigma=sigma, max_tokens=longest)


SETTINGS = (
    Setting(name="light tail", lengths=lognormal(1000, 0.6, 8000), limit=8000, seconds=600),
    Setting(name="heavy tail", lengths=lognormal(1000, 1.3, 16000), limit=16000, seconds=600),
    Setting(name="all equal", lengths=lognormal(1000, 0.0, 8000), limit=8000, seconds=600),
    Setting(name="10x longer after a third", lengths=lognormal(400, 0.8, 32000), limit=32000, seconds=900,
            longer_from_s=300),
    Setting(name="most are as long as may be", lengths=lognormal(4000, 0.5, 4096), limit=4096, seconds=900),
    Setting(name="short answers, a high limit", lengths=lognormal(300, 0.6, 2000), limit=32000, seconds=300),
    Setting(name="few fit", kv_tokens=16_000, lengths=lognormal(2000, 0.8, 14000), limit=14000, seconds=1200),
    Setting(name="9 in 10 are short", lengths=lognormal(4000, 0.5, 16000), limit=16000, short_share=0.9, seconds=600),
    Setting(name="long prompts", kv_tokens=128_000, lengths=lognormal(200, 0.6, 1000), limit=1000, seconds=300,
            prompts=lognormal(4000, 1.0, 32000)),
    Setting(name="compute-bound decoder", lengths=lognormal(1000, 1.0, 16000), limit=16000, seconds=600,
            per_request_s=0.001),
    Setting(name="the cap binds", kv_tokens=10_000_000, lengths=lognormal(500, 1.0, 8000), limit=8000, seconds=300),
    Setting(name="pushes every 20 s", lengths=lognormal(1000, 1.0, 16000), limit=16000, seconds=600, push_s=20),
    Setting(name="4 replicas", lengths=lognormal(1000, 1.0, 16000), limit=16000, seconds=600, replicas=4),
)  # fmt: skip


class Backlog:
    """Requests by number; lengths belong to the number, so every schedule is given the same ones."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self._seed = setting, seed
        self._started = 0
        self.longer = False
        self._factors: dict[str, float] = {}

    def next(self) -> GenerateRequest:
        setting = self.setting
        self._started += 1
        name = str(self._started)
        factor = setting.factor if self.longer else 1.0
        if uniform(self._seed, "short", name) < setting.short_share:
            factor /= 10
        self._factors[name] = factor
        return GenerateRequest(
            request_id=name,
            prompt_token_ids=array("i", bytes(4 * setting.prompts.tokens(self._seed, name, f"prompt {name}"))),
            sampling=SamplingParams(max_new_tokens=setting.limit),
        )

    def turn(self, name: str, prompt: Sequence[int], stops: Sequence[str]) -> ScriptedTurn:
        """`simulator/parts/engine.py: Samples`. An answer that goes on after an interruption keeps its length."""
        length = max(1, round(self._factors[name] * self.setting.lengths.tokens(self._seed, name, name)))
        start = self.setting.prompts.tokens(self._seed, name, f"prompt {name}")
        return ScriptedTurn(start, start + length, False, False)


@dataclass(frozen=True, kw_only=True)
class Result:
    tokens_per_s: float
    preemptions: int
    mean_running: float
    longest_wait_s: float
    """From a request to its end, of the short ones (the shortest tenth of those that ended)."""


async def _measure(setting: Setting, manager_options: ManagerOptions, seed: int) -> Result:
    loop, backlog = asyncio.get_running_loop(), Backlog(setting, seed)
    speed = SpeedModel(
        token_s=TOKEN_S,
        token_s_per_request=setting.per_request_s,
        prefill_token_s=PREFILL_S,
        kv_tokens=setting.kv_tokens,
    )
    engines = [
        SimEngine(f"engine{i}", seed, backlog, speed, slots=CAP, faults=EngineFaults()) for i in range(setting.replicas)
    ]
    for engine in engines:
        engine.version = engine.content = 0
        engine.paused = False
    replicas = [SimReplica(engine, seed, EngineFaults()) for engine in engines]
    manager = EnginePool(replicas, manager_options)
    await manager.start()
    ended: list[tuple[int, float]] = []

    async def client() -> None:
        while True:
            request, began_s = backlog.next(), loop.time()
            completion: Completion = await manager.generate(request)
            ended.append((len(completion.token_ids), loop.time() - began_s))

    clients = [asyncio.create_task(client()) for _ in range(round(1.25 * CAP * setting.replicas))]
    try:
        step_s = setting.push_s or setting.longer_from_s or setting.seconds
        while setting.seconds - loop.time() > ROUNDING_S:
            await asyncio.sleep(min(step_s, setting.seconds - loop.time()))
            if setting.longer_from_s is not None and loop.time() >= setting.longer_from_s - ROUNDING_S:
                backlog.longer = True
            if setting.push_s is not None:
                await manager.interrupt("resume", 10.0)
                await manager.resume()
        for replica in replicas:  # what still runs, or waits with tokens after a preemption, counts, too
            await replica.engine.abort(replica.engine.request_ids)
        tokens = sum(engine.generated_tokens for engine in engines)
        busy = sum(e.busy_until_now_s() for e in engines)
        result = Result(
            tokens_per_s=tokens / setting.seconds,
            preemptions=sum(e.preemptions for e in engines),
            mean_running=busy / setting.seconds / setting.replicas,
            longest_wait_s=max((s for _, s in sorted(ended)[: max(1, len(ended) // 10)]), default=float("nan")),
        )
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await manager.close()
        for replica in replicas:
            await replica.close()
    return result


def measure(setting: Setting, *, fixed: int | None, seed: int) -> Result:
    """`fixed`: requests per replica; None = by the KV cache."""
    options = ManagerOptions(
        max_concurrent_per_server=fixed or CAP,
        admission="kv" if fixed is None else "fixed",
        generation_timeout_s=1e6,
        silence_s=1e6,
    )
    loop = VirtualLoop()
    return run_virtual(_measure(setting, options, seed), loop)


def best_fixed(setting: Setting, seed: int) -> tuple[int, Result]:
    """The best of a geometric search, which ends when more than twice as many as the best are a tenth slower."""
    found: dict[int, Result] = {}
    for number in FIXED:
        found[number] = measure(setting, fixed=number, seed=seed)
        best = max(found, key=lambda n: found[n].tokens_per_s)
        if number > 2 * best and found[number].tokens_per_s < 0.9 * found[best].tokens_per_s:
            break
    return best, found[best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="settings whose name has this word")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    if args.markdown:
        print("| setting | best fixed | tokens/s | kv: running | tokens/s | of the best | preemptions | short wait |")
        print("|---|---|---|---|---|---|---|---|")
    worst = 1e9
    for setting in SETTINGS:
        if args.only not in setting.name:
            continue
        number, best = best_fixed(setting, args.seed)
        kv = measure(setting, fixed=None, seed=args.seed)
        quotient = kv.tokens_per_s / best.tokens_per_s
        worst = min(worst, quotient)
        if args.markdown:
            tokens, waits = (kv.tokens_per_s, best.tokens_per_s), (kv.longest_wait_s, best.longest_wait_s)
            cells = [
                setting.name, str(number), f"{tokens[1]:,.0f}", f"{kv.mean_running:.0f}", f"{tokens[0]:,.0f}",
                f"{quotient:.2f}", f"{kv.preemptions} / {best.preemptions}", f"{waits[0]:.0f} / {waits[1]:.0f} s",
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
        else:
            row = {"setting": setting.name, "best_fixed": number, "of_best": round(quotient, 3)}
            print(json.dumps({**row, "kv": asdict(kv), "fixed": asdict(best)}), flush=True)
    print(f"worst quotient {worst:.3f}, budget {BUDGET}", file=sys.stderr)
    raise SystemExit(worst < BUDGET)


if __name__ == "__main__":
    main()
