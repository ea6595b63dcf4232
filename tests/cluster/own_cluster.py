"""Ray clusters of our own on one machine: `ray start` as a user types it, from another folder than the driver's.

    with OwnCluster(folder) as cluster:
        cluster.head(cpus=4)
        cluster.node(gpus=4, env={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
        subprocess.run(command, env=cluster.env())

Every raylet stays in the foreground of a `ray start --block`; all of it is ended by process id.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.patience import patient

_UP_WITHIN_S = 120


class OwnCluster:
    """Raylets, GCS and agents of one cluster. `prefix(number)`: what to run the node's command under, for network
    namespaces; `addresses`: by node.
    """

    def __init__(self, folder, *, addresses=("127.0.0.1",) * 8, prefix=lambda number: ()):
        self.folder, self._addresses, self._prefix = Path(folder), addresses, prefix
        self._started = []
        self._held = port_below_the_ephemeral_ones()
        self._port = self._held.getsockname()[1]
        self.address = f"{addresses[0]}:{self._port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def env(self, **more):
        """For a driver."""
        return {**os.environ, "RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "disabled", **more}

    def head(self, *arguments, **resources):
        return self._start("--head", f"--port={self._port}", "--include-dashboard=false", *arguments, **resources)

    def growing_head(self, *, cpus, more_cpus, nodes):
        """A head whose autoscaler starts up to `nodes` more, here too, when something waits for their CPUs."""
        config = {
            "cluster_name": "growing", "max_workers": nodes, "idle_timeout_minutes": 60, "upscaling_speed": 1.0,
            "provider": {
                "type": "fake_multinode", "gcs_address": self.address, "use_node_id_as_ip": True,
                "disable_node_updaters": True,
            },
            "auth": {},
            "head_node_type": "ray.head.default", "head_node": {}, "worker_nodes": {}, "docker": {}, "file_mounts": {},
            "cluster_synced_files": [], "file_mounts_sync_continuously": False, "rsync_exclude": [],
            "rsync_filter": [], "initialization_commands": [], "setup_commands": [], "head_setup_commands": [],
            "worker_setup_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": cpus}, "node_config": {}, "max_workers": 0},
                "more": {
                    "resources": {"CPU": more_cpus, "object_store_memory": 80 << 20}, "node_config": {},
                    "min_workers": 0, "max_workers": nodes,
                },
            },
        }  # fmt: skip
        file = self.folder / "autoscaling.json"
        file.write_text(json.dumps(config))
        env = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        process = self.head(f"--autoscaling-config={file}", cpus=cpus, env=env)
        log, deadline = (
            self.folder / "ray" / "session_latest" / "logs" / "monitor.log",
            time.monotonic() + patient(_UP_WITHIN_S),
        )
        while not (log.exists() and "Autoscaler status" in log.read_text()):
            assert time.monotonic() < deadline, "the autoscaler does not report"
            time.sleep(0.1)
        return process

    def node(self, **resources):
        return self._start(f"--address={self.address}", **resources)

    def of(self, pid):
        """The number of the node that a process runs on."""
        ancestors = {process.pid for process in psutil.Process(pid).parents()}
        return next(number for number, process in enumerate(self._started) if process.pid in ancestors)

    def running(self, number, title):
        """The processes of a node whose title begins like this."""
        family = psutil.Process(self._started[number].pid).children(recursive=True)
        return [process for process in family if " ".join(process.cmdline()).startswith(title)]

    def end(self, number):
        """End one node as a loss of power does: all of its processes at once, and none says goodbye."""
        kill_tree(self._started[number].pid)

    def wait_up(self):
        """Until every node that was started is there."""
        deadline = time.monotonic() + patient(_UP_WITHIN_S)
        for number, process in enumerate(self._started):
            output = self.folder / f"node{number}" / "out.txt"
            while "Ray runtime started" not in output.read_text():
                assert process.poll() is None and time.monotonic() < deadline, output.read_text()
                time.sleep(0.1)

    def _start(self, *arguments, cpus=0, gpus=0, env=None, wait=True):
        """The process of `ray start`."""
        number = len(self._started)
        home = self.folder / f"node{number}"
        home.mkdir(parents=True)
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command = [
            *self._prefix(number), *ray, *arguments, f"--node-ip-address={self._addresses[number]}",
            f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--object-store-memory={80 << 20}",
            "--include-log-monitor=false",  # one is enough for a machine, and these are all on one
        ]  # fmt: skip
        if "--head" in arguments:
            command.append(f"--temp-dir={self.folder / 'ray'}")
        # As in the Ray that a run starts itself: the default niceness of 15 puts every other program first, and idle
        # workers, one per core, are of no use to roles with environments of their own.
        ours = {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
        started = {**os.environ, "RAY_AUTH_MODE": "disabled", **ours, **(env or {})}
        for name in ("RAY_ADDRESS", "PYTHONPATH"):
            started.pop(name, None)
        log = open(home / "out.txt", "w")
        process = subprocess.Popen(command, cwd=home, env=started, stdout=log, stderr=subprocess.STDOUT)
        self._started.append(process)
        if wait:
            self.wait_up()
        return process

    def close(self):
        """End all of it, the last node first."""
        for process in reversed(self._started):
            end_tree(process.pid)
        self._started = []
        self._held.close()


def port_below_the_ephemeral_ones():
    """A socket on a free port that no part of Ray takes: its dashboard agent listens on 52365 whatever port the system
    would give out next, and its workers on 10002 to 19999. While it is open nobody else gets the port; the head binds
    it beside, as told at `roll_async/cluster/network.py: held_port`.
    """
    while True:
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("127.0.0.1", random.randrange(20_000, 32_768)))
            return held
        except OSError:
            held.close()


def kill_tree(pid):
    """SIGKILL for a process and everything below it."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=5)


def end_tree(pid):
    """End a process and everything below it."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    parent.terminate()
    _, left = psutil.wait_procs(family, timeout=10)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=5)
