"""The main job on real parts: Ray, Megatron-Core, vLLM or the Hugging Face engine, run as a user runs it."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.patience import patient

pytest.importorskip("ray")
pytest.importorskip("megatron.core")

ROOT = Path(__file__).resolve().parents[2]
HF = "actor_infer.strategy_args={strategy_name: hf_infer}"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


def test_one_batch_ahead_overlaps_stays_within_the_bound_and_leaves_what_it_promises(launcher):
    pytest.importorskip("vllm")
    transformers = pytest.importorskip("transformers")
    code, output = launcher.run(
        "async_generation_ratio=1", "max_steps=5", "eval_steps=2", "val_batch_size=16", "save_steps=2"
    )
    assert code == 0, output
    metrics = launcher.metrics()
    assert max(m["staleness/max"] for m in metrics) == 1
    assert [m["step"] for m in metrics if "validation/accuracy" in m] == [2, 4, 5], "the last model, too"
    assert [m["validation/version"] for m in metrics if "validation/accuracy" in m] == [2, 4, 5]
    folder = launcher.output / "run"
    for name in ("config.yaml", "metrics.jsonl", "run.log", "reward.png", "ledger.sqlite", "trace.json"):
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "tensorboard").iterdir())
    assert {p.name for p in (folder / "logs").iterdir()} == {"actor_train-0.log", "actor_infer-0.log", "rewards-0.log"}
    assert "Adam of torch" in (folder / "logs" / "actor_train-0.log").read_text()
    log = (folder / "run.log").read_text()
    assert "actor_train: layers: local (" in log and "actor_train: Adam of torch: neither" in log
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step_00000002", "step_00000004", "step_00000005"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    assert sum(p.numel() for p in model.parameters()) > 500_000
    assert "step 5/5" in output and "reward, mean of first / last 5 steps" in output
    assert 'sample of step 1: prompt "' in output and 'sample of step 1: prompt "' in log


def test_synchronous_training_is_on_policy_and_two_replicas_answer_the_same_prompt_independently(launcher):
    """verl PR 5179: replicas that share a seed answer alike, and the samples of a group, dealt to them, are copies."""
    pytest.importorskip("vllm")
    dump = launcher.output / "dump"
    code, output = launcher.run(
        "async_generation_ratio=0",
        "max_steps=3",
        "rewards={length: {type: tests.cluster.length_reward.LengthReward}}",
        "actor_infer.world_size=2",
        "actor_infer.generating_args.temperature=2.0",  # long answers, no two of them alike by chance
        "actor_infer.generating_args.max_new_tokens=24",
        "actor_infer.strategy_args.strategy_config.load_format=dummy",  # the first push brings the model
        f"tracking.rollout_dump_dir={dump}",
    )
    assert code == 0, output
    rows = [json.loads(line) for file in sorted(dump.iterdir()) for line in file.read_text().splitlines()]
    groups = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    trained = [row for row in rows if row["advantage"]]
    assert trained and all(min(row["entropies"]) > 0 for row in trained), "of every token"
    assert all(len(row["entropies"]) == len(row["response_token_ids"]) for row in trained)
    shared = [g for g in groups.values() if {row["replica"] for row in g} == {"actor_infer-0", "actor_infer-1"}]
    assert len(shared) > 8, "the samples of a group are dealt to both replicas"
    num_unlikely = 0
    for group in shared:
        unlikely = [tuple(r["response_token_ids"]) for r in group if sum(r["behaviour_logprobs"]) < -14]
        assert len(set(unlikely)) == len(unlikely), "copies that chance does not explain"
        num_unlikely += len(unlikely)
    assert num_unlikely > len(shared), "answers that a shared seed would have copied"
    assert "sample in step" not in output
    metrics = launcher.metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3]
    for m in metrics:
        assert m["rollout/duplicate_share"] < 0.1 and m["staleness/max"] == 0
        assert abs(m["correction/rho_max"] - 1) < 1e-3 and abs(m["correction/kl"]) < 1e-4
        assert m["weights/version"] >= m["step"] - 1
        assert m["weights/canary_alarms"] == 0 and m["weights/canary_difference"] < 1e-4
    assert all(m["weights/canary_moved"] > 0 for m in metrics[1:])


def test_a_reward_beside_the_config_that_always_raises_is_named_once_and_no_file_holds_a_secret(launcher, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "my_reward.py").write_text("def score(text, truth, extra):\n    return extra['no such column']\n")
    base = os.path.relpath(ROOT / "configs" / "rlvr_config_async_cpu", project)
    (project / "mine.yaml").write_text(
        f"defaults: [{base}]\nrewards: {{addition: {{type: my_reward.score}}}}\nsystem_envs: {{MY_KEY: s3cret}}\n"
        "actor_infer: {system_envs: {MY_OTHER: s3cret}}\ntracking: {tracker_kwargs: {api_key: s3cret}}\n"
    )
    code, output = launcher.run("max_steps=3", HF, config=str(project / "mine.yaml"))
    assert code == 3, output
    assert output.count(f"KeyError: 'no such column' [{project}/my_reward.py:2, in score]") == 1, output
    assert output.count("my_reward.py") == 1 and output.count("ERROR") == 1
    assert "domain addition raised for every sample of its first" in output.splitlines()[-1]
    folder = launcher.output / "run"
    log = (folder / "run.log").read_text()
    assert 'my_reward.py", line 2, in score' in log and log.count("Traceback (most recent call last):\n  File") == 1
    assert (folder / "config.yaml").read_text().count("<hidden>") == 3
    texts = [output, *(p.read_bytes().decode(errors="replace") for p in folder.rglob("*") if p.is_file())]
    assert len(texts) > 5 and not any("s3cret" in text for text in texts)
    again = shutil.copy(folder / "config.yaml", project / "again.yaml")  # beside the reward
    code, output = launcher.run(config=str(again))
    hidden = ("system_envs.MY_KEY", "tracking.tracker_kwargs.api_key", "actor_infer.system_envs.MY_OTHER")
    assert code == 2 and f"{', '.join(hidden)}: <hidden> stands for a secret" in output
    assert output.endswith("or set the environment variable MY_KEY, api_key, MY_OTHER\n")


@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K rows are not beside this checkout")
def test_real_gsm8k_rows_run_three_steps(launcher, tmp_path):
    import subprocess
    import sys

    tool = str(ROOT / "tools" / "make_gsm8k_assets.py")
    assets = tmp_path / "gsm8k_assets"
    subprocess.run(
        [sys.executable, tool, "--source", str(GSM8K), "--output", str(assets)], check=True, timeout=patient(120)
    )
    code, output = launcher.run(
        f"pretrain={assets}/model",
        f"actor_train.data_args.file_name={GSM8K}",
        HF,
        config="rlvr_gsm8k_cpu.yaml",
        small=False,
    )
    assert code == 0, output
    assert len(launcher.metrics()) == 3
    log = (launcher.output / "run" / "run.log").read_text()
    assert "7" in log and "longer than prompt_length" in log


def test_a_run_goes_on_after_its_engine_died_and_after_ctrl_c_and_a_killed_driver_leaves_nothing_behind(launcher):
    psutil = pytest.importorskip("psutil")

    def started(*overrides, step):
        """A run that is to end long before its steps do, past `step`, and the processes it started."""
        process = launcher.start("max_steps=500", "checkpoint.resume_from=latest", HF, *overrides)
        for line in process.stdout:
            if line.startswith(f"step {step}/"):
                break
        return process, psutil.Process(process.pid).children(recursive=True)

    process, children = started("fault.max_engine_restarts=0", step=1)
    next(c for c in children if "EngineReplica" in " ".join(c.cmdline())).kill()
    output = process.communicate(timeout=patient(120))[0]
    assert process.returncode == 3 and "actor_infer-0" in output and "Traceback" not in output
    lost_at = launcher.metrics()[-1]["step"]
    assert f"step {lost_at} is saved; resume after" in output, "the trainer was healthy"
    assert (launcher.output / "run" / "checkpoints" / f"step_{lost_at:08d}").is_dir()

    validated = ("eval_steps=1", "val_batch_size=8")
    process, _ = started(*validated, step=lost_at + 2)
    process.send_signal(signal.SIGUSR1)
    while not (said := process.stdout.readline()).startswith("Component Statistics: Trainer "):
        assert said, "the run ended, and said no state"
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=patient(120))[0]
    assert process.returncode == 130, output
    stopped_at = launcher.metrics()[-1]["step"]
    assert [m["step"] for m in launcher.metrics()] == list(range(1, stopped_at + 1))

    process, children = started(*validated, step=stopped_at + 1)
    log = (launcher.output / "run" / "run.log").read_text()
    if not any(m.get("validation/version") == stopped_at for m in launcher.metrics()[:stopped_at]):
        assert f"validation/version={stopped_at}.0" in log, "the stop came first: the next run measures it"
    assert [m["step"] for m in launcher.metrics()][:stopped_at] == list(range(1, stopped_at + 1))
    assert len(children) > 5
    connections = [c for p in (psutil.Process(process.pid), *children) for c in p.net_connections("tcp")]
    open_to = {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}
    assert open_to == {"127.0.0.1"}, "a port was open to the network"
    process.kill()
    process.wait()
    deadline = time.monotonic() + patient(20)
    while time.monotonic() < deadline:
        left = [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
        if not left:
            break
        time.sleep(0.2)
    assert left == []


def test_missing_assets_and_wrong_keys_are_one_readable_line_before_anything_starts(launcher):
    launcher.assets = Path("output/no_demo_assets")
    code, output = launcher.run()
    assert code == 2 and "roll-async demo --assets-only" in output and "Traceback" not in output
    code, output = launcher.run("async_generation_ration=1")
    assert code == 2 and "did you mean 'async_generation_ratio'" in output
