"""Hosts on one machine: network namespaces with addresses of their own, each with its own shared memory. Ray was
started there by hand, from other folders than the driver's, and the run joins it by RAY_ADDRESS.

What this cannot show: other machines' clocks, disks and libraries, and a network that is slow or loses packets.
"""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections import Counter
from pathlib import Path

import pytest
from own_cluster import OwnCluster

from tests.patience import patient

pytest.importorskip("ray")
pytest.importorskip("megatron.core")

ROOT = Path(__file__).resolve().parents[2]
SPREAD = "rewards={length: {type: tests.cluster.length_reward.LengthReward}}"
ADDRESSES = tuple(f"10.99.71.{number}" for number in range(1, 5))
NOTICE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
"""Ray takes a silent node for dead after ten seconds."""
TP2 = (
    "actor_train.world_size=2",
    "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2",
    "actor_train.strategy_args.strategy_config.sequence_parallel=true",
)


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


class Hosts:
    """Network namespaces with a cable each to a switch in the first of them; nothing else is reachable from them."""

    def __init__(self, folder):
        self.names = [f"ra{uuid.uuid4().hex[:8]}" for _ in ADDRESSES]
        self._no_server = folder / "resolv.conf"
        """In place of the machine's: its name server is out of reach, and every question to it takes ten seconds."""
        self._no_server.touch()

    def enter(self, number, *mounts):
        """What to run a command under that belongs to a host; `mounts`: commands that only it sees the effect of."""
        setup = " && ".join((f"mount --bind {self._no_server} /etc/resolv.conf", *mounts, 'exec "$@"'))
        return ["ip", "netns", "exec", self.names[number], "unshare", "-m", "sh", "-c", setup, "sh"]

    def connect(self):
        first = self.names[0]
        self._ip("-n", first, "link", "add", "switch", "type", "bridge")
        for number, (name, address) in enumerate(zip(self.names, ADDRESSES, strict=True)):
            device = "switch"
            if number:
                device = "cable"
                there = ("type", "veth", "peer", "name", device, "netns", name)
                self._ip("link", "add", f"port{number}", "netns", first, *there)
                self._ip("-n", first, "link", "set", f"port{number}", "master", "switch", "up")
            self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            self._ip("-n", name, "link", "set", device, "up")
            self._ip("-n", name, "route", "add", "default", "via", ADDRESSES[0 if number else 1])

    def pull_cable(self, number):
        """From now on it is silent: no connection of its processes is closed."""
        self._ip("-n", self.names[0], "link", "set", f"port{number}", "down")

    def _ip(self, *arguments):
        done = ip(*arguments)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if os.getuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, ip and unshare")
    made = Hosts(tmp_path_factory.mktemp("resolver"))
    if any([ip("netns", "add", name).returncode for name in made.names]):
        pytest.skip("network namespaces cannot be made here")
    try:
        made.connect()
        yield made
    finally:
        for name in made.names:
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def cluster(hosts, short_folder):
    """Room for three processes on each of two hosts. The second one has another file system at `unshared`."""
    folder = short_folder
    (folder / "unshared").mkdir()
    own_memory = ("mount -t tmpfs shm /dev/shm", f"mount -t tmpfs other {folder / 'unshared'}")

    def prefix(number):
        return hosts.enter(number, *(own_memory if number else ()))

    with OwnCluster(folder, addresses=ADDRESSES, prefix=prefix) as own:
        own.head(cpus=3, gpus=2, env={"CUDA_VISIBLE_DEVICES": "0,1", **NOTICE})
        own.node(cpus=3, gpus=1, env={"CUDA_VISIBLE_DEVICES": "0"})
        yield own


