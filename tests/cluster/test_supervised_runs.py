"""`roll-async sft` and `dpo` as a user types them."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("ray")
pytest.importorskip("megatron.core")

from roll_async.commands.demo.addition import problems
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("rows"), random.Random(1)
    with (folder / "sft.jsonl").open("w") as chats, (folder / "pairs.jsonl").open("w") as pairs:
        for problem in problems(40, seed=11):
            right, wrong = problem.solution(rng, 0, 0), problem.solution(rng, 1, 1)
            chat = [{"role": "user", "content": problem.prompt}, {"role": "assistant", "content": right}]
            chats.write(json.dumps({"messages": chat}) + "\n")
            if wrong != right:
                pairs.write(json.dumps({"prompt": problem.prompt, "chosen": right, "rejected": wrong}) + "\n")
    return folder


@pytest.fixture
def command(demo_assets, rows, tmp_path):
    def words(kind, *overrides, name="run", file=None):
        file = file or rows / ("sft.jsonl" if kind == "sft" else "pairs.jsonl")
        return [
            sys.executable, "-m", "roll_async.cli", kind, f"{kind}_demo_cpu", f"pretrain={demo_assets / 'model'}",
            f"actor_train.data_args.file_name={file}", f"validation.data_args.file_name={file}", "eval_steps=0",
            f"output_dir={tmp_path}", f"exp_name={name}", "train_batch_size=8", "max_steps=4", *overrides,
        ]  # fmt: skip

    return words


ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(words):
    return subprocess.run(words, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=patient(400))


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return {record["step"]: record["trainer/loss"] for record in metrics(folder)}


@pytest.mark.slow
def test_a_run_that_is_interrupted_and_resumed_takes_the_steps_of_a_whole_one(command, tmp_path):
    from transformers import AutoModelForCausalLM

    whole = run(command("sft", name="whole"))
    assert whole.returncode == 0, whole.stderr
    assert "4 steps of 8 rows" in whole.stdout and "loss, first / last step" in whole.stdout
    process = subprocess.Popen(
        command("sft", "max_steps=400"), cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=patient(300))
    assert process.returncode == 130, errors
    assert "continue with: " in errors and "checkpoint.resume_from=latest" in errors
    done = max(losses(tmp_path / "run"))
    resumed = run(command("sft", f"max_steps={done + 2}", "checkpoint.resume_from=latest"))
    assert resumed.returncode == 0, resumed.stderr
    found = losses(tmp_path / "run")
    assert list(found) == list(range(1, done + 3))
    # max_steps sets the end of the schedule, whose first two steps differ little; the rows of each step are the same.
    assert found[1] == losses(tmp_path / "whole")[1]
    assert metrics(tmp_path / "run")[-1]["data/epoch"] == pytest.approx((done + 2) * 8 / 40)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf").num_parameters() > 0


@pytest.mark.slow
def test_pairs_with_adapters_on_two_ranks_widen_their_margin(command, tmp_path):
    done = run(
        command(
            "dpo",
            "eval_steps=4",
            "actor_train.world_size=2",
            "actor_train.model_args.lora_rank=4",
            "actor_train.training_args.learning_rate=5e-3",
        )
    )
    assert done.returncode == 0, done.stderr
    first, *later = metrics(tmp_path / "run")
    assert first["trainer/loss"] == pytest.approx(0.6931, abs=1e-3) and abs(first["rewards/margins"]) < 1e-5
    # Each batch has eight other pairs, of which a model warmed up on another CPU may find some hard: their mean counts.
    assert fmean(record["trainer/loss"] for record in later) < first["trainer/loss"]
    assert fmean(record["rewards/margins"] for record in later) > 0
    last = later[-1]
    assert last["validation/loss"] < 0.6931 and "validation/rewards/accuracies" in last
    assert (tmp_path / "run" / "hf_adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_a_rank_that_dies_is_started_again_and_every_row_is_trained_once(command, tmp_path):
    process = subprocess.Popen(
        command("sft", "max_steps=5", "save_steps=1", "fault.max_run_restarts=1"),
        cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step 2/"):
            os.kill(_rank_of(tmp_path), signal.SIGKILL)
            break
    _, errors = process.communicate(timeout=patient(400))
    assert process.returncode == 0, errors
    assert "starting all roles again from the newest checkpoint" in errors
    records = metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5] and records[-1]["run/restarts"] == 1
    assert [record["data/epoch"] for record in records] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def _rank_of(folder):
    """The process whose output is in the log of the rank of this run."""
    for status in Path("/proc").glob("[0-9]*"):
        try:
            out = os.readlink(status / "fd" / "1")
            name = (status / "cmdline").read_text()
        except OSError:
            continue
        if out.startswith(str(folder)) and "MegatronRank" in name:
            return int(status.name)
    raise AssertionError("no rank of the run")


def test_rows_without_an_answer_end_the_start_with_their_place(command, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"messages": [{"role": "user", "content": "1+1="}]}) + "\n")
    done = run(command("sft", file=bad))
    assert done.returncode == 2
    assert "bad.jsonl:1: messages: no turn of the assistant" in done.stderr
    assert (
        "Traceback" not in done.stderr
        and len([line for line in done.stderr.splitlines() if ": warning W06: " not in line]) == 1
    )


def test_engines_are_refused(command):
    done = run(command("sft", "actor_infer={}"))
    assert done.returncode == 2 and "actor_infer: is a key of rlvr and agentic configs" in done.stderr
