"""Ray itself: embedded on this machine, or joined at RAY_ADDRESS. Nothing outside `cluster/` imports Ray."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._private.worker import global_worker
from ray.util import list_named_actors

from roll_async.buffer.errors import StallError
from roll_async.cluster.address import require_cluster
from roll_async.cluster.placement import pretended_gpus
from roll_async.cluster.reaper import reaper
from roll_async.config.user_code import FOLDERS_VARIABLE
from roll_async.observe.trace import DRIVER, starting

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_NAMES_FREE_WITHIN_S, _NAMES_POLL_S = 30.0, 0.1
# For shares of batches; weights travel past it. Ray alone would take 30 % of the memory.
_EMBEDDED_OBJECT_STORE_BYTES = 512 << 20
_SINGLE_HOST_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, Ray expects a single machine and binds every port to loopback, on Linux too."""
_OWN_VARIABLES = (
    "RAY_AUTH_MODE",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    "RAY_worker_niceness",
    "RAY_prestart_worker_first_driver",
    "RAY_enable_worker_prestart",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeInfo:
    """Where the roles run."""

    embedded: bool
    """True: this process started Ray; everything binds to loopback and dies with this process."""


@contextmanager
def ray_runtime(*, num_processes: int, env: dict[str, str]) -> Iterator[RuntimeInfo]:
    """Start or join Ray for the duration of the block; afterwards no process of the run is left.

    `num_processes`: role processes that must fit on the embedded node. `env`: environment of every role process.
    Raises ValueError when nothing answers at RAY_ADDRESS, or it is that of a job server.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address:
        require_cluster(address)
    found = {FOLDERS_VARIABLE: os.environ.get(FOLDERS_VARIABLE, "")}
    runtime_env = {"env_vars": {"PYTHONPATH": _python_path(), **found, **env}}
    # The reaper is outermost: it ends what Ray's own shutdown leaves behind.
    with reaper() as add_folder, _settings_put_back():
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        with starting(DRIVER, "ray"):
            _connect(address, runtime_env, num_processes)
        if not address:  # in the session of a joined cluster other runs have files open, too
            add_folder(str(session_folder()))
        try:
            yield RuntimeInfo(embedded=not address)
        finally:
            ray.shutdown()


@contextmanager
def _settings_put_back() -> Iterator[None]:
    """Restore Ray's environment variables and module settings after the block: the next cluster of this process, or of
    a child, may have several machines.
    """
    names = (*_OWN_VARIABLES, _SINGLE_HOST_VARIABLE)
    before = {name: os.environ.get(name) for name in names}
    may_be_many = ray_constants.ENABLE_RAY_CLUSTER
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = may_be_many
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _connect(address: str | None, runtime_env: dict[str, dict[str, str]], num_processes: int) -> None:
    if address:
        ray.init(address=address, runtime_env=runtime_env, log_to_driver=False, logging_level=logging.WARNING)
        logger.info("joined the Ray cluster at %s", ray.get_runtime_context().gcs_address)
    else:
        os.environ.setdefault("RAY_worker_niceness", "0")  # the default of 15 puts every other program first
        # Ray starts an idle worker per core beforehand; ours have environments of their own and can take none of them.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "false")
        os.environ.setdefault("RAY_enable_worker_prestart", "false")
        os.environ[_SINGLE_HOST_VARIABLE] = "0"  # for Ray's own processes
        ray_constants.ENABLE_RAY_CLUSTER = False  # for this one, where it was read at import
        pretended = pretended_gpus()
        if pretended:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(pretended)))  # Ray offers no others
        ray.init(
            address="local",
            # A process asks for one CPU: with fewer cores than roles the last would wait for ever.
            num_cpus=max(num_processes, os.cpu_count() or 1),
            num_gpus=pretended or None,
            include_dashboard=False,
            object_store_memory=_EMBEDDED_OBJECT_STORE_BYTES,
            runtime_env=runtime_env,
            log_to_driver=False,  # roles have files of their own, see role_log.py
            logging_level=logging.WARNING,
        )
        logger.info("started Ray on this machine (%s)", ray.get_runtime_context().get_node_id()[:8])


async def wait_names_free() -> None:
    """Wait until Ray knows no role by its name any more: one that was killed is there for a moment longer, and another
    one of its name would be refused. Raises StallError when that takes too long.
    """
    for _ in range(round(_NAMES_FREE_WITHIN_S / _NAMES_POLL_S)):
        if not (left := await asyncio.to_thread(list_named_actors)):
            return
        await asyncio.sleep(_NAMES_POLL_S)
    raise StallError(
        f"roles that were ended are still there after {_NAMES_FREE_WITHIN_S:g} s: {', '.join(sorted(left))}"
    )


def session_folder() -> Path:
    """Folder of the Ray session this process is connected to, logs of all role processes included."""
    node = global_worker.node
    assert node is not None, "not connected to Ray"
    return Path(node.get_session_dir_path())


def _python_path() -> str:
    """The package must be importable in role processes also when it runs from a checkout."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "")
    # Absolute: a worker starts in another folder.
    return os.pathsep.join([root, *(os.path.abspath(folder) for folder in inherited.split(os.pathsep) if folder)])
