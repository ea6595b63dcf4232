"""`roll-async run` and `sft` on rows with images: what the engine sampled, the trainer computes again."""

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("megatron.core")
PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

import tiny_families

from roll_async.commands.certify import checks
from roll_async.commands.certify.template import REWARD, RUN
from tests.patience import patient
from tests.unit.prompts.test_images import data_url, folder  # noqa: F401  # the fixture

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PACKED = ("actor_train.micro_batching=packed", "actor_train.max_tokens_per_microbatch=1024")
VOCABULARY = 262  # the fixture's image token is the fourth from the end, as in the models of certificates


@pytest.fixture
def work(folder, tmp_path):  # noqa: F811
    """A model, and rows of which most have an image or two."""
    family, _ = tiny_families.FAMILIES["qwen2.5-vl"]
    target, rng = tmp_path / "engine", random.Random(3)
    checks.save_tiny(family, "qwen2.5-vl", target, vocab_size=VOCABULARY, max_position_embeddings=256)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / name).write_bytes((Path(folder) / name).read_bytes())
    with (tmp_path / "train.jsonl").open("w") as rows, (tmp_path / "sft.jsonl").open("w") as chats:
        for number in range(32):
            sizes = [(8 * rng.randint(1, 4), 8 * rng.randint(1, 4)) for _ in range(number % 3)]
            images = [{"type": "image", "image": data_url(noise(*size, number))} for size in sizes]
            asked = [{"role": "user", "content": [*images, {"type": "text", "text": f"{number}?"}]}]
            rows.write(json.dumps({"id": str(number), "messages": asked, "ground_truth": "1"}) + "\n")
            chats.write(json.dumps({"messages": [*asked, {"role": "assistant", "content": "yes"}]}) + "\n")
    (tmp_path / "certificate_reward.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(RUN.format(work=tmp_path, replays="false"))
    return tmp_path


def noise(width, height, seed):
    """A file of pixels that no two images share."""
    file = io.BytesIO()
    PIL.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)).save(file, "PNG")
    return file.getvalue()


def metrics(work, *words):
    command = [sys.executable, "-m", "roll_async", *words]
    done = subprocess.run(command, cwd=work, env=ENV, capture_output=True, text=True, timeout=patient(400))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]


def test_the_trainer_computes_what_the_engine_sampled_of_images_after_each_push(work):
    tags = (
        "actor_train.data_args.template=native",
        "prompt_length=64",
        "actor_infer.strategy_args={strategy_name: hf_infer}",
    )
    steps = [m for m in metrics(work, "run", "--config", "run.yaml", *PACKED, *tags) if "trainer/loss" in m]
    assert len(steps) == 2
    for step in steps:
        # The ratio of what both say of a token: blind, either would say something else.
        assert abs(step["correction/rho_max"] - 1) < 1e-4 and abs(step["correction/rho_min"] - 1) < 1e-4
    assert steps[1]["weights/canary_moved"] > 1e-3


def test_chats_with_images_are_learned(work):
    file = ("actor_train.data_args.file_name=sft.jsonl", "validation=null", "eval_steps=0", "save_steps=0")
    where = (f"pretrain={work / 'engine'}", f"output_dir={work}", "exp_name=run", "train_batch_size=16", "max_steps=4")
    rate = ("actor_train.training_args.learning_rate=3e-3", "actor_train.data_args.template=native")
    losses = [m["trainer/loss"] for m in metrics(work, "sft", "sft_demo_cpu", *file, *where, *rate, *PACKED)]
    assert losses[-1] < losses[0] - 0.1
