"""examples/my_project outside of the checkout: its commands are typed as its README has them, on the engine that every
platform has, on barely trained models.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

pytest.importorskip("megatron.core")
pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "actor_infer.strategy_args={strategy_name: hf_infer}"
RLVR = ("max_steps=2", "eval_steps=0", "rollout_batch_size=8", "response_length=16", "num_return_sequences_in_group=4",
        "actor_train.training_args.per_device_train_batch_size=32",
        "actor_train.training_args.gradient_accumulation_steps=1")  # fmt: skip
AGENTIC = ("max_steps=2", "eval_steps=0", "rollout_batch_size=8", "train_env_manager.group_size=4",
           "actor_train.training_args.per_device_train_batch_size=8",
           "actor_train.training_args.gradient_accumulation_steps=1")  # fmt: skip


@pytest.fixture
def project(tmp_path):
    return Path(shutil.copytree(ROOT / "examples" / "my_project", tmp_path / "mine"))


def typed(project, *arguments, timeout=300):
    """What `roll-async` says in the folder of the project. Only the package is where Python looks."""
    env = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "PYTHONPATH")}
    (project.parent / "package").mkdir(exist_ok=True)
    if not (link := project.parent / "package" / "roll_async").exists():
        link.symlink_to(ROOT / "roll_async")
    done = subprocess.run(
        [sys.executable, "-m", "roll_async.cli", *arguments], cwd=project, capture_output=True, text=True,
        env=env | {"PYTHONPATH": str(link.parent)}, timeout=patient(timeout),
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def steps(project, name):
    return [json.loads(line) for line in (project / "output" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_both_configs_validate(project):
    code, said = typed(project, "validate", "answers.yaml", "worlds.yaml")
    assert code == 0 and said.count("ok: ") == 2, said


@pytest.mark.long
def test_the_own_reward_loss_and_advantages_train(project, demo_assets):
    code, said = typed(project, "run", "--config", "answers.yaml", f"pretrain={demo_assets}/model",
                       f"validation.data_args.file_name={demo_assets}/validation.jsonl", ENGINE, *RLVR)  # fmt: skip
    assert code == 0, said
    (_, last) = steps(project, "my_answers")
    assert last["reward/metrics/words"] >= 0 and 0 <= last["policy/bent"] < 1
    assert (project / "output" / "my_answers" / "hf" / "config.json").is_file()


@pytest.mark.long
def test_the_own_world_tool_and_agent_play(project, agentic_model):
    code, said = typed(project, "run", "--config", "worlds.yaml", f"pretrain={agentic_model}", ENGINE, *AGENTIC)
    assert code == 0, said
    played = steps(project, "my_worlds")
    assert len(played) == 2
    assert {key.split("/")[1] for step in played for key in step if key.count("/outcomes/")} >= {"Guess", "Question"}


@pytest.fixture
def agentic_model(tmp_path):
    """Tokenizer and a model that has hardly learned its moves."""
    folder = tmp_path / "agentic_assets"
    script = (
        "import sys; sys.path.insert(0, 'tools'); import make_agentic_assets as m; "
        f"m.STEPS_WARM, m.LEAST_RIGHT_COPIES = 5, 0.0; sys.argv = ['x', '--output', {str(folder)!r}]; m.main()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, timeout=patient(300))
    return folder / "model"
