"""Replicas join a run under way and leave it, on real parts: `roll-async scale` beside the start script, in a cluster
whose autoscaler (Ray's own, with its provider for one machine) starts the node that the second replica waits for.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_cluster import OwnCluster

from tests.patience import patient

pytest.importorskip("ray")
pytest.importorskip("megatron.core")

ROOT = Path(__file__).resolve().parents[2]


def scale(folder, replicas):
    command = [sys.executable, "-m", "roll_async.cli", "scale", str(folder), "--replicas", str(replicas)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=patient(300))


@pytest.fixture(scope="module")
def growing(short_folder):
    """One CPU, and two more whenever something waits for them, up to five."""
    with OwnCluster(short_folder) as cluster:
        cluster.growing_head(cpus=1, more_cpus=2, nodes=2)
        yield cluster


def test_a_replica_joins_by_command_where_the_autoscaler_starts_a_node_and_leaves_and_every_prompt_is_trained_once(
    launcher, growing
):
    folder = launcher.output / "run"
    log = folder / "run.log"

    def reached(text, within_s=300):
        deadline = time.monotonic() + patient(within_s)
        while text not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, f"{text!r} did not come"
            time.sleep(0.1)

    process = launcher.start(
        "actor_infer.strategy_args={strategy_name: hf_infer}",
        "async_generation_ratio=1",
        "max_steps=60",
        "rewards={length: {type: tests.cluster.length_reward.LengthReward}}",
        "actor_infer.generating_args.max_new_tokens=24",
        "weight_sync.transport=gloo",  # the new node need not be on this host
        env=growing.env(),
    )
    try:
        while not (folder / "metrics.jsonl").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        asked = scale(folder, 2)
        assert asked.returncode == 0, asked.stderr
        assert "1 -> 2 replicas; actor_infer-1 joins when devices and weights are there" in asked.stdout
        asked = scale(folder, 4)
        assert asked.returncode == 0 and "2 -> 4 replicas" in asked.stdout, "Ray does not tell how far it may grow"
        asked = scale(folder, 2)
        assert asked.returncode == 0 and "4 -> 2 replicas" in asked.stdout
        refused = scale(folder, 0)
        assert refused.returncode == 2 and "at least 1" in refused.stderr and "Traceback" not in refused.stderr
        reached("actor_infer-1 rejoined with version")
        joined_at = len(launcher.metrics())
        while len(launcher.metrics()) < joined_at + 3:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        asked = scale(folder, 1)
        assert asked.returncode == 0 and "2 -> 1 replicas; actor_infer-1 leaves" in asked.stdout
        reached("engine actor_infer-1 has left")
        left_at = len(launcher.metrics())
        while len(launcher.metrics()) < left_at + 2:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.terminate()
        output, _ = process.communicate(timeout=patient(300))
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130, output
    metrics = launcher.metrics()
    assert {m["rollout/engines"] for m in metrics} == {1, 2} and metrics[-1]["rollout/engines"] == 1
    last = metrics[-1]
    assert last["rollout/lost_engines"] == last["rollout/returned_engines"] == last["groups/failed"] == 0
    assert last["groups/trained"] == 8 * len(metrics)
    assert max(m["staleness/max"] for m in metrics) <= 1
    with_both = [m for m in metrics if m["rollout/engines"] == 2]
    assert all(m["weights/canary_alarms"] == m.get("weights/lag_zero_alarm", 0) == 0 for m in with_both)
    waited = "the roles on CPU are 2 processes, and Ray has 1 CPUs: waiting for the autoscaler"
    assert waited in (folder / "run.log").read_text()
    assert "actor_infer-1" in "".join((folder / "run.log").read_text().splitlines()[-200:])
    ended = scale(folder, 2)
    assert ended.returncode == 2 and "is not running" in ended.stderr
