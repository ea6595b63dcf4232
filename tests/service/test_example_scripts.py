"""The start scripts of the recipes: what they hand to the program is a valid run, by default and with overrides."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "dapo/run_dapo_qwen2.5_32b.sh": "dapo_qwen2.5_32b",
    "dapo/run_dapo_wo_ds_qwen2.5_32b.sh": "dapo_wo_dynamic_sampling_qwen2.5_32b",
    "dapo/run_dapo_early_qwen2.5_32b.sh": "dapo_early_qwen2.5_32b",
    "async_dapo/test_7b.sh": "async_dapo_7b",
}
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@pytest.fixture
def start(tmp_path):
    """Run a script with a `python` that resolves the config it is given instead of training it."""
    program = tmp_path / "python"
    show = f'cd {ROOT}/configs && exec {sys.executable} -m roll_async.cli show "$@"'
    program.write_text(f'#!/usr/bin/env bash\necho "started $1"\nshift 2\n{show}\n')
    program.chmod(0o755)

    def run(script, *arguments, **env):
        inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "WANDB_API_KEY", "MODEL_PATH")}
        env = {"RAY_ADDRESS": "local", "PYTHON": str(program), "MATH_VERIFY_URL": "", "PYTHONPATH": str(ROOT), **env}
        command = ["bash", str(ROOT / "examples" / script), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, env={**inherited, **env}, cwd=ROOT, timeout=patient(60)
        )

    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_start_script_hands_over_a_valid_config_and_the_users_overrides(start, script):
    done = start(script, "max_steps=7", MODEL_PATH="/models/mine", HOME_DIR="/home/me", WANDB_API_KEY="k")
    assert done.returncode == 0, done.stderr
    assert f"started {ROOT}/examples/start_rlvr_pipeline.py" in done.stdout
    assert "max_steps: 7" in done.stdout and "pretrain: /models/mine" in done.stdout
    assert "track_with: [wandb]" in done.stdout


def test_what_the_asynchronous_recipe_exports_has_its_package_in_the_line_that_installs():
    page = (ROOT / "recipe" / "async_dapo" / "README.md").read_text()
    extras = re.search(r'pip install -e "\.\[([a-z,]*)\]"', page)[1].split(",")
    assert "export WANDB_API_KEY=" in page and "wandb" in extras


def test_the_asynchronous_recipe_has_the_documents_numbers_and_the_service(start):
    done = start("async_dapo/test_7b.sh", HOME_DIR="/home/me")
    for line in ("num_return_sequences_in_group: 16", "batch_creation_interval: 10", "max_concurrent_per_server: 512",
                 "/home/me/data/skywork_or1_1_5b_diff_sys/train.parquet", "/home/me/data/aime24_sys/test.parquet",
                 "type: math_service", 'api_url: "http://127.0.0.1:8300"', "metric: score"):  # fmt: skip
        assert line in done.stdout, line


DEMOS = {
    "dapo/run_dapo_qwen2.5_32b.sh": ("dapo_cpu", "token-mean", True),
    "dapo/run_dapo_wo_ds_qwen2.5_32b.sh": ("dapo_wo_dynamic_sampling_cpu", "token-mean", False),
    "dapo/run_dapo_early_qwen2.5_32b.sh": ("dapo_early_cpu", "seq-mean-token-mean", False),
    "async_dapo/test_7b.sh": ("async_dapo_cpu", "token-mean", True),
}


@pytest.mark.parametrize("script", DEMOS)
def test_the_command_for_a_laptop_that_a_script_names_is_the_same_algorithm_on_the_demo(start, script):
    config, aggregation, dynamic = DEMOS[script]
    named = re.search(r"CONFIG=(\w+)\.yaml", (ROOT / "examples" / script).read_text().partition("set -euo")[0])
    assert named and named[1] == config
    done = start(script, CONFIG=f"{config}.yaml", TRAIN_FILE="", TEST_FILE="", n_resp_per_prompt="8")
    assert done.returncode == 0, done.stderr
    section = done.stdout.partition("filter_groups:")[2].split("metric")[0]
    assert f"enable: {str(dynamic).lower()}" in section and f"loss_agg_mode: {aggregation}" in done.stdout
    for line in ("clip_high: 0.28", "num_return_sequences_in_group: 8", "output/demo_assets/train.jsonl",
                 "penalty_factor: 1", "world_size: 1"):  # fmt: skip
        assert line in done.stdout, line


def test_the_laptop_run_on_real_rows_asks_the_service_and_runs_ahead_like_the_full_one(start, service):
    """The service that the script asks for its health is a real one."""
    url = service.url
    done = start(
        "async_dapo/test_7b.sh", CONFIG="async_dapo_gsm8k_cpu.yaml", n_resp_per_prompt="4", MATH_VERIFY_URL=url
    )
    assert done.returncode == 0, done.stderr
    for line in ("type: math_service", f'api_url: "{url}"', "data/gsm8k/train.jsonl", "async_generation_ratio: 1",
                 "mode: resume", "clip_high: 0.28", "loss_agg_mode: token-mean"):  # fmt: skip
        assert line in done.stdout, line


def test_the_asynchronous_recipe_does_not_start_without_the_service(start, own_port):
    done = start("async_dapo/test_7b.sh", MATH_VERIFY_URL=f"http://127.0.0.1:{own_port()}")
    assert done.returncode == 2 and "no math verify service" in done.stderr and "started" not in done.stdout


@pytest.mark.parametrize(
    ("script", "dynamic", "aggregation"),
    [
        ("dapo/run_dapo_qwen2.5_32b.sh", True, "token-mean"),
        ("dapo/run_dapo_wo_ds_qwen2.5_32b.sh", False, "token-mean"),
        ("dapo/run_dapo_early_qwen2.5_32b.sh", False, "seq-mean-token-mean"),
    ],
)
def test_the_three_variants_of_dapo_differ_where_the_documents_say(start, script, dynamic, aggregation, tmp_path):
    done = start(script, HOME=str(tmp_path))
    section = done.stdout.partition("filter_groups:")[2]
    assert f"enable: {str(dynamic).lower()}" in section.split("metric")[0]
    assert f"loss_agg_mode: {aggregation}" in done.stdout
    for line in ("clip_low: 0.2", "clip_high: 0.28", "len: 4096", "penalty_factor: 1", "response_length: 20480",
                 f"{tmp_path}/verl/data/dapo-math-17k.parquet", f"{tmp_path}/verl/data/aime-2024.parquet"):  # fmt: skip
        assert line in done.stdout, line


@pytest.fixture
def submitted(tmp_path):
    """Type shell lines at the repository's root with a `ray` that tells what it was given instead of submitting it."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    told = tmp_path / "told.json"
    (bin_folder / "ray").write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\nwords = sys.argv[1:]\n"
        "env = pathlib.Path(words[words.index('--runtime-env') + 1])\n"
        f"told = {{'words': words, 'env': env.read_text(), 'mode': env.stat().st_mode & 0o777, 'path': str(env)}}\n"
        f"pathlib.Path({str(told)!r}).write_text(json.dumps(told))\n"
    )
    (bin_folder / "ray").chmod(0o755)

    def type_lines(lines):
        inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "WANDB_API_KEY", "MODEL_PATH")}
        env = {**inherited, "HOME": str(tmp_path), "PYTHON": sys.executable}
        env["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-ec", lines], capture_output=True, text=True, env=env, cwd=ROOT, timeout=patient(60)
        )
        assert done.returncode == 0, done.stderr
        return json.loads(told.read_text())

    return type_lines


