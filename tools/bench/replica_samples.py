"""How many different answers a group gets when its samples are dealt to 1, 2 or 8 engine replicas.

    python tools/bench/replica_samples.py [--strategy vllm] [--replicas 1 2 8] [--groups 32] [--group-size 8]

Real engines on a tiny random model: answers of 24 tokens out of 512, so no two are alike by chance. The samples of each
group are dealt to the replicas in turn, as a run does. `shared seed` starts every replica with the seed of the run;
`replica_seed` is what a run starts them with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from roll_async.inference.backends import create_engine
from roll_async.inference.seeds import replica_seed
from roll_async.inference.settings import EngineSettings
from roll_async.schema import GenerateRequest, SamplingParams

RUN_SEED, TOKENS = 42, 24


def save_model(folder: str) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(
        vocab_size=512, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, dtype="float32", **sizes
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


async def share_of(strategy: str, folder: str, seed: int, wanted: list[tuple[int, int]]) -> dict:
    """One replica's answers by (group, sample)."""
    engine = create_engine(
        strategy,
        EngineSettings(model_folder=folder, dtype="fp32", device="cpu", max_model_len=64, max_running=64, seed=seed),
    )
    await engine.start()

    async def ask(group: int, sample: int) -> tuple:
        request = GenerateRequest(
            request_id=f"{group}/{sample}",
            prompt_token_ids=array("i", [3 + group, 4, 5]),
            sampling=SamplingParams(max_new_tokens=TOKENS),
        )
        return (group, sample), tuple((await engine.generate(request)).token_ids)

    try:
        return dict(await asyncio.gather(*(ask(*key) for key in wanted)))
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="vllm")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for num in args.replicas:
            for name in ("shared seed", "replica_seed"):
                answers = {}
                for replica in range(num):
                    keys = [(g, s) for g in range(args.groups) for s in range(args.group_size) if s % num == replica]
                    seed = replica_seed(RUN_SEED, replica, 0) if name == "replica_seed" else RUN_SEED
                    answers |= asyncio.run(share_of(args.strategy, folder, seed, keys))
                groups = [{answers[g, s] for s in range(args.group_size)} for g in range(args.groups)]
                value = sum(map(len, groups)) / args.groups
                line = {
                    "name": f"distinct answers per group, {num} replicas, {name}",
                    "value": value,
                    "unit": f"of {args.group_size}",
                    "ratio": value / args.group_size,
                    "groups_without_spread": sum(len(g) == 1 for g in groups),
                    "groups": args.groups,
                }
                print(json.dumps(line | ({"budget": 1.0, "ok": line["ratio"] >= 1} if name == "replica_seed" else {})))


if __name__ == "__main__":
    main()
