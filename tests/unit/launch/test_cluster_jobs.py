"""`roll-async launch`: scripts for Slurm run here under stand-ins of its programs, manifests have KubeRay's fields."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from roll_async.cli import main
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "configs" / "rlvr_config_async.yaml")  # 8 + 8 + 8 GPUs
KUBERAY = ("--to", "kuberay", "--image", "me/roll:1", "--claim", "runs", "output_dir=/runs")
STAND_INS = {
    # The script comes on standard input; Slurm tells it of the job.
    "sbatch": 'cat > "$HERE/job.sh"; SLURM_JOB_ID=4007 SLURM_JOB_NODELIST="n[1-3]" exec bash "$HERE/job.sh"',
    "scontrol": 'echo "scontrol $*" >> "$HERE/log"; printf "n1\\nn2\\nn3\\n"',
    "srun": 'while [[ "$1" == --* ]]; do to="$to $1"; shift; done; echo "srun$to: $*" >> "$HERE/log"; exec "$@"',
    "hostname": 'echo "10.0.0.1 10.0.0.9"',
    "ray": 'echo "ray $*" >> "$HERE/log"',
    "python": 'echo "${NODES:-3}"',
    "sleep": "true",
    "roll-async": 'echo "run $RAY_ADDRESS $*" >> "$HERE/log"; trap "exit 130" TERM; touch "$HERE/runs"; '
    '[ -z "${LONG:-}" ] || for i in $(seq 3000); do /bin/sleep 0.1; done; exit "${CODE:-0}"',
    "kubectl": 'echo "kubectl $*" >> "$HERE/log"; cat > "$HERE/manifest.yaml"',
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder in which programs of a cluster are stand-ins, which keep a log."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def log(folder):
    return (folder / "log").read_text().splitlines() if (folder / "log").exists() else []


def script(capsys, *arguments):
    assert main(["launch", CONFIG, "--to", "slurm", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


def test_a_script_asks_for_the_nodes_and_gpus_of_the_mappings(cluster, capsys):
    text = script(capsys, "--sbatch", "partition=gpu", "--sbatch", "time=24:00:00", "exp_name=a b", "max_steps=5")
    asked = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"nodes=3", "gpus-per-node=8", "partition=gpu", "time=24:00:00", "job-name=a_b"} <= asked
    assert f"roll-async run --config {CONFIG} 'exp_name=a b' max_steps=5" in text and "@" not in text.replace(
        "[@]", ""
    ).replace("TERM@", "")
    assert log(cluster) == [], "a dry run submits nothing"


@pytest.mark.skipif(shutil.which("shellcheck") is None and not (Path(sys.prefix) / "bin" / "shellcheck").exists(),
                    reason="no shellcheck")  # fmt: skip
def test_shellcheck_finds_nothing_in_a_script(cluster, capsys):
    program = shutil.which("shellcheck") or str(Path(sys.prefix) / "bin" / "shellcheck")
    text = script(capsys, "exp_name=a b", "output_dir=/shared/my runs")
    found = subprocess.run([program, "-"], input=text, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
def test_a_submitted_script_starts_ray_on_every_node_then_the_run_and_stops_ray(cluster):
    assert main(["launch", CONFIG, "--to", "slurm", "max_steps=5"]) == 0
    port = 20000 + 4007 % 4000 * 3
    start = f"ray start --block --address=10.0.0.1:{port} --node-manager-port={port + 1}"
    deadline = time.monotonic() + patient(30)
    while sum(line.startswith(start) for line in log(cluster)) < 2:  # the script waits for Ray, not for its stand-ins
        assert time.monotonic() < deadline, log(cluster)
        time.sleep(0.05)
    said = log(cluster)
    (head,) = [line for line in said if line.startswith("ray start --head")]
    assert f"--node-ip-address=10.0.0.1 --port={port} " in head and "--num-gpus=8" in head
    assert sorted(line.partition(":")[0] for line in said if line.startswith("srun") and start in line) == [
        f"srun --overlap --nodes=1 --ntasks=1 --nodelist=n{n}" for n in (2, 3)
    ]
    (run,) = [line for line in said if line.startswith("run ")]
    assert run == f"run 10.0.0.1:{port} run --config {CONFIG} max_steps=5"
    assert said.index(run) < said.index("ray stop") and list((cluster / "output").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("code", [2, 3, 4])
def test_the_exit_code_of_a_script_is_that_of_the_run(cluster, monkeypatch, code):
    monkeypatch.setenv("CODE", str(code))
    assert main(["launch", CONFIG, "--to", "slurm"]) == code
    assert "ray stop" in log(cluster)


@pytest.mark.slow
def test_a_job_that_slurm_starts_again_goes_on_from_its_checkpoint(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert main(["launch", CONFIG, "--to", "slurm"]) == 0
    assert [line for line in log(cluster) if line.startswith("run ") and line.endswith("checkpoint.resume_from=latest")]


@pytest.mark.slow
def test_the_signal_before_the_time_limit_reaches_the_run_whose_code_is_told(cluster, monkeypatch, capsys):
    (cluster / "job.sh").write_text(script(capsys))
    env = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n", "LONG": "1"}
    job = subprocess.Popen(["bash", str(cluster / "job.sh")], env=env, cwd=cluster)
    try:
        deadline = time.monotonic() + patient(30)
        while not (cluster / "runs").exists():
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=patient(30)) == 130
    finally:
        job.kill()
    assert "ray stop" in log(cluster)


@pytest.mark.slow
def test_a_folder_that_some_node_does_not_see_is_refused_before_ray_starts(cluster, capfd):
    (cluster / "bin" / "srun").write_text(
        '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\n[ "$1" != test ] && "$@"\n'
    )
    assert main(["launch", CONFIG, "--to", "slurm"]) == 2
    assert f"output_dir {cluster}/output is not the same folder on every node" in capfd.readouterr().err
    assert not [line for line in log(cluster) if line.startswith(("ray", "run"))]


@pytest.mark.slow
def test_a_node_that_does_not_join_ends_the_job_with_the_number_of_those_that_did(cluster, monkeypatch, capfd):
    monkeypatch.setenv("NODES", "2")
    assert main(["launch", CONFIG, "--to", "slurm"]) == 4
    assert "2 of 3 nodes joined Ray within 5 minutes" in capfd.readouterr().err
    assert "ray stop" in log(cluster) and not [line for line in log(cluster) if line.startswith("run ")]


def test_a_manifest_has_the_fields_of_a_rayjob_and_the_config_as_it_is_resolved(cluster, capsys):
    """Names as in ray.io_rayjobs.yaml of KubeRay, whose whole schema accepts it."""
    assert main(["launch", CONFIG, *KUBERAY, "--dry-run", "max_steps=5"]) == 0
    files, job = yaml.safe_load_all(capsys.readouterr().out)
    assert (files["kind"], job["apiVersion"], job["kind"]) == ("ConfigMap", "ray.io/v1", "RayJob")
    assert yaml.safe_load(files["data"]["config.yaml"])["max_steps"] == 5
    spec, cluster_spec = job["spec"], job["spec"]["rayClusterSpec"]
    assert spec.keys() == {
        "entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit", "rayClusterSpec",
    }  # fmt: skip
    # KubeRay's submitter has it in a line of its own shell, where an && of ours would end `ray job submit`.
    run = "cd /runs && exec roll-async run --config /etc/roll_async/config.yaml"
    assert shlex.split(spec["entrypoint"]) == ["bash", "-c", run]
    (workers,) = cluster_spec["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (2, 2, 2)
    for group in (cluster_spec["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "me/roll:1" and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert {"name": "run", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]


@pytest.mark.parametrize("name", ["7B Qwen_Async", "_", "a" * 39 + "-b", "Äé-1"])
def test_the_name_of_a_rayjob_is_one_that_kuberay_accepts(cluster, capsys, name):
    assert main(["launch", CONFIG, *KUBERAY, "--dry-run", f"exp_name={name}"]) == 0
    for each in yaml.safe_load_all(capsys.readouterr().out):
        assert re.fullmatch("[a-z]([a-z0-9-]{0,38}[a-z0-9])?", each["metadata"]["name"]), each["metadata"]


def test_one_node_has_no_workers(cluster, capsys):
    mappings = ("actor_train.device_mapping=range(0,4)", "actor_infer.device_mapping=range(4,6)")
    assert main(["launch", CONFIG, *KUBERAY, "--dry-run", *mappings]) == 0
    _, job = yaml.safe_load_all(capsys.readouterr().out)
    assert "workerGroupSpecs" not in job["spec"]["rayClusterSpec"]
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 6}


def test_a_manifest_is_given_to_kubectl(cluster):
    assert main(["launch", CONFIG, *KUBERAY]) == 0
    assert log(cluster) == ["kubectl apply -f -"]
    assert [each["kind"] for each in yaml.safe_load_all((cluster / "manifest.yaml").read_text())] == [
        "ConfigMap",
        "RayJob",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((CONFIG,), "--to slurm or --to kuberay: needed"),
        ((CONFIG, "--to", "slrum"), "'slrum' is not one of 'slurm', 'kuberay'"),
        (("rlvr_config_async_cpu", "--to", "slurm"), "has no device_mapping: it runs on one machine"),
        ((CONFIG, "--to", "slurm", "--image", "x"), "--image: has no effect with --to slurm"),
        ((CONFIG, "--to", "slurm", "--sbatch", "--time=1\nrm"), "expected an option of sbatch without dashes"),
        ((CONFIG, *KUBERAY, "--sbatch", "time=1"), "--sbatch: has no effect with --to kuberay"),
        ((CONFIG, "--to", "kuberay"), "--image and --claim: needed with --to kuberay"),
        ((CONFIG, *KUBERAY[:-1]), "output_dir=./output: pods share runs at this path; give an absolute one"),
        ((CONFIG, "--to", "slurm", "max_stesp=1"), "did you mean 'max_steps'?"),
        (("nowhere", "--to", "slurm"), "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_submits_nothing(cluster, capsys, arguments, told):
    assert main(["launch", *arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    assert len(errors) == 1 and told in errors[0]
    assert log(cluster) == []


def test_a_program_that_is_not_here_is_named(cluster, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", CONFIG, "--to", "slurm"]) == 2
    assert "sbatch is not here; --dry-run prints what it would get" in capsys.readouterr().err
