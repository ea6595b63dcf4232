"""Steps on given rows against TRL's SFTTrainer and DPOTrainer: losses, and tokens a core-second.

    python tools/interop/trl_given.py [sft] [dpo] --model output/demo_assets/model [--steps 20] [--batch 32] [--rows 32]

Both sides train the same model in float32 on the same rows in the same order with AdamW, a linear schedule and clipped
gradients; ours is `SupervisedLearner` on one Megatron rank in this process, packed. `--rows`: of TRL's micro-batches.
One JSON line a kind: the largest difference of a loss, `value` = tokens per core-second of ours / of TRL, without the
first two steps. TRL has a virtual environment of its own (`--venv`), which sees the packages of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

RATES, DECAY, BETA, WARM = {"sft": 1e-3, "dpo": 1e-4}, 0.01, 0.2, 2
TRL = """
import json, sys, time, torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
kind, model, rows, batch, size, steps, rate, decay, beta = sys.argv[1:]
torch.set_num_threads(1)
marks, losses = [], []
class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        marks.append(time.process_time())
    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs:
            losses.append(logs["loss"])
common = dict(output_dir="/tmp/unused", max_steps=int(steps), per_device_train_batch_size=int(size),
    gradient_accumulation_steps=int(batch) // int(size), learning_rate=float(rate), weight_decay=float(decay),
    lr_scheduler_type="linear", logging_steps=1, report_to=[], save_strategy="no", bf16=False, use_cpu=True,
    train_sampling_strategy="sequential", gradient_checkpointing=False, disable_tqdm=True, max_length=256)
tokenizer = AutoTokenizer.from_pretrained(model)
loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
data = Dataset.from_list([json.loads(line) for line in open(rows)])
if kind == "sft":
    trainer = SFTTrainer(loaded, SFTConfig(**common, completion_only_loss=True, loss_type="nll"), train_dataset=data,
        processing_class=tokenizer, callbacks=[Clock()])
else:
    trainer = DPOTrainer(loaded, args=DPOConfig(**common, beta=float(beta), precompute_ref_log_probs=True),
        train_dataset=data, processing_class=tokenizer, callbacks=[Clock()])
trainer.train()
print(json.dumps({"losses": losses, "marks": marks}))
"""


def trl_python(venv: Path) -> str:
    """The interpreter of TRL's environment, which is made once."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        (packages,) = venv.glob("lib/python3*/site-packages")
        (packages / "ours.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", "trl==1.16.0"], check=True)
    return str(python)


def write_rows(folder: Path, kind: str, count: int) -> Path:
    """Worked additions; of a pair the rejected one forgets its carries."""
    from tools.addition import problems

    rng, path = random.Random(1), folder / f"{kind}.jsonl"
    with path.open("w") as file:
        for problem in problems(count, seed=5):
            right, wrong = problem.solution(rng, 0, 0), problem.solution(rng, 0.6, 1)
            wrong = wrong if wrong != right else f"{right[:-1]}{(int(right[-1]) + 1) % 10}"
            answers = {"completion": right} if kind == "sft" else {"chosen": right, "rejected": wrong}
            file.write(json.dumps({"prompt": problem.prompt, **answers}) + "\n")
    return path


