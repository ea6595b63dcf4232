"""Greedy accuracy of a checkpoint on fresh addition problems, in plain Transformers.

python tools/check_demo_result.py FOLDER [--data output/demo_assets/test.jsonl] [--threshold 0.9] [--temperature 0]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.rewards.exact_match import ExactMatch


def accuracy(folder: str, data: str, temperature: float, seed: int = 0) -> float:
    """Share of right answers. Temperature 0 = greedy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    prompts = [row["messages"][0]["content"] for row in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=96, **sampling
    )
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    judge = ExactMatch()
    verdicts = [judge(text, row["ground_truth"], {}) for text, row in zip(texts, rows, strict=True)]
    return sum(v.acc for v in verdicts) / len(verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--data", default="output/demo_assets/test.jsonl")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    result = accuracy(args.folder, args.data, args.temperature)
    kind = f"temperature {args.temperature:g}" if args.temperature else "greedy"
    print(f"{args.folder}: accuracy {result:.3f} ({kind}, plain Transformers, {args.data})")
    return 0 if result >= args.threshold else 1


if __name__ == "__main__":
    sys.exit(main())
