"""What early stop is worth: step time, busy engines and tokens given up, with it and without, at ratio 0 and 1.

    python tools/bench/early_stop.py [--config configs/async_dapo_7b.yaml] [--steps 30] [KEY=VALUE ...]
    python tools/bench/early_stop.py --real [--steps 12] [KEY=VALUE ...]       # runs on this machine; make demo-assets

With: `gen_batch_size` groups are generated for a batch, the first to finish are kept, and what no step could train in
time is aborted (`max_versions` is the ratio). Without: as many groups as a batch has, a filtered one is replaced, the
batch waits for its last group. Ahead: over-sampled with the shipped `max_versions`, which keeps surplus groups for the
next step and aborts none. The simulated rows are on the virtual clock and do not depend on the machine. One JSON line a
row; `aborted_share` is of all generated tokens, in real runs of those trained or aborted; `speedup` is against the row
without the mechanism of the same ratio.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from roll_async.config.api import load  # noqa: E402
from roll_async.config.schema import RLVRConfig  # noqa: E402
from roll_async.simulator.figures import figures_of  # noqa: E402
from roll_async.simulator.from_config import Speeds, scenario_of, split_of  # noqa: E402
from roll_async.simulator.world import simulate  # noqa: E402
from tools.machine import machine_line  # noqa: E402

FLAT_SHARE = 0.4
"""Groups without spread in the simulated worlds, mechanism or not."""
TRAIN_TOKENS_PER_S = 80_000.0
"""Of all training devices there: generation is the longer side."""
SMALLER = ("rollout_batch_size=32", "algorithm.filter_groups.gen_batch_size=64")
"""Of the shipped batch, for the simulated worlds; overrides may say otherwise."""


def rows(path: Path, overrides: tuple[str, ...]) -> Iterator[tuple[str, int, RLVRConfig]]:
    """(mechanism, ratio, config)."""
    groups = load(str(path), overrides, "rlvr").groups_per_batch
    versions = "async_training.staleness.max_versions"
    for ratio in (0, 1):
        told = (*overrides, f"async_generation_ratio={ratio}")
        variants = {
            "without": (*told, f"algorithm.filter_groups.gen_batch_size={groups}", f"{versions}={ratio}"),
            "with": (*told, f"{versions}={ratio}"),
        }
        if ratio:
            variants["ahead"] = told
        for name, keys in variants.items():
            config = load(str(path), keys, "rlvr")
            assert isinstance(config, RLVRConfig)
            yield name, ratio, config


def simulated(config: RLVRConfig, steps: int) -> dict[str, float]:
    speeds = Speeds(
        mean_length=config.response_length / 4, filtered_share=FLAT_SHARE, train_tokens_per_s=TRAIN_TOKENS_PER_S
    )
    outcome = simulate(scenario_of(config, speeds, split=split_of(config), steps=steps, seed=config.seed), check=False)
    if outcome.findings:
        raise SystemExit(f"the simulation broke an invariant: {outcome.findings[0]}")
    figures, servers = figures_of(outcome), outcome.servers
    assert servers is not None
    return {
        "step_s": figures.step_s,
        "engines_busy": figures.engines_busy,
        "aborted_requests": servers.aborted,
        "aborted_share": servers.aborted_tokens / max(1, servers.generated_tokens),
        "staleness_max": figures.staleness_max,
        "length_bias": figures.length_bias,
    }


def real(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The first quarter warms up. Engines stay from run to run, and count on; so what the first step shows is taken
    off.
    """
    window, first, last = metrics[len(metrics) // 4 :], metrics[0], metrics[-1]
    aborted = last["length_bias/aborted_tokens"] - first["length_bias/aborted_tokens"]
    trained = sum(m["correction/num_tokens"] for m in metrics[1:])
    return {
        "step_s": statistics.fmean(m["time/step_s"] for m in window),
        "engines_busy": 1 - statistics.fmean(m["idle/engines"] for m in window),
        "aborted_requests": last["length_bias/aborted_requests"] - first["length_bias/aborted_requests"],
        "aborted_share": aborted / (aborted + trained),
        "staleness_max": max(m["staleness/max"] for m in metrics),
    }


def measured(args: argparse.Namespace) -> Iterator[tuple[str, int, dict[str, float]]]:
    if not args.real:
        logging.getLogger("roll_async").setLevel(logging.ERROR)  # that a trainer waits is what is measured
        for name, ratio, config in rows(args.config, (*SMALLER, *args.overrides)):
            yield name, ratio, simulated(config, args.steps)
        return
    from roll_async.cluster.runtime import ray_runtime
    from tools.sweep import Sweep

    always = ("eval_steps=0", "save_steps=0", "ledger.enable=false", "output_dir=output/early_stop")
    always = (*always, f"max_steps={args.steps}")
    configs = list(rows(args.config, (*always, *args.overrides)))
    with (
        ray_runtime(num_processes=4, env={"HF_HUB_OFFLINE": "1"}) as runtime,
        Sweep(configs[0][2], runtime) as sweep,
    ):
        for name, ratio, config in configs:
            yield name, ratio, real(sweep.run(config))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    args.config = args.config or ROOT / "configs" / ("async_dapo_cpu.yaml" if args.real else "async_dapo_7b.yaml")
    args.steps = args.steps or (12 if args.real else 30)
    print(machine_line(args), flush=True)
    base = 0.0
    for name, ratio, found in measured(args):
        base = found["step_s"] if name == "without" else base
        line = {"name": f"early_stop_r{ratio}_{name}", "value": found.pop("step_s"), "unit": "s per step"}
        line = {**line, "speedup": base / line["value"], **found}
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
