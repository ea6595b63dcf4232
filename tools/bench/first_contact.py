"""From an empty environment to the first answers, the first validation and the curve: this project's demo, and TRL's
quick start of GRPO on the same model and rows.

    python tools/bench/first_contact.py [--sides ours trl] [--steps 20] [--folder FOLDER]

Ours: `git clone`, `make setup`, `roll-async demo`. TRL: a virtual environment, `pip install trl`, a script of 20 lines
with `log_completions`, evaluation and its table of completions; its model and rows are those that our demo makes, whose
making counts for our side alone. Seconds from the first command, and how many commands. No budget: it is a report.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TRL_SCRIPT = """
import json, sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

model, assets, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
def rows(name):
    read = [json.loads(line) for line in open(f"{assets}/{name}.jsonl")]
    return Dataset.from_list([{"prompt": r["messages"][0]["content"], "answer": r["ground_truth"]} for r in read])

def reward(completions, answer, **_):
    return [float(c.rpartition("=")[2].strip() == a) for c, a in zip(completions, answer)]

config = GRPOConfig(
    output_dir="trl", per_device_train_batch_size=256, num_generations=8, max_completion_length=96, learning_rate=3e-4,
    max_steps=steps, beta=0.0, use_cpu=True, bf16=False, logging_steps=1, log_completions=True,
    num_completions_to_print=2, eval_strategy="steps", eval_steps=steps // 2, per_device_eval_batch_size=256,
    report_to="none", save_strategy="no",
)
trainer = GRPOTrainer(
    model=model, reward_funcs=reward, args=config, train_dataset=rows("train"), eval_dataset=rows("validation")
)
trainer.train()
print("CURVE", [h["reward"] for h in trainer.state.log_history if "reward" in h])
"""

OURS = {"answers": "| worst", "validation": "validation of step", "curve": "picture "}
TRL = {"answers": "Completion", "validation": "eval_loss", "curve": "CURVE"}
"""What a line of the output holds when the user sees it for the first time."""


class Clock:
    """Seconds since the first command, by what was seen first."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.seen: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.seen.setdefault(name, round(time.monotonic() - self._started, 1))

    def run(self, *command: str, cwd: Path, marks: Mapping[str, str] | None = None) -> None:
        """Ends the bench with the last lines of a command that fails."""
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
        last: list[str] = []
        with subprocess.Popen(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last = [*last[-20:], line]
                for name, text in (marks or {}).items():
                    if text in line:
                        self.mark(name)
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(last)}")


def ours(folder: Path, steps: int) -> dict[str, float]:
    """`make setup` in a clone, and the demo."""
    clock, clone = Clock(), folder / "ours"
    clock.run("git", "clone", "-q", str(ROOT), str(clone), cwd=folder)
    clock.run("make", "setup", cwd=clone)
    clock.mark("installed")
    clock.run(str(clone / ".venv/bin/roll-async"), "demo", "--assets-only", cwd=clone)
    clock.mark("model and rows")
    command = (str(clone / ".venv/bin/roll-async"), "demo", f"max_steps={steps}", f"eval_steps={steps // 2}")
    clock.run(*command, cwd=clone, marks=OURS)
    return clock.seen


def trl(folder: Path, steps: int, assets: Path) -> dict[str, float]:
    """An environment of its own, and the script."""
    clock, venv = Clock(), folder / "trl"
    clock.run(sys.executable, "-m", "venv", str(venv), cwd=folder)
    clock.run(str(venv / "bin/pip"), "install", "-q", "torch==2.13.0", cwd=folder)
    clock.run(str(venv / "bin/pip"), "install", "-q", "trl==1.16.0", "rich", "transformers<5.20", cwd=folder)
    clock.mark("installed")
    (folder / "quick_start.py").write_text(TRL_SCRIPT)
    words = (str(assets / "model"), str(assets), str(steps))
    clock.run(str(venv / "bin/python"), "quick_start.py", *words, cwd=folder, marks=TRL)
    return clock.seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=["ours", "trl"], default=["ours", "trl"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="a temporary one without it; an environment takes 3 GB")
    parser.add_argument("--assets", type=Path, default=ROOT / "output/demo_assets", help="model and rows of TRL's side")
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for side in args.sides:
            place = Path(folder)
            seen = ours(place, args.steps) if side == "ours" else trl(place, args.steps, args.assets.resolve())
            line = {"name": f"first_contact/{side}", "value": seen.get("answers"), "unit": "s to the first answers"}
            print(json.dumps({**line, **seen, "commands": 3, "ok": True}), flush=True)


if __name__ == "__main__":
    main()
