"""A GLM-4 and a Llama 3.1, both tiny, in an RLVR run with a tool and in an agentic run: the rows that are trained are
what their templates say of the whole conversation. docs_roll/families.md shows one of each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

pytest.importorskip("ray")
pytest.importorskip("megatron.core")

from tests.cluster.family_sums import CALL_ENDS, QUESTIONS, make_assets, pieces
from tests.family_tokenizers import make_family

ROOT = Path(__file__).resolve().parents[2]
ON_POLICY = (
    "max_steps=2",
    "async_generation_ratio=0",
    "eval_steps=0",
    "actor_infer.strategy_args={strategy_name: hf_infer}",
    "actor_train.training_args.per_device_train_batch_size=32",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "actor_train.training_args.learning_rate=1e-5",
)
ROWS = 2 * 32


@pytest.fixture(scope="module", params=["glm-4", "llama-3.1"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def demo_assets(family, tmp_path_factory):
    """In place of the demo's: what `launcher` runs on."""
    folder = tmp_path_factory.mktemp(family)
    assert make_assets(family, folder) > 0.9, "it has not learned to copy"
    return folder


def test_questions_with_a_tool(family, launcher):
    code, output = launcher.run(
        *ON_POLICY,
        "prompt_length=64",
        "response_length=128",
        "rewards={addition: null, sums: {type: tests.cluster.family_sums.LastLine, num_workers: 1}}",
        "validation=null",
        f"tracking.rollout_dump_dir={launcher.output}/samples",
        config="rlvr_config_sync_cpu.yaml",
        script="../tests/cluster/family_sums.py",
    )
    assert code == 0, output
    rows, metrics = rows_of(launcher.output / "samples"), launcher.metrics()
    right = says_what_its_template_says(family, rows, metrics, offered=False)
    assert all(row["score"] == 1 for row in right)
    assert all(row["reward_metrics"]["marks"] == 0 for row in rows), "a reward reads no marks"


def test_agents_with_a_tool(family, demo_assets, tmp_path):
    questions = f"{{file: {demo_assets}/train.jsonl, grade: text, instructions: ''}}"
    world = f"env_type: math, max_steps: 2, env_config: {questions}"
    command = [
        sys.executable, "examples/start_agentic_pipeline.py", "--config", "agentic_frozen_lake_async_cpu.yaml",
        f"pretrain={demo_assets}/model", f"output_dir={tmp_path}", "exp_name=run", *ON_POLICY,
        "rollout_batch_size=32", "train_env_manager.group_size=4", "sequence_length=512",
        "custom_envs.FrozenLake=null", "train_env_manager.tags=[Sums]", "val_env_manager.tags=[Sums]",
        f"custom_envs.Sums={{{world}, tools: [{{tool_id: tests.cluster.family_sums.Adder}}]}}",
        "actor_infer.generating_args={max_new_tokens: 64}", f"tracking.rollout_dump_dir={tmp_path}/samples",
    ]  # fmt: skip
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patient(240))
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = rows_of(tmp_path / "samples")
    right = says_what_its_template_says(family, rows, metrics, offered=True)
    # The world compares all words of the answer: with a mark behind it none were right.
    assert all(row["outcome"] == "solved" and row["score"] == 1 for row in right)
    # A row a trajectory: none was rendered anew.
    assert not [name for m in metrics for name in m if name.startswith("agent/branches")]
    assert len({row["trajectory"] for row in rows}) == ROWS


def rows_of(folder):
    rows = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    assert len(rows) == ROWS
    return rows


def says_what_its_template_says(family, rows, metrics, *, offered):
    """The rows in which the tool was called with the numbers of the question and its result was answered: most, and
    token by token what the family says of it.
    """
    tokenizer = make_family(family)
    opening = ids(tokenizer, {"glm-4": "[gMASK]<sop>", "llama-3.1": "<|begin_of_text|>"}[family])
    whole = {}
    for a, b in QUESTIONS:
        for end in CALL_ENDS[family]:
            question, *said = (ids(tokenizer, piece) for piece in pieces(family, a, b, offered=offered, end=end))
            mask = [sampled for sampled, piece in zip((1, 0, 1), said, strict=True) for _ in piece]
            whole[(*question, *sum(said, []))] = len(question), mask, end
    right, ends = [], set()
    for row in rows:
        prompt, response = row["prompt_token_ids"], row["response_token_ids"]
        told = [token for token, sampled in zip(response, row["loss_mask"], strict=True) if not sampled]
        assert prompt[: len(opening)] == opening, "also where the answer is wrong"
        assert all([*prompt, *told].count(mark) == 1 for mark in opening)
        if (*prompt, *response) in whole:
            length, mask, end = whole[(*prompt, *response)]
            assert (len(prompt), row["loss_mask"]) == (length, mask)
            assert (row["num_turns"], row["finish_reason"]) == (2, "stop")
            right.append(row)
            ends.add(end)
    assert len(right) > ROWS / 2, [row["response"] for row in rows if row not in right]
    assert ends == set(CALL_ENDS[family]), "every mark that may end a call did"
    last = metrics[-1]
    assert last["rollout/tool_calls"] >= len(right) and last["rollout/tool_failures"] <= ROWS - len(right)
    for m in metrics:
        # The trainer scores the answer after the tokens that the engine sampled it after, or these would differ.
        assert abs(m["correction/rho_max"] - 1) < 1e-3
    return right


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)
