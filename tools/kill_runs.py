"""Kills the processes of a training run with SIGKILL at random instants, and checks what was trained.

    python tools/kill_runs.py --kills 20 [--seed 0] [--output FOLDER] [KEY=VALUE ...]
    python tools/kill_runs.py --kills 20 --rollback
    python tools/kill_runs.py --kills 6 --damage-ledger
    python tools/kill_runs.py --heal

The victims take turns: the driver; the rollout process, which holds queue and ledger; the trainer rank; the engine; the
reward host. After the second and third the run must end by itself and say so; of the last two it must start another one
and go on by itself. Otherwise it is started again in the same folder. Relative to the restored step every prompt is
trained exactly once: at the end every step has exactly G prompts, no prompt belongs to two steps, and none below the
newest trained one is missing without being on its way. With --damage-ledger only the driver is killed, and bytes in the
middle of the ledger are overwritten before each start: the checkpoint's position has to suffice. With --rollback every
third start goes back to the older of two checkpoints: what came later is set aside, and all that the run still has,
checkpoints, metrics, dumps and what trackers wrote, is of one lineage. With --heal a trainer
rank and the rollout process of one run are killed, which must go on by itself (fault.max_run_restarts=2). Checked in
three independent places: the ledger (unless it was damaged), the dumped samples, metrics.jsonl. Exit code 0 = all hold.
Needs `make demo-assets`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO

import psutil
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[1]
GROUPS, SAVE_EVERY, RATIO = 8, 2, 1
EXIT_ROLE_FAILED = 3
DRIVER, ROLLOUT, RANK, ENGINE, REWARDS = "driver", "rollout process", "trainer rank", "engine", "reward host"
ACTORS = {ROLLOUT: "RolloutHost", RANK: "MegatronRank", ENGINE: "EngineReplica", REWARDS: "RewardHost"}
"""Victims that are Ray actors, and their classes."""
GOES_ON = (ENGINE, REWARDS)
"""The run replaces them itself."""
STEPS_AFTERWARDS = 3
"""A run that goes on shows it by so many: the batch ahead was generated before."""
OVERRIDES = (
    f"rollout_batch_size={GROUPS}",
    f"async_generation_ratio={RATIO}",
    f"save_steps={SAVE_EVERY}",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.per_device_train_batch_size=32",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "actor_infer.strategy_args={strategy_name: hf_infer}",
    "eval_steps=0",
    "checkpoint.resume_from=latest",
    "checkpoint.max_to_keep=2",
    "exp_name=killed",
)


class KilledRun:
    """One run that is started again and again in the same folder."""

    def __init__(self, output: Path, overrides: list[str]) -> None:
        self.folder, self.samples = output / "killed", output / "samples"
        dump = f"tracking.rollout_dump_dir={self.samples}"
        self._overrides = [*OVERRIDES, f"output_dir={output}", dump, *overrides]
        self._resume: list[str] = []

    def go_back(self) -> str:
        """The next start resumes from the older checkpoint; which."""
        older, *newer = sorted((self.folder / "checkpoints").glob("step_*[0-9]"))
        self._resume = [f"checkpoint.resume_from={older}"] if newer else []
        return f"next from {older.name}" if newer else "no older checkpoint"

    def start(self, max_steps: int) -> subprocess.Popen[str]:
        script = str(ROOT / "examples" / "fully_async_main.py")
        command = [sys.executable, script, "--config", "rlvr_config_async_cpu.yaml", *self._overrides, *self._resume]
        self._resume = []
        env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        return subprocess.Popen(
            [*command, f"max_steps={max_steps}"],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run_and_kill(self, max_steps: int, dice: random.Random, victim: str) -> str:
        """Kill at a random instant: one driver of five while it starts, else within some steps after the first."""
        process = self.start(max_steps)
        assert process.stdout is not None
        output = ""
        if victim == DRIVER and dice.random() < 0.2:
            delay_s, where = dice.uniform(0, 15), "after the start"
        else:
            output = _read_steps(process.stdout, 1)
            delay_s, where = dice.uniform(0, 4), "after its first step"
        try:
            process.wait(delay_s)
        except subprocess.TimeoutExpired:
            os.kill(process.pid if victim == DRIVER else _actor(process.pid, victim), signal.SIGKILL)
        expected = -signal.SIGKILL if victim == DRIVER else EXIT_ROLE_FAILED
        if victim in GOES_ON:
            output += _read_steps(process.stdout, STEPS_AFTERWARDS)
            expected = -signal.SIGKILL
            process.kill()
        output += process.communicate()[0]
        if process.returncode != expected or (victim == ROLLOUT and "rollout process: process is gone" not in output):
            raise AssertionError(
                f"{victim} killed: the run ended with {process.returncode}, not with {expected}:\n{output[-2000:]}"
            )
        return f"{victim} {delay_s:.2f} s {where}, {self.last_step()} steps in the metrics"

    def damage_ledger(self, dice: random.Random) -> str:
        """Overwrite 64 bytes of every page of the file; where it is."""
        file = self.folder / "ledger.sqlite"
        size = file.stat().st_size
        with open(file, "r+b") as ledger:
            for page in range(0, size, 4096):
                ledger.seek(min(size - 64, page + dice.randrange(4000)))
                ledger.write(dice.randbytes(64))
        return f"{file.name}, {size} bytes, damaged"

    @property
    def has_checkpoint(self) -> bool:
        """Without one there is no position to go on from."""
        return any((self.folder / "checkpoints").glob("step_*"))

    def heal(self, max_steps: int) -> str:
        """One start with fault.max_run_restarts=2: a trainer rank is killed, then the rollout process; what it printed.
        The run must end by itself with exit code 0.
        """
        self._overrides.append("fault.max_run_restarts=2")
        process, lines, victims = self.start(max_steps), [], [RANK, ROLLOUT]
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            seen = sum(text.startswith("starting all roles again") for text in lines)
            if victims and line.startswith("step ") and len(victims) == 2 - seen:
                os.kill(_actor(process.pid, victims.pop(0)), signal.SIGKILL)
        output = "".join(lines)
        if process.wait() != 0 or victims:
            raise AssertionError(
                f"the run ended with {process.returncode}, {len(victims)} kills left:\n{output[-3000:]}"
            )
        return output

    def finish(self, max_steps: int) -> None:
        process = self.start(max_steps)
        output, _ = process.communicate()
        if process.returncode != 0:
            raise AssertionError(f"the last run ended with {process.returncode}:\n{output[-2000:]}")

    def last_step(self) -> int:
        return max((m["step"] for m in self._metrics()), default=0)

    def check(self, max_steps: int, *, ledger: bool = True) -> list[str]:
        """What does not hold. `ledger`: it has seen the whole run."""
        problems = self._check_ledger(max_steps) if ledger else []
        return [
            *problems, *self._check_samples(max_steps), *self._check_metrics(max_steps), *self._check_lineage(max_steps)
        ]  # fmt: skip

    def _check_lineage(self, max_steps: int) -> list[str]:
        """All that the run has is of one run id, and no step is there twice."""
        run_id = json.loads((self.folder / "run.json").read_text())["run_id"]
        foreign = {m["run_id"] for m in self._metrics()} - {run_id}
        problems = [f"metrics: lines of runs {foreign}"] if foreign else []
        for folder in (self.folder / "checkpoints").glob("step_*"):
            whose, step = json.loads((folder / "manifest.json").read_text())["run_id"], int(folder.name[5:])
            if whose != run_id or step > max_steps:
                problems.append(f"checkpoints: {folder.name} is of run {whose}")
        dumped = [int(file.stem[5:]) for file in self.samples.glob("step_*.jsonl")]
        if sorted(dumped) != list(range(1, max_steps + 1)):
            problems.append(f"samples: steps {sorted(dumped)}")
        tracked = EventAccumulator(str(self.folder / "tensorboard"), purge_orphaned_data=False).Reload()
        steps = [event.step for event in tracked.Scalars("reward/mean")]
        return problems if steps == list(range(1, max_steps + 1)) else [*problems, f"tensorboard: steps {steps}"]

    def _check_ledger(self, max_steps: int) -> list[str]:
        with sqlite3.connect(self.folder / "ledger.sqlite") as ledger:
            rows = ledger.execute("SELECT prompt_index, state, consumed_step FROM groups").fetchall()
        trained = {index: step for index, state, step in rows if state == "trained"}
        others = {index: state for index, state, _ in rows if state != "trained"}
        problems = []
        per_step = Counter(trained.values())
        if per_step != Counter(dict.fromkeys(range(1, max_steps + 1), GROUPS)):
            problems.append(f"ledger: groups per step {dict(sorted(per_step.items()))}")
        if any(state in ("filtered", "failed") for state in others.values()):
            problems.append(f"ledger: {Counter(others.values())}")
        newest = max(trained, default=-1)
        missing = [i for i in range(newest) if i not in trained]
        if len(missing) > (1 + RATIO) * GROUPS:
            problems.append(f"ledger: {len(missing)} prompts below {newest} were never trained: {missing[:10]}")
        return problems

    def _check_samples(self, max_steps: int) -> list[str]:
        step_of: dict[str, int] = {}
        problems = []
        for step in range(1, max_steps + 1):
            file = self.samples / f"step_{step:08d}.jsonl"
            rows = {json.loads(line)["row_id"] for line in file.read_text().splitlines()}
            if len(rows) != GROUPS:
                problems.append(f"samples: step {step} trained {len(rows)} prompts")
            problems += [f"samples: {r} is in steps {step_of[r]} and {step}" for r in rows if r in step_of]
            step_of |= dict.fromkeys(rows, step)
        return problems

    def _check_metrics(self, max_steps: int) -> list[str]:
        steps = [m["step"] for m in self._metrics()]
        expected = list(range(1, max_steps + 1))
        stale = max(m["staleness/max"] for m in self._metrics())
        problems = [] if steps == expected else [f"metrics: steps {steps}"]
        return problems if stale <= RATIO else [*problems, f"metrics: staleness {stale} over the bound {RATIO}"]

    def _metrics(self) -> list[dict[str, float]]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        # The last line may be torn: the run was killed while it was written.
        return [json.loads(line) for line in lines if line.endswith("}")]


def _read_steps(lines: IO[str], steps: int) -> str:
    """The console up to the line of the `steps`-th step from here, or to its end."""
    told = []
    for line in lines:
        told.append(line)
        steps -= line.startswith("step ")
        if not steps:
            break
    return "".join(told)


def _actor(driver: int, victim: str) -> int:
    """Pid of the first Ray actor of this kind that the driver started."""
    family = psutil.Process(driver).children(recursive=True)
    found, *_ = [p.pid for p in family if p.cmdline() and p.cmdline()[0].startswith(f"ray::{ACTORS[victim]}")]
    return found


def heal_and_check(output: Path, overrides: list[str], *, seed: int | None = None) -> list[str]:
    """A trainer rank and the rollout process of one run are killed; the problems found in what it trained. `seed`: the
    driver of an earlier start in the same folder was killed at a random instant.
    """
    run = KilledRun(output, overrides)
    if seed is not None:
        print(run.run_and_kill(100, random.Random(seed), DRIVER), flush=True)
    max_steps = run.last_step() + 6
    told = run.heal(max_steps)
    problems = run.check(max_steps)
    restarts = [m["run/restarts"] for m in run._metrics()]
    if restarts != sorted(restarts) or restarts[-1] != 2:
        problems.append(f"metrics: run/restarts {restarts}")
    if told.count("fault.max_run_restarts: ") != 2:
        problems.append("the console did not name both restarts")
    print(f"healed twice, {max_steps} steps: {problems or 'every prompt exactly once'}", flush=True)
    return problems


def kill_and_check(
    output: Path, kills: int, seed: int, overrides: list[str], *, damage: bool = False, rollback: bool = False
) -> list[str]:
    """Kill `kills` times, finish, check; the problems found."""
    dice, run, damaged = random.Random(seed), KilledRun(output, overrides), 0
    victims = [DRIVER] if damage else [DRIVER, *ACTORS]
    for number in range(kills):
        started, victim = time.monotonic(), victims[number % len(victims)]
        told = run.run_and_kill(run.last_step() + 100, dice, victim)
        if damage and run.has_checkpoint:
            told, damaged = f"{told}; {run.damage_ledger(dice)}", damaged + 1
        if rollback and number % 3 == 2:
            told = f"{told}; {run.go_back()}"
        print(f"kill {number + 1}/{kills}: {told} ({time.monotonic() - started:.0f} s)", flush=True)
    max_steps = run.last_step() + 2
    run.finish(max_steps)
    problems = run.check(max_steps, ledger=not damaged)
    if damage and not damaged:
        problems.append("no checkpoint was written before a kill: the ledger was never damaged")
    print(f"{max_steps} steps, {max_steps * GROUPS} groups: {problems or 'every prompt exactly once'}", flush=True)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--heal", action="store_true", help="one run with fault.max_run_restarts=2 instead")
    parser.add_argument("--damage-ledger", action="store_true", help="kill the driver only, and damage the ledger")
    parser.add_argument("--rollback", action="store_true", help="every third start goes back to an older checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    args = parser.parse_args()
    output = args.output or Path(tempfile.mkdtemp(prefix="kill_runs_"))
    if args.heal:
        return 1 if heal_and_check(output, args.overrides) else 0
    how = {"damage": args.damage_ledger, "rollback": args.rollback}
    return 1 if kill_and_check(output, args.kills, args.seed, args.overrides, **how) else 0


if __name__ == "__main__":
    sys.exit(main())
