"""The tables of staleness, of TRL and of recipes: which runs they need, how they go on, when a budget is kept."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import pytest

from roll_async.commands.demo.addition import HEAVY_TAIL_DIGITS, problems
from roll_async.config.api import load

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "bench"))
import admission_table
import neighbours
import recipes
import staleness_table
import vs_trl


def run_of(allowance, seed, seconds, accuracy=0.8):
    return {
        "loss": "demo", "staleness": allowance, "seed": seed, "seconds": seconds, "accuracy": accuracy,
        "staleness_mean": float(allowance), "staleness_max": 2.0 * allowance, "t_gen_s": 1.0, "t_train_s": 1.1,
        "reward_last": 0.7, "curve": [0.1, 0.5, 0.7],
    }  # fmt: skip


def test_fifteen_runs_of_which_one_may_be_chosen_and_each_is_a_config_that_loads():
    args = staleness_table.arguments(["--assets", "output/demo_assets"])
    runs = staleness_table.wanted_runs(args)
    assert len(runs) == len(set(runs)) == 15 and runs[:5] == [("demo", allowance, 0) for allowance in range(5)]
    path = str(ROOT / "configs" / "rlvr_config_async_cpu.yaml")
    for run in runs:
        config = load(path, staleness_table.overrides_of(run, args), "rlvr")
        assert (config.async_generation_ratio, config.seed, config.max_steps) == (run[1], run[2], 40)
        assert config.async_training.staleness.max_versions in (None, 2 * run[1]) and config.response_length == 256
    assert staleness_table.wanted_runs(staleness_table.arguments(["--only", "3,1"])) == [("demo", 3, 1)]
    with pytest.raises(argparse.ArgumentTypeError, match="'three' is not ALLOWANCE,SEED"):
        staleness_table.one_run("three")
    forced = staleness_table.arguments(["--forced", "--seeds", "1"])
    assert len(staleness_table.wanted_runs(forced)) == 6 * 4


def test_speed_is_compared_seed_by_seed_and_accuracy_within_one_deviation():
    rows = [run_of(0, 0, 100.0, 0.80), run_of(0, 1, 200.0, 0.84), run_of(3, 0, 50.0, 0.81), run_of(3, 1, 100.0, 0.80)]
    line = staleness_table.verdict(rows)
    assert line["ratio"] == 2.0 and line["ok"] and line["seeds"] == 2
    worse = [*rows[:2], run_of(3, 0, 50.0, 0.70), run_of(3, 1, 100.0, 0.70)]
    assert not staleness_table.verdict(worse)["ok"], "0.82 less one deviation of 0.028"
    assert staleness_table.verdict(rows[:2]) is None
    assert staleness_table.faster_at([*rows, run_of(3, 2, 1.0)], 3) == 2.0, "seed 2 has no run at allowance 0"
    table = staleness_table.allowance_table(rows, [0, 1, 2, 3, 4]).splitlines()
    assert len(table) == 4 and table[3].startswith("| 3 | 75.0 +- 35.4 | 2.00 | 0.805 +- 0.007 | 3.00 | 6 |")


def test_the_table_against_trl_has_twelve_rows_of_three_runs_and_each_config_loads(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"hidden_size": 256}))
    args = vs_trl.arguments([])
    rows = vs_trl.rows_of(args)
    assert len(rows) == len(set(rows)) == 12 and {row[1] for row in rows[:4]} == {"0.6M"}
    path = str(ROOT / "configs" / "rlvr_config_async_cpu.yaml")
    for row in rows:
        plain, best = (
            load(path, vs_trl.overrides_of(row, side, 43, tmp_path, args), "rlvr") for side in ("defaults", "best")
        )
        assert plain.seed == best.seed == 43
        assert plain.actor_train.model_args.dtype == plain.actor_infer.model_args.dtype == row[0]
        assert plain.actor_train.training_args.learning_rate == args.rate / 2, "the narrowest is 128 wide"
        assert plain.response_length == best.response_length == (256 if row[2] == "heavy" else 96)
        assert plain.actor_train.micro_batching == "fixed" and best.actor_train.micro_batching == "packed"
    assert vs_trl.rows_of(vs_trl.arguments(["--only", "bf16,5M,heavy"])) == [("bf16", "5M", "heavy")]
    with pytest.raises(argparse.ArgumentTypeError, match="'fp32,7B,light' is not DTYPE,SIZE,TAIL"):
        vs_trl.one_row("fp32,7B,light")


def test_a_row_is_read_back_and_judged_by_the_budget_of_its_tail_and_processor(tmp_path):
    row = ("fp32", "0.6M", "light")
    same = {"row": list(row), "steps": 40, "seed": 42, "rewards": [0.5, 0.8], "warm_start": "500 steps"}
    trl = {**same, "side": "trl", "samples_per_s": 200.0, "precision": "float32", "accuracy": 0.88}
    ours = {
        **same, "side": "best", "samples_per_s": 250.0, "precision": "fp32", "settings": [], "staleness_mean": 0.9,
        "length_mean": 20.0, "length_max": 45.0, "idle_trainer": 0.1, "accuracy": 0.88,
    }  # fmt: skip
    runs = tmp_path / "runs.jsonl"
    assert vs_trl.read(runs) == {}
    runs.write_text("".join(json.dumps(one) + "\n" for one in (trl, ours)))
    done = vs_trl.read(runs)
    assert set(done) == {(row, "trl", 40, 42), (row, "best", 40, 42)}

    def line(ours, trl, *, bf16_native=False):
        return vs_trl.line_of(row, ours, trl, cpu="a cpu", bf16_native=bf16_native)

    read_back = line([done[row, "best", 40, 42]], [done[row, "trl", 40, 42]])
    assert read_back["ratio"] == 1.25 and read_back["budget"] == 1.2 and read_back["ok"]
    assert not line([ours], [trl], bf16_native=True)["ok"], "1.5 where bfloat16 is native"
    assert vs_trl.budget("heavy", bf16_native=False) == vs_trl.budget("heavy", bf16_native=True) == 2.0
    worse, better = {**ours, "accuracy": 0.87}, {**ours, "accuracy": 0.90, "samples_per_s": 270.0}
    assert not line([worse], [trl])["ok"]
    both = line([worse, better], [trl, trl])
    assert both["ok"] and both["accuracies"] == [0.87, 0.9] and both["accuracy"] == 0.885 and both["value"] == 260.0


def test_a_heavy_tail_has_answers_of_several_times_the_mean():
    for heavy, least, most in ((False, 1.0, 2.5), (True, 3.5, 20.0)):
        lengths = [len(problem.solution()) for problem in problems(3000, seed=1, heavy_tail=heavy)]
        assert least < max(lengths) * len(lengths) / sum(lengths) < most
        assert max(lengths) < (256 if heavy else 96)
    assert max(len(str(p.left)) for p in problems(3000, seed=1, heavy_tail=True)) <= HEAVY_TAIL_DIGITS


def test_neighbours_are_compared_by_the_work_that_lies_wholly_in_the_time_both_worked():
    units = [
        neighbours.Unit(began_s=began, ended_s=ended, core_s=core)
        for began, ended, core in [(0.0, 2.0, 1.9), (2.0, 4.0, 1.0), (4.0, 8.0, 2.0), (8.0, 11.0, 2.9)]
    ]
    assert neighbours.rate_within(units, 1.0, 10.0) == (2 / 6, 1.5)
    with pytest.raises(SystemExit, match="no unit of work fits into --seconds 1; give more"):
        neighbours.rate_within(units, 2.5, 3.5)


@pytest.mark.parametrize("seed", [1, 8])
def test_answers_get_longer_when_the_setting_says_so(monkeypatch, seed):
    """A sleep may end early by the resolution of the clock, as with seed 8: the change came after the next one."""
    asked_s = []

    class Watched(admission_table.Backlog):
        def next(self):
            if self.longer:
                asked_s.append(asyncio.get_running_loop().time())
            return super().next()

    monkeypatch.setattr(admission_table, "Backlog", Watched)
    lengths = admission_table.lognormal(100, 0.8, 1000)
    setting = admission_table.Setting(name="", lengths=lengths, limit=1000, seconds=900, longer_from_s=300)
    admission_table.measure(setting, fixed=4, seed=seed)
    assert 300 <= round(min(asked_s), 3) < 303


@pytest.mark.parametrize(("name", "curve"), [(n, c) for n, recipe in recipes.RECIPES.items() for c in recipe.runs])
def test_a_curve_of_a_recipe_is_a_config_that_loads_with_its_overrides(name, curve):
    config, *overrides = recipes.RECIPES[name].runs[curve]
    loaded = load(ROOT / "configs" / f"{config}.yaml", overrides)
    made = [folder for folder in recipes.RECIPES[name].needs if loaded.pretrain.endswith(folder)]
    assert made, f"nothing makes {loaded.pretrain}"


def test_a_recipe_is_a_line_of_means_and_a_picture_of_all_seeds(tmp_path):
    rows = [
        {"curve": "a", "config": "c", "seconds": 60 * m, "step_s": 1.0, "staleness": 0.5, "reward": [0.0, 0.0, m / 10],
         "validation": [[3, m / 10]]}
        for m in (1, 3)
    ]  # fmt: skip
    assert recipes.table(rows).splitlines()[-1].startswith("| a | `c` | 2 | 2.0 ± 1.4 |")
    assert recipes.table(rows).splitlines()[-1].endswith("| 0.067 ± 0.047 | 0.067 ± 0.047 | 0.200 ± 0.141 |")
    recipes.plot(rows, tmp_path / "figures" / "recipe.png")
    assert (tmp_path / "figures" / "recipe.png").read_bytes().startswith(b"\x89PNG")
