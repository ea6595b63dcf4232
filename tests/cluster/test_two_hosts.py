"""Two hosts on one machine: network namespaces with addresses of their own, each with its own shared memory. Ray was
started there by hand, from other folders than the driver's, and the run joins it by RAY_ADDRESS.

What this cannot show: other machines' clocks, disks and libraries, and a network that is slow or loses packets.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from own_cluster import OwnCluster

pytest.importorskip("ray")
pytest.importorskip("megatron.core")

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.99.71.1", "10.99.71.2")
TP2 = (
    "actor_train.world_size=2",
    "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2",
    "actor_train.strategy_args.strategy_config.sequence_parallel=true",
)


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts():
    """Names of two network namespaces joined by a cable; nothing else is reachable from them."""
    if os.getuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, ip and unshare")
    names = [f"ra{uuid.uuid4().hex[:8]}" for _ in ADDRESSES]
    made = [ip("netns", "add", name).returncode for name in names]
    if any(made):
        pytest.skip("network namespaces cannot be made here")
    try:
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, own, other in zip(names, ADDRESSES, reversed(ADDRESSES), strict=True):
            for command in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{own}/24", "dev", name),
                ("link", "set", name, "up"),
                ("route", "add", "default", "via", other),
            ):
                done = ip("-n", name, *command)
                assert done.returncode == 0, done.stderr
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def cluster(hosts, short_folder):
    """Room for three processes on each host. The second one has another file system at `unshared`."""
    folder = short_folder
    (folder / "unshared").mkdir()
    mounts = f'mount -t tmpfs shm /dev/shm && mount -t tmpfs other {folder / "unshared"} && exec "$@"'

    def prefix(number):
        enter = ["ip", "netns", "exec", hosts[number]]
        return enter if number == 0 else [*enter, "unshare", "-m", "sh", "-c", mounts, "sh"]

    with OwnCluster(folder, addresses=ADDRESSES, prefix=prefix) as own:
        own.head(cpus=3)
        own.node(cpus=3)
        yield own


@pytest.fixture
def drive(cluster, hosts, demo_assets, tmp_path):
    """Run the launcher on the first host, in a folder of its own, with relative paths."""
    (tmp_path / "assets").symlink_to(demo_assets)

    def run(*overrides, timeout=300):
        command = [
            "ip", "netns", "exec", hosts[0], sys.executable, str(ROOT / "examples" / "start_rlvr_pipeline.py"),
            "--config", str(ROOT / "configs" / "rlvr_config_async_cpu.yaml"),
            "pretrain=assets/model", "actor_train.data_args.file_name=assets/train.jsonl",
            "validation.data_args.file_name=assets/validation.jsonl", "exp_name=run", "eval_steps=0",
            "rollout_batch_size=8", "num_return_sequences_in_group=4",
            "actor_train.training_args.per_device_train_batch_size=32",
            "actor_train.training_args.gradient_accumulation_steps=1", *overrides,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, env=cluster.env(), capture_output=True, text=True, timeout=timeout)
        return done.returncode, done.stdout + done.stderr

    return run


def test_tp2_with_sequence_parallel_and_two_replicas_over_two_hosts_is_on_policy_and_leaves_whole_checkpoints(
    drive, cluster, tmp_path
):
    pytest.importorskip("vllm")
    code, output = drive(
        *TP2, "actor_infer.world_size=2", "async_generation_ratio=0", "max_steps=5", "save_steps=2", "output_dir=out"
    )
    assert code == 0, output
    folder = tmp_path / "out" / "run"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5]
    for m in metrics:
        assert m["staleness/max"] == 0 and abs(m["correction/rho_max"] - 1) < 1e-3, "every replica holds every push"
    log = (folder / "run.log").read_text()
    assert "weight transport: gloo (trainer and engines run on hosts 10.99.71.1, 10.99.71.2)" in log
    for step in (2, 4, 5):
        part = folder / "checkpoints" / f"step_{step:08d}" / "actor_train"
        manifest = json.loads((part / "manifest.json").read_text())
        assert manifest["step"] == step and manifest["world_size"] == 2
        assert all((part / name).is_file() for name in manifest["files"])
    assert (folder / "hf" / "config.json").is_file()
    roles = {"actor_train-0", "actor_train-1", "actor_infer-0", "actor_infer-1", "rewards-0"}
    assert {p.stem for p in (folder / "logs").iterdir()} == roles
    assert not list(cluster.folder.glob("node*/out")), "a role wrote where its raylet was started"


def test_a_folder_that_is_another_one_on_a_host_is_refused_before_a_model_is_loaded(drive, cluster):
    """NeMo-RL, verl and we ourselves saved checkpoints to a disk of each host and called them whole."""
    unshared = cluster.folder / "unshared"
    code, output = drive("actor_train.world_size=4", "rollout_batch_size=32", f"output_dir={unshared}", timeout=120)
    assert code == 2, output
    assert f"output_dir={unshared}/run is not the driver's folder on host" in output
    assert "put it on a file system that all nodes share" in output and "Traceback" not in output


def test_more_processes_than_the_cluster_has_cpus_for_are_refused_at_once(drive):
    code, output = drive("actor_train.world_size=8", "rollout_batch_size=64", "output_dir=out", timeout=60)
    assert code == 2 and "the roles on CPU are 9 processes, and Ray has 6 CPUs" in output, output
