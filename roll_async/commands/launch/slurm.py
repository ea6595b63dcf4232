"""A job of Slurm: Ray's head and workers by srun, the run beside the head."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from roll_async.commands.launch.job import ClusterJob

_SCRIPT = r"""#!/bin/bash
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@GPUS@
#SBATCH --exclusive
#SBATCH --requeue
@OPTIONS@
# From `roll-async launch --to slurm`. Exit codes are those of the run: 0 finished, 2 bad usage or config, 3 a role
# failed, 4 stalled, 130 interrupted with its state saved.
set -uo pipefail
cd @FOLDER@ || exit 2
if ! command -v roll-async > /dev/null || ! command -v ray > /dev/null; then
  echo "roll-async and ray are not in PATH: submit with the environment active" >&2
  exit 2
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r address _ < <(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address)
# By job, so that two jobs on one machine do not meet; below the ports of Ray's workers and of the system's clients.
port=$((20000 + SLURM_JOB_ID % 4000 * 3))
ports=(--node-manager-port=$((port + 1)) --object-manager-port=$((port + 2)))
ports+=(--min-worker-port=10002 --max-worker-port=19999 --num-gpus=@GPUS@ --disable-usage-stats)

# Every rank writes its part of a checkpoint into this folder.
shared=@OUTPUT@/.launch-"$SLURM_JOB_ID"
mkdir -p @OUTPUT@ && touch "$shared" || exit 2
if ! srun --ntasks-per-node=1 test -f "$shared"; then
  echo "output_dir" @OUTPUT@ "is not the same folder on every node; set output_dir to one that is" >&2
  rm -f "$shared"
  exit 2
fi
rm -f "$shared"

trap 'srun --overlap --ntasks-per-node=1 ray stop > /dev/null 2>&1' EXIT
srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" ray start --head --block --node-ip-address="$address" \
  --port="$port" "${ports[@]}" --include-dashboard=false &
for node in "${nodes[@]:1}"; do
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" ray start --block --address="$address:$port" "${ports[@]}" &
done

# A run refuses a cluster that is smaller than its mappings: it starts when all nodes are there.
export RAY_ADDRESS="$address:$port"
count='import ray; ray.init(log_to_driver=False); print(sum(node["Alive"] for node in ray.nodes()))'
for _ in $(seq 60); do
  joined=$(python -c "$count" 2> /dev/null || echo 0)
  [ "$joined" -ge @NODES@ ] && break
  sleep 5
done
if [ "$joined" -lt @NODES@ ]; then
  echo "$joined of @NODES@ nodes joined Ray within 5 minutes: read what ray start says above" >&2
  exit 4
fi

again=()
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && again=(checkpoint.resume_from=latest)
@COMMAND@ "${again[@]}" &
run=$!
# Slurm's signal before the time limit: the step under way ends, and the state is saved.
trap 'kill -TERM "$run" 2> /dev/null' TERM INT
wait "$run"
code=$?
while kill -0 "$run" 2> /dev/null; do
  wait "$run"
  code=$?
done
exit "$code"
"""


def script(job: ClusterJob, options: Sequence[str] = ()) -> str:
    """The batch script. `options`: of sbatch, such as `partition=gpu`. Raises ValueError for one that is none."""
    for option in options:
        if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", option):
            raise ValueError(f"--sbatch {option!r}: expected an option of sbatch without dashes, such as partition=gpu")
    values = {
        "NAME": re.sub(r"[^\w.-]", "_", job.name),
        "NODES": str(job.num_nodes),
        "GPUS": str(job.gpus_per_node),
        "OPTIONS": "\n".join(f"#SBATCH --{option}" for option in (*options, "signal=B:TERM@300")),
        "FOLDER": shlex.quote(str(Path.cwd())),
        "OUTPUT": shlex.quote(str(job.output_dir)),
        "COMMAND": shlex.join(["roll-async", "run", "--config", str(job.config), *job.overrides]),
    }
    # In one pass, so that a value with an @ in it stays as it is.
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], _SCRIPT)
