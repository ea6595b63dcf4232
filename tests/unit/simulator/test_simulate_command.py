"""`roll-async simulate`: figures of a config, worlds by number, the same bytes every time, one line for bad input."""

import json
from pathlib import Path

import pytest

from roll_async.cli import main
from roll_async.simulator.figures import Workload

ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "configs" / "rlvr_config_async_cpu.yaml")
DAPO = str(ROOT / "configs" / "async_dapo_cpu.yaml")

SMALL = ["rollout_batch_size=8", "actor_train.training_args.gradient_accumulation_steps=1", "--steps", "8"]


@pytest.mark.parametrize("kills", [[], ["--kills"], ["--branches"]])
def test_two_runs_of_one_seed_leave_byte_identical_traces(tmp_path, capsys, kills):
    for name in ("1", "2"):
        assert main(["simulate", "--seed", "13", *kills, "--trace", str(tmp_path / name)]) == 0
    first, second = ((tmp_path / name).read_bytes() for name in ("1", "2"))
    assert first == second and len(json.loads(first)["traceEvents"]) > 10


def test_a_trace_has_the_requests_of_each_engine_the_pushes_as_arrows_and_counters(tmp_path, capsys):
    assert main(["simulate", CONFIG, *SMALL, "--trace", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    process = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    engines = {process[event["pid"]] for event in events if event["name"] == "request"}
    assert engines and {"trainer", *(f"weights of {name}" for name in engines)} <= set(process.values())
    assert len([event for event in events if event["ph"] == "s"]) == 8 * len(engines), "a push a step"
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"groups/buffered", "groups/in_flight"}


def test_a_world_is_told_in_full_and_its_invariants_are_checked(capsys):
    assert main(["simulate", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "interrupt_mode='" in out and "invariants 1 to 9 hold" in out


def test_resident_roles_are_refused_because_what_they_take_from_each_other_is_not_modelled(capsys):
    shared = ["actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]", "colocation=resident"]
    assert main(["simulate", CONFIG, *shared, *SMALL]) == 2
    said = capsys.readouterr().err
    assert said.startswith("roll-async simulate: colocation=resident: ") and said.count("\n") == 1
    assert main(["plan", CONFIG, *shared]) == 0
    assert "resident: actor_train and actor_infer are resident side by side" in capsys.readouterr().out


def test_the_seed_of_a_config_is_the_one_that_is_given_also_zero(capsys):
    told = []
    for words in (["--seed", "0"], ["seed=0"], []):
        assert main(["simulate", CONFIG, *SMALL, "--json", *words]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != told[2]


@pytest.mark.slow
def test_a_config_gets_figures_beside_theory(capsys):
    assert main(["simulate", CONFIG, *SMALL, "--json", "--mean-length", "40"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["staleness_max"] <= 1 and result["speedup"] > 1.2
    assert result["theory_speedup_bound"] > result["theory_speedup_at_ratio"] > 1
    assert main(["simulate", CONFIG, *SMALL, "--split", "1:2"]) == 0
    out = capsys.readouterr().out
    assert "1 train, 2 generate in 2 replicas" in out and "1 + K*L/(N*(mu + mu_train))" in out


@pytest.mark.slow
def test_a_dapo_config_is_simulated_with_its_filter_and_the_share_it_drops_is_told_and_costs_time(capsys):
    args = ["simulate", DAPO, *SMALL, "algorithm.filter_groups.gen_batch_size=16", "--mean-length", "20"]
    assert main(args) == 0
    assert "50.0% of groups are assumed to have no spread (--filtered-share)" in capsys.readouterr().out
    results = []
    for share in ("0", "0.6"):
        assert main([*args, "--json", "--filtered-share", share]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert [r["filtered_share"] for r in results] == [0.0, 0.6]
    assert results[0]["step_s"] < results[1]["step_s"]
    assert results[0]["theory_colocated_bound_s"] < results[1]["theory_colocated_bound_s"]


@pytest.mark.slow
def test_lengths_that_go_by_the_prompt_are_another_world(capsys):
    steps = []
    for share in ("0", "0.9"):
        assert main(["simulate", CONFIG, *SMALL, "--json", "--prompt-share", share]) == 0
        steps.append(json.loads(capsys.readouterr().out)["step_s"])
    assert steps[0] != steps[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give a CONFIG, or --seed N"),
        (["--seed", "x"], "not a valid integer"),
        (["--sneed", "1"], "No such option"),
        ([CONFIG, "nonsense"], "'nonsense' is not KEY=VALUE"),
        ([CONFIG, "--split", "3"], "'3' is not TRAIN:INFER"),
        ([CONFIG, "--sigma", "nan"], "'nan' is not a finite number"),
        ([CONFIG, "--decode-speed", "0"], "0.0 is not in the range x>0"),
        ([CONFIG, "--steps", "2"], "2 simulated steps are too few"),
        ([CONFIG, "--filtered-share", "0.3"], "the config has no algorithm.filter_groups.enable"),
        ([CONFIG, "--filtered-share", "1"], "1.0 is not in the range 0<=x<1"),
        ([CONFIG, "--prompt-share", "1"], "1.0 is not in the range 0<=x<1"),
        ([CONFIG, "rollout_batch_sise=4"], "rollout_batch_sise"),
        ([CONFIG, "--kills", "--agents"], "--kills, --agents: no effect with CONFIG"),
        ([CONFIG, "--network-gb-s", "50"], "--network-gb-s: no effect with CONFIG"),
        (["--seed", "0", "--steps", "3", "--json"], "--steps, --json: no effect with --seed alone"),
        (["--weights", "--trace", "t"], "--trace: no effect with --weights"),
        (["no_such_file.yaml"], "no_such_file.yaml"),
        ([str(ROOT / "configs" / "agent_val_frozen_lake_async.yaml")], "only rlvr configs are simulated"),
    ],
)
def test_bad_input_is_one_readable_line(capsys, args, message):
    assert main(["simulate", *args]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_theory_agrees_with_its_limits():
    work = Workload(num_slots=100, num_samples=50, longest_s=30.0, generation_s=1.0, training_s=0.5)
    assert work.speedup_bound == pytest.approx(1 + 100 * 30 / (50 * 1.5))
    assert work.speedup_at(1e9) == pytest.approx(work.speedup_bound, rel=1e-3)
    ratios = [work.speedup_at(r) for r in (0, 0.5, 1, 2, 8)]
    assert ratios == sorted(ratios) and ratios[0] < 2
    # by hand: the best of all splits, tried one by one
    work_s, tail = 50 / 100, 30 / 3
    best = min(max(work_s / (1 - b) + tail, work_s / 2 / b) for b in (i / 1e5 for i in range(1, 10**5)))
    assert work.speedup_at(2) == pytest.approx(work.synchronous_s / best, rel=1e-3)
