"""Tables of docs_roll/benchmarks.md from the simulator: modes against synchronous runs, and what overtaking is worth.

    python tools/bench/simulated_tables.py [--engines 16 128 1024] [--tails light heavy] [--modes 0 2 4] [--steps 60]
        [--markdown] [--overtaking [--seeds 8]]

The real loops run on the virtual clock, so the figures do not depend on the machine. `--overtaking`: the table of
max_versions against the ratio, the mean of `--seeds` runs of `--steps` steps with its standard error, beside what the
design says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from roll_async.simulator.figures import Figures, figures_of
from roll_async.simulator.scenario import Scenario
from roll_async.simulator.world import simulate
from tools.simulated_worlds import MODES, OVERTAKING, TAILS, overtaking_world, size_of, workload, world

SAMPLES_AT_MOST = 60_000
"""Of one cell: larger worlds are shown fewer steps."""
TOLERANCE = 0.05


def run(scenario: Scenario) -> Figures:
    outcome = simulate(scenario, check=False)
    if outcome.findings:
        raise SystemExit(f"the simulation broke an invariant: {outcome.findings[0]}")
    return figures_of(outcome)


def overtaking(steps: int, seed: int, seeds: int) -> None:
    for ratio, versions, expected in OVERTAKING:
        found = [run(overtaking_world(ratio, versions, steps=steps, seed=seed + i)) for i in range(seeds)]
        values = [f.step_s for f in found]
        mean = statistics.fmean(values)
        error = statistics.stdev(values) / seeds**0.5 if seeds > 1 else found[0].step_error_s
        off = mean / expected - 1
        line = {
            "name": f"overtaking_r{ratio:g}_m{versions}",
            "value": round(mean, 3),
            "standard_error": round(error, 3),
            "unit": "s per step",
            "ratio": round(abs(off), 3),
            "budget": TOLERANCE,
            "upper": True,
            "ok": abs(off) <= TOLERANCE,
            "design": expected,
            "lag_mean": round(statistics.fmean(f.lag_mean for f in found), 3),
            "lag_max": max(f.lag_max for f in found),
            "steps": steps,
            "seeds": seeds,
        }
        print(json.dumps(line), flush=True)


def modes(engines: int, tail: str, chosen: list[int], steps: int, seed: int) -> list[dict[str, object]]:
    rows, base, theory = [], 0.0, workload(engines, tail)
    for mode in (MODES[i] for i in sorted({0, *chosen})):  # the first is what the others are compared with
        size = size_of(engines, tail, in_turn=mode is MODES[0])
        count = max(14, min(steps, SAMPLES_AT_MOST // (8 * size.groups)))
        figures = run(world(mode, size, steps=count, seed=seed))
        base = base or figures.step_s
        line = {
            "name": f"simulated_{tail}_{engines}_{mode.name}",
            "value": round(figures.step_s, 3),
            "unit": "s per step",
            "speedup": round(base / figures.step_s, 2),
            "theory_at_ratio": round(theory.speedup_at(mode.ratio), 2),
            "theory_bound": round(theory.speedup_bound, 2),
            "staleness_mean": round(figures.staleness_mean, 2),
            "staleness_max": figures.staleness_max,
            "engines_busy": round(figures.engines_busy, 2),
            "trainer_busy": round(figures.trainer_busy, 2),
            "steps": count,
        }
        print(json.dumps(line), flush=True, file=sys.stderr)
        rows.append({**line, "mode": mode.name, "tail": tail, "engines": engines})
    return rows


def markdown(rows: list[dict[str, object]]) -> None:
    for tail, engines in dict.fromkeys((r["tail"], r["engines"]) for r in rows):
        found = [r for r in rows if (r["tail"], r["engines"]) == (tail, engines)]
        print(f"\n{engines} engines, {tail} tail; theory, any ratio: {found[0]['theory_bound']}\n")
        print("| mode | step, s | speed-up | theory at its ratio | staleness mean, max | engines, trainer busy |")
        print("|---|---|---|---|---|---|")
        for r in found:
            print(
                f"| {r['mode']} | {r['value']} | {r['speedup']} | {r['theory_at_ratio']} | "
                f"{r['staleness_mean']}, {r['staleness_max']:.0f} | {r['engines_busy']:.0%}, {r['trainer_busy']:.0%} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[16])
    parser.add_argument("--tails", nargs="+", choices=sorted(TAILS), default=list(TAILS))
    parser.add_argument("--modes", type=int, nargs="+", choices=range(len(MODES)), default=list(range(len(MODES))))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--overtaking", action="store_true")
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    if args.overtaking:
        overtaking(args.steps, args.seed, args.seeds)
        return
    rows = [
        row for n in args.engines for tail in args.tails for row in modes(n, tail, args.modes, args.steps, args.seed)
    ]
    if args.markdown:
        markdown(rows)
    else:
        for row in rows:
            print(json.dumps(row))


if __name__ == "__main__":
    main()
