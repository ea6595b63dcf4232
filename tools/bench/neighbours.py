"""What an engine and a trainer leave each other on the cores of one machine when nothing else connects them.

    python tools/bench/neighbours.py [--model output/demo_assets_heavy_deep/model] [--rounds 5] [--seconds 12]
                                     [--running 128] [--rows 128]

Two processes with one thread each: vLLM called directly, round after round of `--running` answers of 48 tokens, and the
Megatron trainer called directly, step after step on `--rows` rows with a heavy tail. No scheduler, no Ray, no rewards,
no push. Each round of measurement is the engine alone, the trainer alone, both. `beside` is the rate of a side beside
its neighbour ÷ its rate alone, `core_s` its core-seconds alone ÷ those beside its neighbour for the same work: where
both are equally far from 1, a side is not waiting for a core but gets less out of it (caches, memory, clock). An
asynchronous run on these cores makes about `value`, the lower of both, of what perfect overlap would give.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

NEW_TOKENS = 48
SIDES = ("engine", "trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A round of answers, or an optimizer step."""

    began_s: float
    ended_s: float
    """On the clock that all processes of a machine share."""
    core_s: float


def work(unit: Callable[[], None]) -> None:
    """Between `start` and `stop` on standard input one unit after another, whose records are printed at the stop."""
    unit()
    print("ready", flush=True)
    while sys.stdin.readline():
        stop, done = threading.Event(), []
        threading.Thread(target=lambda stop=stop: (sys.stdin.readline(), stop.set()), daemon=True).start()
        while not stop.is_set():
            began, busy = time.monotonic(), time.process_time()
            unit()
            done.append(Unit(began_s=began, ended_s=time.monotonic(), core_s=time.process_time() - busy))
        print(json.dumps([asdict(u) for u in done]), flush=True)


def engine_side(args: argparse.Namespace) -> None:
    from roll_async.inference.settings import EngineSettings
    from roll_async.inference.vllm.engine import VllmEngine
    from roll_async.schema import GenerateRequest, SamplingParams
    from tools.bench.rollout_overhead import endless

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        model = endless(Path(args.model), Path(folder) / "model")
        settings = EngineSettings(
            model_folder=model,
            dtype="fp32",
            device="cpu",
            max_model_len=256,
            max_running=args.running,
            enable_prefix_caching=False,
        )
        engine = VllmEngine(settings)
        runner.run(engine.start())
        sampling, numbers = SamplingParams(max_new_tokens=NEW_TOKENS), count()

        async def one_round() -> None:
            requests = [
                GenerateRequest(request_id=str(next(numbers)), prompt_token_ids=prompt_of(i), sampling=sampling)
                for i in range(args.running)
            ]
            await asyncio.gather(*map(engine.generate, requests))

        work(lambda: runner.run(one_round()))
        runner.run(engine.close())


def prompt_of(i: int) -> array[int]:
    """Eight tokens."""
    return array("i", [3 + (i + k) % 10 for k in range(8)])


def trainer_side(args: argparse.Namespace) -> None:
    import torch

    from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings
    from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec

    torch.manual_seed(0)
    lengths = (20 + 140 * torch.linspace(0, 1, args.rows) ** 4).long()[torch.randperm(args.rows)]
    inside = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    tokens = torch.where(inside, torch.randint(3, 13, inside.shape), 0)
    mask = inside.clone()
    mask[:, 0] = False
    worker = MegatronWorker(
        RankSpec.alone(),
        MegatronSettings(
            model_folder=args.model,
            dtype="fp32",
            optimizer=OptimizerSettings(learning_rate=0.0),
            micro_batch_rows=16,
            micro_batching="fixed",
            max_tokens_per_microbatch=4096,
        ),
    )
    worker.start()
    work(lambda: worker.supervised_update(tokens, lengths, mask))


@contextmanager
def side(name: str, argv: list[str]) -> Iterator[subprocess.Popen]:
    """A process of that side, ready to work, with the environment that a run gives it."""
    from roll_async.cluster.placement import place, process_env

    placement = place(None, num_processes=1, num_gpus_per_node=8, num_threads=1)[0]
    env = {**os.environ, **process_env(placement, None), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, *argv, "--side", name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":
            if not line:
                sys.exit(f"the {name} ended with {process.wait()}; its error is above")
        yield process
    finally:
        process.kill()
        process.wait()


def say(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def measured(processes: list[subprocess.Popen], seconds: float) -> list[tuple[float, float]]:
    """Units a second and core-seconds a unit of each process, of the units that lie in the time that all worked."""
    say(processes)
    began = time.monotonic()
    time.sleep(seconds)
    ended = time.monotonic()
    say(processes)
    found = []
    for process in processes:
        assert process.stdout is not None
        units = [Unit(**record) for record in json.loads(process.stdout.readline())]
        found.append(rate_within(units, began, ended))
    return found


def rate_within(units: list[Unit], began_s: float, ended_s: float) -> tuple[float, float]:
    """Units a second and core-seconds a unit, of those that lie wholly in the window."""
    whole = [u for u in units if u.began_s >= began_s and u.ended_s <= ended_s]
    if not whole:
        sys.exit(f"no unit of work fits into --seconds {ended_s - began_s:.3g}; give more")
    spent_s = sum(u.ended_s - u.began_s for u in whole)
    return len(whole) / spent_s, sum(u.core_s for u in whole) / len(whole)


def own_arguments(args: argparse.Namespace, scratch: Path) -> list[str]:
    """Of both processes, with the folder of their model."""
    model = args.model
    if model == "async_vs_sync":
        from tools.bench.async_vs_sync import make_model

        model = str(scratch / "model")
        make_model(ROOT / "output/demo_assets", Path(model))
    return ["--model", model, "--running", str(args.running), "--rows", str(args.rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="output/demo_assets_heavy_deep/model", help="a folder, or async_vs_sync")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement")
    parser.add_argument("--running", type=int, default=128, help="requests decoded together")
    parser.add_argument("--rows", type=int, default=128, help="of an optimizer step")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        (engine_side if args.side == "engine" else trainer_side)(args)
        return
    from tools.machine import busy_core, machine_line

    print(machine_line(args), flush=True)
    shares: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    alone_s: dict[str, list[float]] = {name: [] for name in SIDES}
    with (
        tempfile.TemporaryDirectory() as scratch,
        side("engine", argv := own_arguments(args, Path(scratch))) as engine,
        side("trainer", argv) as trainer,
    ):
        for _ in range(args.rounds):
            alone = [*measured([engine], args.seconds), *measured([trainer], args.seconds)]
            both = measured([engine, trainer], args.seconds)
            for name, (rate, core_s), (rate_both, core_s_both) in zip(SIDES, alone, both, strict=True):
                shares[name].append((rate_both / rate, core_s / core_s_both))
                alone_s[name].append(1 / rate)
    beside = {name: [round(rate, 3) for rate, _ in found] for name, found in shares.items()}
    line = {
        "name": "neighbours",
        "value": round(min(statistics.median(found) for found in beside.values()), 3),
        "unit": "x",
        **{f"{name}_beside": round(statistics.median(found), 3) for name, found in beside.items()},
        **{f"{name}_core_s": round(statistics.median(c for _, c in found), 3) for name, found in shares.items()},
        **{f"{name}_alone_s": round(statistics.median(found), 3) for name, found in alone_s.items()},
        **{f"{name}_rounds": found for name, found in beside.items()},
        "busy_core": busy_core(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