def test_the_documents_quick_start_submits_a_run_with_folder_environment_and_a_place_that_lasts(submitted, tmp_path):
    """Line by line as the DAPO document has it, in one shell."""
    told = submitted(
        """
        export WANDB_API_KEY=secret
        export RAY_ADDRESS="http://${RAY_IP:-localhost}:8265"
        export WORKING_DIR="${PWD}"
        export RUNTIME_ENV="./recipe/dapo/runtime_env.yaml"
        bash recipe/dapo/run_dapo_qwen2.5_32b.sh max_steps=7
        """
    )
    words, env = told["words"], yaml.safe_load(told["env"])
    assert words[:4] == ["job", "submit", "--no-wait", "--address"] and words[4] == "http://localhost:8265"
    assert words[words.index("--working-dir") + 1] == str(ROOT)
    after = words[words.index("--") + 1 :]
    assert after[:4] == ["python3", "examples/start_rlvr_pipeline.py", "--config", "dapo_qwen2.5_32b.yaml"]
    assert {"max_steps=7", "tracking.track_with=wandb", f"output_dir={tmp_path}/verl/output"} <= set(after)
    assert env["env_vars"]["WANDB_API_KEY"] == "secret" and "wandb" in env["pip"]
    assert env["env_vars"]["TORCH_NCCL_AVOID_RECORD_STREAMS"] == "1" and "/output/" in env["excludes"]
    assert told["mode"] == 0o600 and not Path(told["path"]).exists(), "the key is on no disk any more"
    assert "secret" not in " ".join(words)


def test_without_a_key_no_tracker_is_chosen_and_no_package_installed(submitted):
    told = submitted("RAY_ADDRESS= RAY_IP=10.0.0.1 OUTPUT_DIR=/shared/out bash recipe/dapo/run_dapo_qwen2.5_32b.sh")
    assert told["words"][4] == "http://10.0.0.1:8265" and "output_dir=/shared/out" in told["words"]
    assert "tracking.track_with=wandb" not in told["words"] and "wandb" not in told["env"].lower()


def test_the_address_of_a_job_server_left_in_the_shell_is_explained(tmp_path):
    """The next command of a reader who exported RAY_ADDRESS as the DAPO document says."""
    command = [
        sys.executable,
        "-c",
        "from roll_async.cluster.runtime import ray_runtime\nwith ray_runtime(num_processes=1, env={}): pass",
    ]
    env = {**os.environ, "RAY_ADDRESS": "http://localhost:8265", "PYTHONPATH": str(ROOT)}
    pytest.importorskip("ray")
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=patient(60))
    assert "is the address of Ray's job server: hand the run over with `ray job submit`" in done.stderr


def test_the_links_and_paths_of_the_documents_lead_to_the_recipes():
    links, scripts = ({f.stem for f in (ROOT / p / "dapo").iterdir() if f.is_file()} for p in ("recipe", "examples"))
    assert links == scripts, "a link to each"
    for name in (
        "async_dapo/process_skywork.py", "async_dapo/process_aime24.py", "async_dapo/math_verify_service.py",
        "async_dapo/test_7b.sh", "dapo/prepare_dapo_data.sh", "dapo/runtime_env.yaml", "dapo/run_dapo_qwen2.5_32b.sh",
    ):  # fmt: skip
        assert (ROOT / "recipe" / name).is_file(), name


def test_the_scripts_pass_shellcheck():
    found = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip("no shellcheck")
    scripts = sorted((ROOT / "examples").glob("*/*.sh"))
    done = subprocess.run([found, "-x", "-s", "bash", *map(str, scripts)], capture_output=True, text=True, cwd=ROOT)
    assert len(scripts) >= 6 and done.returncode == 0, done.stdout