@pytest.fixture
def drive(cluster, hosts, demo_assets, tmp_path):
    """Run the launcher on the first host, in a folder of its own, with relative paths. `watch`: gets every line of its
    output.
    """
    (tmp_path / "assets").symlink_to(demo_assets)

    def run(*overrides, timeout=600, watch=None, **env):
        command = [
            *hosts.enter(0), sys.executable, str(ROOT / "examples" / "start_rlvr_pipeline.py"),
            "--config", str(ROOT / "configs" / "rlvr_config_async_cpu.yaml"),
            "pretrain=assets/model", "actor_train.data_args.file_name=assets/train.jsonl",
            "validation.data_args.file_name=assets/validation.jsonl", "exp_name=run", "eval_steps=0",
            "rollout_batch_size=8", "num_return_sequences_in_group=4",
            "actor_train.training_args.per_device_train_batch_size=32",
            "actor_train.training_args.gradient_accumulation_steps=1", *overrides,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=tmp_path, env=cluster.env(**env), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        late, lines = threading.Timer(patient(timeout), process.kill), []
        late.start()
        for line in process.stdout:
            lines.append(line)
            if watch is not None:
                watch(line)
        late.cancel()
        return process.wait(), "".join(lines)

    return run


def test_ranks_of_trainer_and_engine_over_two_hosts_are_on_policy_and_leave_whole_checkpoints(drive, cluster, tmp_path):
    """vLLM's own way over nodes: its engine on one of them, an executor without an engine on the other. A rank there is
    killed, and the replica comes back.
    """
    pytest.importorskip("vllm")

    def watch(line):
        if line.startswith("step 2/"):
            ranks = [rank for node in range(2) for rank in cluster.running(node, "VLLM::Worker_TP1")]
            assert len(ranks) == 1
            ranks[0].kill()

    code, output = drive(
        *TP2, "async_generation_ratio=0", "max_steps=4", "save_steps=2", "output_dir=out", SPREAD,
        "actor_infer.generating_args.max_new_tokens=12",
        "num_gpus_per_node=2", "actor_infer.device_mapping=[1, 2]", "actor_infer.world_size=2",
        "actor_infer.strategy_args.strategy_config.tensor_parallel_size=2", watch=watch, ROLL_ASYNC_PRETENDED_GPUS="1",
    )  # fmt: skip
    assert code == 0, output
    folder = tmp_path / "out" / "run"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    for m in metrics:
        assert m["staleness/max"] == 0 and abs(m["correction/rho_max"] - 1) < 1e-3, "every rank holds every push"
    told = [m["weights/canary_difference"] for m in metrics if "weights/canary_difference" in m]
    assert len(told) >= 3 and max(told) < 1e-4, "the replica may be killed before it has answered"
    assert metrics[-1]["weights/canary_moved"] > 0
    assert metrics[-1]["rollout/lost_engines"] == metrics[-1]["rollout/returned_engines"] == 1
    log = (folder / "run.log").read_text()
    assert "weight transport: gloo (trainer and engines run on hosts 10.99.71.1, 10.99.71.2)" in log
    assert log.count(" is lost: ") == 1, "at the end replicas close after what watches them"
    for step in (2, 4):
        part = folder / "checkpoints" / f"step_{step:08d}" / "actor_train"
        manifest = json.loads((part / "manifest.json").read_text())
        assert manifest["step"] == step and manifest["world_size"] == 2
        assert all((part / name).is_file() for name in manifest["files"])
    assert (folder / "hf" / "config.json").is_file()
    engine = {f"actor_infer-0{start}{node}" for start in ("", ".1") for node in ("", "-node1")}
    assert {p.stem for p in (folder / "logs").iterdir()} == {"actor_train-0", "actor_train-1", *engine, "rewards-0"}
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


def test_nodes_that_fall_silent_cost_a_replica_or_a_restart_and_no_prompt_and_the_last_one_ends_the_run(
    drive, cluster, hosts, tmp_path
):
    """Two ranks and two replicas, one of each on the first host. First the host of the other rank dies, and the run
    starts again on the spare one; then that of the other replica, and the run goes on without it; then the rank's.
    """
    for _ in range(2):
        cluster.node(cpus=3, gpus=1, env={"CUDA_VISIBLE_DEVICES": "0"})
    folder, deaths, lost = tmp_path / "out" / "run", ["rank", "replica", "rank"], []
    mapping_node = {"rank": 1, "replica": 2}

    def kill(role):
        granted = re.findall(r"node (\d) is (\S+): GPUs", (folder / "run.log").read_text())
        number = ADDRESSES.index(dict((int(node), address) for node, address in granted)[mapping_node[role]])
        hosts.pull_cable(number)
        cluster.end(number)
        lost.append(ADDRESSES[number])

    def watch(line):
        found = re.match(r"step (\d+)/", line)
        if found and deaths and int(found[1]) >= due[0]:
            kill(deaths.pop(0))
            due[0] = int(found[1]) + 4

    due = [3]
    code, output = drive(
        "num_gpus_per_node=2", "actor_train.device_mapping=[1, 2]", "actor_train.world_size=2",
        "actor_infer.device_mapping=[4, 0]", "actor_infer.world_size=2",
        "actor_train.training_args.per_device_train_batch_size=16",
        "actor_infer.strategy_args={strategy_name: hf_infer}", "fault.max_run_restarts=1",
        "fault.max_engine_restarts=0", "async_training.sync_timeout=60", "async_generation_ratio=1", "max_steps=200",
        "save_steps=2", "output_dir=out", SPREAD,
        timeout=900, watch=watch, ROLL_ASYNC_PRETENDED_GPUS="1",
    )  # fmt: skip
    assert code == 3 and not deaths and len(set(lost)) == 3 and "Traceback" not in output, output
    assert "starting all roles again from the newest checkpoint (fault.max_run_restarts: 1 of 1)" in output
    assert "actor_train rank 1: process is gone" in output.splitlines()[-1]
    assert "actor_infer-0" in output
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [m["step"] for m in metrics]
    assert steps == list(range(1, len(steps) + 1)) and max(m["staleness/max"] for m in metrics) <= 1
    alone = [m for m in metrics if m["rollout/engines"] == 1]
    assert len(alone) >= 2 and alone[-1]["run/restarts"] == 1 and alone[-1]["groups/failed"] == 0
    with sqlite3.connect(folder / "ledger.sqlite") as ledger:
        rows = ledger.execute("SELECT prompt_index, consumed_step FROM groups WHERE state = 'trained'").fetchall()
    assert len({index for index, _ in rows}) == len(rows), "a prompt was trained twice"
    assert {step: count for step, count in Counter(step for _, step in rows).items()} == dict.fromkeys(steps, 8)
