"""A RayJob of KubeRay (`ray.io/v1`): the cluster of a config, which ends with the run."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from pathlib import Path

from roll_async.commands.launch.job import ClusterJob
from roll_async.config.api import dump
from roll_async.config.schema import RunConfig
from roll_async.config.secrets import without_secrets
from roll_async.config.yaml.emit import to_yaml

_CONFIG = "/etc/roll_async/config.yaml"


def manifest(job: ClusterJob, config: RunConfig, image: str | None, claim: str | None) -> str:
    """A ConfigMap with the resolved config, and the RayJob. `claim`: the volume that all pods share, at output_dir.
    Raises ValueError for what pods cannot share.
    """
    if image is None or claim is None:
        raise ValueError("--image and --claim: needed with --to kuberay")
    if not Path(config.output_dir).is_absolute():
        raise ValueError(f"output_dir={config.output_dir}: pods share {claim} at this path; give an absolute one")
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    name = (name if name[:1].isalpha() else f"run-{name}")[:40].rstrip("-")  # a label of DNS-1035
    meta = {"name": name}
    head = {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": _pod(job, name, "head", image, claim)}
    size = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), job.num_nodes - 1)
    workers = {
        "groupName": "nodes",
        **size,
        "rayStartParams": {},
        "template": _pod(job, name, "worker", image, claim),
    }
    cluster = {"rayVersion": version("ray"), "headGroupSpec": head}
    if job.num_nodes > 1:
        cluster["workerGroupSpecs"] = [workers]
    run = f"cd {shlex.quote(str(job.output_dir))} && exec roll-async run --config {_CONFIG}"
    spec = {
        "entrypoint": shlex.join(["bash", "-c", run]),  # one command in the line of the submitter's shell
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        # A run that ended is looked at first: a second one would begin anew beside its folder.
        "backoffLimit": 0,
        "rayClusterSpec": cluster,
    }
    text = dump(without_secrets(config))
    objects = (
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"config.yaml": text}},
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": meta, "spec": spec},
    )
    return "---\n".join(to_yaml(each) for each in objects)


def _pod(job: ClusterJob, name: str, role: str, image: str, claim: str) -> dict[str, object]:
    gpus = {"nvidia.com/gpu": job.gpus_per_node}
    mounts = {"run": str(job.output_dir), "config": _CONFIG.rpartition("/")[0], "shm": "/dev/shm"}
    container = {
        "name": f"ray-{role}",
        "image": image,
        "resources": {"limits": gpus, "requests": gpus},
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
    }
    volumes = [
        {"name": "run", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "config", "configMap": {"name": name}},
        # Ray's objects and NCCL; a pod's own /dev/shm has 64 MiB.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    return {"spec": {"containers": [container], "volumes": volumes}}
