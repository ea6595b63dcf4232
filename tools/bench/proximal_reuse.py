"""Seconds of a training step that scores its batch first (recompute), and of one that does not (reuse).

    python tools/bench/proximal_reuse.py [--sizes 1M 10M] [--micro-batching fixed packed] [--rounds 9]

The learner on a Megatron rank, one core, one optimizer step per batch, in turn on the same worker; models and numbers
of rows are those of trainer_vs_hf.py, answers of random length. `ratio`: recompute / reuse, of median rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Mapping
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
from trainer_vs_hf import SIZES, Size  # noqa: E402 - first: it keeps torch on one core

MODES = ("recompute", "reuse")
PROMPT_TOKENS, SAMPLES_PER_GROUP = 16, 4


def groups_of(size: Size):
    """Groups with answers of random length and score."""
    import random

    from roll_async.schema import FinishReason, Group, Prompt, Reward, Sample

    draw = random.Random(0)

    def ids(count: int) -> array:
        return array("i", [draw.randrange(1, size.vocabulary) for _ in range(count)])

    def sample(prompt: Prompt) -> Sample:
        count = draw.randint(8, size.positions - PROMPT_TOKENS)
        return Sample(
            sample_id="sample",
            prompt_token_ids=prompt.token_ids,
            response_token_ids=ids(count),
            loss_mask=b"\x01" * count,
            behaviour_logprobs=array("f", [-6.0] * count),
            version_runs=((0, count),),
            finish_reason=FinishReason.STOP,
            generation_s=1.0,
            reward=Reward(score=draw.random()),
        )

    prompts = [
        Prompt(row_id=str(number), token_ids=ids(PROMPT_TOKENS), domain="math", ground_truth="")
        for number in range(size.rows // SAMPLES_PER_GROUP)
    ]
    return [
        Group(
            group_id=number,
            prompt=prompt,
            samples=tuple(sample(prompt) for _ in range(SAMPLES_PER_GROUP)),
            admitted_s=0.0,
            finished_s=1.0,
            admitted_version=0,
        )
        for number, prompt in enumerate(prompts)
    ]


def start(size: Size, micro_batching: str, folder: str):
    """One Megatron rank with a random model."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from roll_async.algorithms.correction import CorrectionOptions
    from roll_async.algorithms.objective import LossSettings
    from roll_async.config.options.policy_loss_options import PpoOptions
    from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings
    from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        tie_word_embeddings=True,
        pad_token_id=None,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    worker = MegatronWorker(
        RankSpec.alone(),
        MegatronSettings(
            model_folder=folder,
            dtype="fp32",
            optimizer=OptimizerSettings(learning_rate=1e-5),
            loss=LossSettings(pg_variant="ppo", pg_options=PpoOptions(), correction=CorrectionOptions()),
            micro_batch_rows=size.micro_batch_rows,
            scoring_rows=size.micro_batch_rows,
            mini_batch_rows=size.rows,
            micro_batching=micro_batching,
            max_tokens_per_microbatch=size.micro_batch_rows * size.positions,
        ),
    )
    worker.start()
    return worker


class OneRank:
    """`trainer/protocol.py: TrainerGroup`, the part that a step uses, without processes in between."""

    def __init__(self, worker) -> None:
        self._worker = worker

    async def compute_logprobs(self, rows):
        return self._worker.compute_logprobs(self._worker.splitter.scoring(rows)[0])

    async def update_policy(self, rows, step: int) -> tuple[Mapping[str, float], None]:
        return self._worker.update_policy(self._worker.splitter.policy(rows)[0], step)


def compare(name: str, micro_batching: str, rounds: int) -> dict:
    """One line of the report."""
    from roll_async.config.schema_algorithm import AlgorithmConfig
    from roll_async.trainer.learner import Learner, LearnerOptions
    from roll_async.trainer.roles import LearnerParts

    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        worker = start(size, micro_batching, folder)
        actor, groups = OneRank(worker), groups_of(size)
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for number in range(rounds + 2):
            for mode in MODES:
                options = LearnerOptions(
                    domains=("math",),
                    response_length=size.positions,
                    algorithm=AlgorithmConfig(proximal_logprobs=mode),
                    mini_batch_rows=size.rows,
                )
                learner = Learner(LearnerParts(actor=actor), options)  # type: ignore[arg-type]
                began = time.perf_counter()
                asyncio.run(learner.learn(groups, number + 1))
                times[mode].append(time.perf_counter() - began)
        worker.stop()
    seconds = {mode: statistics.median(found[2:]) for mode, found in times.items()}
    ratio = seconds["recompute"] / seconds["reuse"]
    return {
        "name": f"proximal_reuse/{name}/{micro_batching}",
        "value": round(seconds["reuse"], 4),
        "unit": "s",
        "recompute_s": round(seconds["recompute"], 4),
        "ratio": round(ratio, 3),
        "budget": 1.1,
        "ok": ratio >= 1.1,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1M", "10M"])
    parser.add_argument(
        "--micro-batching", nargs="+", choices=("fixed", "dynamic", "packed"), default=["fixed", "packed"]
    )
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    for name in args.sizes:
        for micro_batching in args.micro_batching:
            print(json.dumps(compare(name, micro_batching, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
