"""Commands work from whatever folder they are typed in: in the script's own, in one outside of the checkout, with a
config of one's own there. Typed in a copy of the checkout, whose demo assets are files without content, with one input
that is nowhere: the run is refused for that one alone, so that all others were found.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "pretrain=./nowhere"
REFUSED = (
    "<override pretrain=./nowhere>: error C204: pretrain: model folder ./nowhere does not exist or holds no config.json"
)
HOME = "../home"
MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256,
    "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "vocab_size": 48, "tie_word_embeddings": True,
}  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what a clone has, with assets; a folder of a user beside it."""
    folder = tmp_path_factory.mktemp("anywhere") / "checkout"
    for name in ("roll_async", "configs", "examples", "recipe", "tools"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    assets = folder / "output" / "demo_assets"
    (assets / "model").mkdir(parents=True)
    (assets / "model" / "config.json").write_text(json.dumps(MODEL))
    for name in ("train.jsonl", "validation.jsonl", "test.jsonl"):
        (assets / name).write_text("")
    home = folder.parent / "home"
    home.mkdir()
    (home / "mine.yaml").write_text("defaults: [fully_async_cpu]\nmax_steps: 2\n")
    (home / "fully_async_cpu.yaml").write_text("defaults: [fully_async_cpu]\nmax_steps: 3\n")
    (home / "absolute.yaml").write_text(f"defaults: [{home}/mine.yaml]\n")
    (home / "own_data.yaml").write_text(
        "defaults: [mine]\nactor_train: {data_args: {file_name: output/demo_assets/train.jsonl}}\n"
    )
    return folder


def typed(checkout, where, line, **env):
    """What a shell says of a line typed in a folder of the checkout."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "PYTHONPATH", "WANDB_API_KEY")}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=checkout / where, timeout=patient(120),
        env={**kept, "PATH": programs, "PYTHON": sys.executable, **env},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def errors(said):
    return [line for line in said.splitlines() if ": error " in line]


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("examples", "python fully_async_custom.py"),
        ("examples", "python fully_async_main.py"),
        ("examples", "python fully_async_custom.py --config-path ../configs --config-name fully_async_cpu"),
        ("examples", "python fully_async_main.py --config-path configs --config-name fully_async_cpu"),
        ("examples", "python start_rlvr_pipeline.py --config rlvr_config_async_cpu.yaml"),
        ("configs", "python ../examples/start_rlvr_pipeline.py --config rlvr_config_async_cpu"),
        (HOME, "python ../checkout/examples/fully_async_custom.py"),
        (HOME, "python ../checkout/examples/fully_async_main.py --config-path . --config-name mine"),
        (HOME, "python ../checkout/examples/fully_async_main.py --config fully_async_cpu"),
        (HOME, "python ../checkout/examples/start_rlvr_pipeline.py --config absolute"),
        (HOME, "python ../checkout/examples/start_rlvr_pipeline.py --config configs/rlvr_config_sync_cpu.yaml"),
        ("recipe/async_dapo", "MATH_VERIFY_URL= CONFIG=async_dapo_cpu.yaml bash test_7b.sh n_resp_per_prompt=8"),
        ("recipe/dapo", "RAY_ADDRESS=local CONFIG=dapo_cpu.yaml TRAIN_FILE= TEST_FILE= bash run_dapo_qwen2.5_32b.sh"),
        (HOME, "RAY_ADDRESS=local CONFIG=dapo_cpu.yaml TRAIN_FILE= TEST_FILE= "
               "bash ../checkout/recipe/dapo/run_dapo_wo_ds_qwen2.5_32b.sh"),
    ],
)  # fmt: skip
def test_a_start_script_finds_what_shipped_configs_name_from_every_folder(checkout, where, line):
    engine = "actor_infer.strategy_args={strategy_name: hf_infer}"
    code, said = typed(checkout, where, f"{line} {NOWHERE} {engine!r} exp_name=run")
    assert (code, errors(said)) == (2, [REFUSED]), said


def test_the_assets_that_are_not_there_are_named_with_the_command_that_makes_them(checkout):
    (checkout / "output" / "demo_assets").rename(checkout / "output" / "away")
    try:
        code, said = typed(checkout, "examples", "python fully_async_custom.py")
    finally:
        (checkout / "output" / "away").rename(checkout / "output" / "demo_assets")
    found = [line for line in errors(said) if "demo_assets" in line]
    assert code == 2 and len(found) == 3, said
    assert all(line.endswith("; make it with: roll-async demo --assets-only") for line in found)


def test_what_a_script_of_the_checkout_makes_is_named_with_its_folder(checkout):
    rows = "actor_train.data_args.file_name=math_deepmath.jsonl"
    line = f"python ../checkout/examples/start_rlvr_pipeline.py --config rlvr_gsm8k_cpu {rows}"
    code, said = typed(checkout, HOME, line)
    assert code == 2 and f"(without a network: --source bundled) (in {checkout})" in said, said
    assert "; make it with: roll-async demo --assets-only gsm8k\n" in said, said


def test_what_a_users_own_file_names_is_not_taken_from_the_checkout(checkout):
    line = "python ../checkout/examples/start_rlvr_pipeline.py --config own_data"
    code, said = typed(checkout, HOME, line)
    assert code == 2 and "own_data.yaml:2: error C204: actor_train.data_args.file_name: data file output/demo" in said


@pytest.mark.parametrize("command", ["validate", "show", "plan"])
def test_the_other_commands_know_shipped_names_too(checkout, command):
    engine = "actor_infer.strategy_args={strategy_name: hf_infer}"
    code, said = typed(checkout, HOME, f"{sys.executable} -m roll_async.cli {command} dapo_cpu {engine!r}",
                       PYTHONPATH=str(checkout))  # fmt: skip
    assert code == 0, said
    assert command != "show" or f"pretrain: {checkout}/output/demo_assets/model" in said


def test_the_agents_of_the_examples_are_found_where_the_package_alone_is_on_the_path(checkout, tmp_path):
    (tmp_path / "roll_async").symlink_to(checkout / "roll_async")
    line = f"{sys.executable} -m roll_async.cli validate agentic_calculator_cpu tracking.track_with=[]"
    code, said = typed(checkout, HOME, line, PYTHONPATH=str(tmp_path))
    assert "calculator_agent" not in said and (code == 0 or "vllm is not installed" in said), said


@pytest.mark.parametrize("where", [".", "recipe/async_dapo"])
def test_the_data_scripts_of_the_asynchronous_recipe_run_from_the_root_and_from_their_own_folder(
    checkout, where, tmp_path
):
    pytest.importorskip("pyarrow")
    prefix = "recipe/async_dapo/" if where == "." else ""
    row = {"problem": "1+1?", "answer": "2"}
    (tmp_path / "aime.jsonl").write_text(json.dumps(row) + "\n")
    line = f"python3 {prefix}process_aime24.py --local_dir {tmp_path}/aime24_sys --source {tmp_path}/aime.jsonl"
    code, said = typed(checkout, where, line)
    assert code == 0 and (tmp_path / "aime24_sys" / "test.parquet").is_file(), said
    for script in ("process_skywork.py", "math_verify_service.py"):
        code, said = typed(checkout, where, f"python3 {prefix}{script} --help")
        assert code == 0 and "usage: " in said


@pytest.mark.parametrize("where", [".", "recipe/dapo"])
def test_the_data_script_of_dapo_runs_from_the_root_and_from_its_own_folder(checkout, where, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    prompt = [{"role": "user", "content": "1+1?"}]
    row = {"prompt": prompt, "reward_model": {"ground_truth": "2", "style": "rule"}, "data_source": "math_dapo",
           "ability": "MATH", "extra_info": {"index": "a"}}  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "raw.parquet")
    prefix = "recipe/dapo/" if where == "." else ""
    raw = str(tmp_path / "raw.parquet")
    code, said = typed(
        checkout, where, f"bash {prefix}prepare_dapo_data.sh", HOME=str(tmp_path), TRAIN_URL=raw, TEST_URL=raw
    )
    assert code == 0, said
    assert {file.name for file in (tmp_path / "verl/data").iterdir()} == {"dapo-math-17k.parquet", "aime-2024.parquet"}
