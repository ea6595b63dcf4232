"""How fast finished groups become durable: groups of 16 samples of 4,096 tokens, with each fsync setting.

    python tools/bench/ledger.py [--groups 64] [--groups-per-step 16] [--step-s 10] [--folder DIR]

Each case writes the groups, records a step after every `--groups-per-step` of them, and prunes it, as a run does. The
budget is the share of a training step of `--step-s` seconds in which the driver's event loop stands still. A plain
write of the same bytes with the same number of fsync calls stands beside it, because the disk decides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from roll_async.buffer.freshness import group_bytes
from roll_async.buffer.ledger import SqliteLedger
from roll_async.schema import FinishReason, Group, Prompt, Reward, Sample

SAMPLES, TOKENS, PROMPT_TOKENS, BUDGET = 16, 4096, 512, 0.02


def make_group(group_id: int) -> Group:
    prompt = Prompt(row_id=str(group_id), token_ids=array("i", range(PROMPT_TOKENS)), domain="math", ground_truth="42")
    samples = tuple(
        Sample(
            sample_id=f"{group_id}.0/{i}",
            prompt_token_ids=prompt.token_ids,
            response_token_ids=array("i", range(TOKENS)),
            loss_mask=b"\x01" * TOKENS,
            behaviour_logprobs=array("f", [-0.5 - i] * TOKENS),
            version_runs=((0, TOKENS),),
            finish_reason=FinishReason.STOP,
            generation_s=1.0,
            reward=Reward(score=float(i % 2)),
        )
        for i in range(SAMPLES)
    )
    return Group(group_id=group_id, prompt=prompt, samples=samples, admitted_version=0, admitted_s=0.0, finished_s=1.0)


async def through_ledger(path: Path, fsync: str, groups: list[Group], per_step: int) -> tuple[float, float, float]:
    """(seconds, seconds in which the event loop stood still, seconds until the slowest group was durable)."""
    ledger = SqliteLedger(path, fsync=fsync)
    held = slowest = 0.0
    durable: list[asyncio.Task[None]] = []

    def told(began: float) -> None:
        nonlocal slowest
        slowest = max(slowest, time.perf_counter() - began)

    start = time.perf_counter()
    for index, group in enumerate(groups):
        before = time.perf_counter()
        ledger.finished(group, index, 0)
        held += time.perf_counter() - before
        durable.append(asyncio.create_task(ledger.durable()))
        durable[-1].add_done_callback(lambda _, began=before: told(began))
        await asyncio.sleep(0)
        if (index + 1) % per_step == 0:
            await asyncio.gather(*durable)
            durable.clear()
            step, before = (index + 1) // per_step, time.perf_counter()
            ledger.trained(step, range(index + 1 - per_step, index + 1))
            ledger.prune(step)
            held += time.perf_counter() - before
    await asyncio.gather(*durable)
    seconds = time.perf_counter() - start
    ledger.close()
    return seconds, held, slowest


def plainly(path: Path, fsync: str, groups: list[Group], per_step: int) -> float:
    """Seconds to append the same bytes to a file."""
    blocks = [os.urandom(group_bytes(g)) for g in groups[:1]] * len(groups)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for index, block in enumerate(blocks):
            file.write(block)
            if fsync == "group" or (fsync == "step" and (index + 1) % per_step == 0):
                os.fsync(file.fileno())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--groups-per-step", type=int, default=16)
    parser.add_argument("--step-s", type=float, default=10.0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    groups = [make_group(i) for i in range(args.groups)]
    mib = sum(map(group_bytes, groups)) / 2**20
    for fsync in ("group", "step", "never"):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            path = Path(folder) / "ledger.sqlite"
            seconds, held, slowest = asyncio.run(through_ledger(path, fsync, groups, args.groups_per_step))
            plain = plainly(Path(folder) / "plain", fsync, groups, args.groups_per_step)
        share = held / args.groups * args.groups_per_step / args.step_s
        line = {
            "name": f"ledger_fsync_{fsync}",
            "value": round(args.groups / seconds, 1),
            "unit": "groups/s",
            "ratio": round(share, 4),
            "budget": BUDGET,
            "upper": True,
            "ok": share <= BUDGET,
            "mib_s": round(mib / seconds, 1),
            "plain_mib_s": round(mib / plain, 1),
            "slowest_group_ms": round(1000 * slowest, 1),
            "group_mib": round(mib / args.groups, 3),
            "step_s": args.step_s,
            "groups_per_step": args.groups_per_step,
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