def train_ours(kind: str, rows: Path, args: argparse.Namespace) -> tuple[list[float], list[float], list[int]]:
    """(losses, core-seconds at the end of each step, tokens of each step)."""
    import torch

    from roll_async.config.api import load_with_warnings
    from roll_async.config.schema import SupervisedConfig
    from roll_async.launch.supervised import load_data
    from roll_async.trainer.megatron.settings import MegatronSettings
    from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec
    from roll_async.trainer.supervised import SupervisedLearner

    overrides = [
        f"pretrain={args.model}", f"max_steps={args.steps}", f"train_batch_size={args.batch}", "eval_steps=0",
        f"actor_train.data_args.file_name={rows}", "actor_train.data_args.template=base",
        "actor_train.max_tokens_per_microbatch=4096",
        f"actor_train.training_args={{learning_rate: {RATES[kind]}, weight_decay: {DECAY}, lr_scheduler_type: linear}}",
        *([f"beta={BETA}"] if kind == "dpo" else []),
    ]  # fmt: skip
    config = load_with_warnings(ROOT / "configs" / f"{kind}_demo_cpu.yaml", overrides).config
    assert isinstance(config, SupervisedConfig)
    worker = MegatronWorker(RankSpec.alone(), MegatronSettings.of(config, config.actor_train))
    worker.start()

    class Alone:
        """`TrainerGroup` of one rank in this process."""

        async def update_given(self, batch, step):
            return worker.update_given(worker.splitter.given(batch)[0], step)

        async def compute_logprobs(self, batch):
            (share,) = worker.splitter.scoring(batch)
            found = torch.zeros(batch.tokens.shape)
            answer = worker.compute_logprobs(share)
            found[share.numbers, : answer.shape[1]] = answer
            return found

    data = load_data(config)
    learner = SupervisedLearner(Alone(), config, data)  # type: ignore[arg-type]

    async def steps() -> tuple[list[float], list[float], list[int]]:
        await learner.prepare()
        losses, marks, tokens = [], [], []
        for step in range(1, args.steps + 1):
            report = await learner.learn(step)
            assert report is not None
            losses.append(report.metrics["trainer/loss"])
            marks.append(time.process_time())
            tokens.append(report.num_tokens)
        return losses, marks, tokens

    found = asyncio.run(steps())
    worker.stop()
    return found


def in_our_order(rows: Path, batch: int, steps: int) -> Path:
    """TRL takes the rows as they come: those of the first epoch, as our run of seed 42 does."""
    from roll_async.trainer.supervised import _order

    lines = rows.read_text().splitlines()
    assert len(lines) >= batch * steps, "one epoch is enough"
    ordered = rows.with_suffix(".ordered.jsonl")
    ordered.write_text("".join(lines[i] + "\n" for i in _order(42, 0, len(lines))))
    return ordered


def compare(kind: str, args: argparse.Namespace) -> dict[str, object]:
    """One kind: losses step by step, and the rates."""
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder), kind, args.batch * args.steps)
        words = [
            kind, args.model, in_our_order(rows, args.batch, args.steps), args.batch, args.rows, args.steps,
            RATES[kind], DECAY, BETA,
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [trl_python(Path(args.venv)), "-c", TRL, *map(str, words)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        theirs = json.loads(done.stdout.splitlines()[-1])
        losses, marks, tokens = train_ours(kind, rows, args)
    worked = sum(tokens[WARM:])
    ours_rate = worked / (marks[-1] - marks[WARM - 1])
    trl_rate = worked / (theirs["marks"][-1] - theirs["marks"][WARM - 1])
    difference = max(abs(a - b) for a, b in zip(losses, theirs["losses"], strict=True))
    return {
        "name": f"{kind} against TRL", "value": round(ours_rate / trl_rate, 3), "unit": "tokens/core-s, ours / TRL",
        "budget": 1.2, "ok": ours_rate / trl_rate >= 1.2 and difference <= 1e-4, "largest_loss_difference": difference,
        "first_loss": losses[0], "last_loss": losses[-1], "ours": round(ours_rate), "trl": round(trl_rate),
        "steps": args.steps,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["sft", "dpo"])
    parser.add_argument("--model", default="output/demo_assets/model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="rows or pairs of an optimizer step")
    parser.add_argument("--rows", type=int, default=32, help="rows or pairs of a micro-batch of TRL")
    parser.add_argument("--venv", default="output/interop/trl")
    args = parser.parse_args()
    for kind in args.kinds:
        print(json.dumps(compare(kind, args)), flush=True)


if __name__ == "__main__":
    main()
