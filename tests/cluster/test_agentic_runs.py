"""The agentic launcher, as a user runs it: worlds, gateway, engine, trainer and ledger on the one wiring."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

pytest.importorskip("vllm")
GREEDY = (
    "{tags: [FrozenLake, Small], num_env_groups: 6, num_groups_partition: [4, 2], generating_args: {temperature: 0}}"
)
OF_THE_TIME = {"validation/version", "validation/lag", "validation/seconds"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def agentic_assets(tmp_path_factory):
    """Tokenizer and a model that has hardly learned its moves."""
    folder = tmp_path_factory.mktemp("agentic") / "assets"
    script = (
        "import sys; sys.path.insert(0, 'tools'); import make_agentic_assets as m; "
        f"m.STEPS_WARM, m.LEAST_RIGHT_COPIES = 20, 0.0; sys.argv = ['x', '--output', {str(folder)!r}]; m.main()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, timeout=patient(300))
    return folder


def test_frozen_lake_trains_on_what_the_engine_sampled_within_the_staleness_bound(agentic_assets, tmp_path):
    command = [
        sys.executable, "examples/start_agentic_pipeline.py", "--config", "agentic_frozen_lake_async_cpu.yaml",
        f"pretrain={agentic_assets}/model", f"output_dir={tmp_path}", "exp_name=run", "max_steps=3", "eval_steps=1",
        "rollout_batch_size=32", "train_env_manager.group_size=4", "train_env_manager.tags=[FrozenLake]",
        "custom_envs.FrozenLake.env_config={size: 4, words: short, format_penalty: -0.125}",
        "custom_envs.Small={env_type: frozen_lake, max_steps: 3, env_config: {size: 3, words: short}}",
        "val_batch_size=12", f"val_env_manager={GREEDY}", "actor_train.training_args.learning_rate=1e-12",
        "actor_train.training_args.per_device_train_batch_size=16",
        "actor_train.training_args.gradient_accumulation_steps=2", f"tracking.rollout_dump_dir={tmp_path}/dump",
    ]  # fmt: skip
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patient(240))
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(0 <= step["staleness/max"] <= 1 and step["groups/failed"] == 0 for step in steps)
    assert all(1 <= step["reward/metrics/turns"] <= 10 for step in steps)
    assert steps[0]["correction/lag_0/abs_log_rho"] < 1e-4, "trained log-probs are those of the engine, turn by turn"
    assert steps[-1]["weights/version"] == 3
    canary = {"weights/canary_difference", "weights/canary_difference_256"}
    assert not canary & steps[0].keys(), "the first batch gives its rows"
    assert all(step[key] < 1e-4 for step in steps[1:] for key in canary)
    measured = [
        {k: v for k, v in step.items() if k.startswith("validation/") and k not in OF_THE_TIME} for step in steps
    ]
    assert [step["validation/version"] for step in steps] == [1, 2, 3]
    counts = {f"validation/domains/{tag}/samples": n for tag, n in (("FrozenLake", 8), ("Small", 4))}
    assert measured[0]["validation/samples"] == 12 and counts.items() <= measured[0].items()
    assert 1 <= measured[0]["validation/domains/Small/metrics/turns"] <= 3
    # Weights that hardly move, the same seeds, no chance: a validation says what the one before said.
    assert measured[0] == measured[1] == measured[2]
    ledger = sqlite3.connect(tmp_path / "run" / "ledger.sqlite")
    (integrity,) = ledger.execute("pragma integrity_check").fetchone()
    ledger.close()
    assert integrity == "ok"
    assert list((tmp_path / "run" / "trajectories").iterdir()), "a user can look at what was played"
    _shares_are_of_the_step(steps)
    _rows_have_the_advantages_of_their_groups(tmp_path / "dump")
    _its_folder_is_measured_as_the_run_measured_it(tmp_path, measured[-1], env)


def _shares_are_of_the_step(steps):
    since = [0.0, *(step["agent/attempts"] for step in steps)]
    for name in ("outcomes/truncated_turns", "turns_mean"):
        parts = [s[f"agent/{name}"] * (n - m) for s, m, n in zip(steps, since, since[1:], strict=False)]
        assert steps[-1][f"agent/run/{name}"] == pytest.approx(sum(parts) / since[-1])


def _rows_have_the_advantages_of_their_groups(folder):
    """grpo: what a trajectory has above its group's mean, in every turn."""
    rows = [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
    assert len(rows) == 3 * 32
    for row in rows:
        group = [other["score"] for other in rows if other["group_id"] == row["group_id"]]
        above = row["score"] - sum(group) / len(group)
        assert (row["advantage"] > 0, row["advantage"] < 0) == (above > 0, above < 0)
        assert {turn["advantage"] for turn in row["turns"]} == {row["advantage"]}
    assert any(row["advantage"] for row in rows)


def _its_folder_is_measured_as_the_run_measured_it(tmp_path, last, env):
    """Of the newest checkpoint: the same weights, worlds, seeds and sampling."""
    command = [
        sys.executable, "-m", "roll_async.cli", "eval", str(tmp_path / "run"),
        "--config", str(tmp_path / "run" / "config.yaml"), "--output", str(tmp_path / "measured"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patient(240))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "measured" / "results.json").read_text())["sets"]["main"]
    expected = {name: value for name, value in last.items() if name != "validation/other_version"}
    assert {f"validation/{name}": value for name, value in found.items()} == pytest.approx(expected)
    lines = (tmp_path / "measured" / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert sorted(row["domain"] for row in rows) == ["FrozenLake"] * 8 + ["Small"] * 4
    assert all(len(row["turns"]) == row["metrics"]["turns"] and row["outcome"] for row in rows)
    assert list((tmp_path / "measured" / "trajectories").iterdir())
    assert not list((tmp_path / "measured").glob("model-*")), "the converted checkpoint is gone"


def test_rollout_without_training_writes_what_the_engine_sampled_with_validations_worlds(agentic_assets, tmp_path):
    command = [
        sys.executable, "-m", "roll_async.cli", "rollout", "--config", "agentic_frozen_lake_async_cpu",
        "--batches", "2",
        "--output", str(tmp_path / "rolled"), f"pretrain={agentic_assets}/model", "val_batch_size=8",
        "val_env_manager.group_size=4", "actor_infer.strategy_args={strategy_name: hf_infer}",
    ]  # fmt: skip
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patient(240))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "batch 2/2: 8 trajectories, reward 0." in done.stdout
    lines = (tmp_path / "rolled" / "metrics.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["agent/attempts"], second["agent/attempts"], second["groups/failed"]) == (8, 16, 0)
    share = "outcomes/truncated_turns"
    of_both = (first[f"agent/{share}"] + second[f"agent/{share}"]) / 2
    assert second[f"agent/run/{share}"] == of_both, "of 8 attempts each"
    seeds = []
    for batch in (1, 2):
        file = tmp_path / "rolled" / "samples" / f"step_{batch:08d}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(rows) == 8 and all(sum(row["loss_mask"]) > 0 and row["score"] is not None for row in rows)
        seeds += sorted({row["row_id"] for row in rows})
    assert len(seeds) == len(set(seeds)) == 4, "two groups of four a batch, each with a world of its own"
    assert list((tmp_path / "rolled" / "trajectories").iterdir())
