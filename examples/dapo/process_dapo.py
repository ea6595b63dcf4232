"""DAPO-Math-17k and AIME 2024 as published for DAPO: repeated problems once, the same columns as everywhere.

    python examples/dapo/process_dapo.py --source RAW.parquet --output dapo-math-17k.parquet --split train

`prepare_dapo_data.sh` downloads and calls this. The published files hold each problem many times (the training file
about a hundred times, AIME 32 times); here repetition is the trainer's and the validation's business
(`validation.generating_args.num_return_sequences`), unless --keep_repeats asks for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.prepare_rows import Preparation, Question, prepare, read_source, report, text_of, write_rows


def read(record: Mapping[str, object]) -> Question | str:
    """One problem, or why it is none. The published question holds its own instruction (`Answer: ...` at the end)."""
    prompt, reward = record.get("prompt"), record.get("reward_model")
    if not isinstance(prompt, list) or not isinstance(reward, dict):
        return "columns prompt and reward_model expected"
    questions = [text_of(t, "content") for t in prompt if isinstance(t, dict) and t.get("role") == "user"]
    answer = text_of(reward, "ground_truth")
    if len(questions) != 1 or not questions[0]:
        return "not one question"
    if not answer:
        return "no answer"
    return Question(question=questions[0], answer=answer, data_source=text_of(record, "data_source"))


def main() -> int:
    """Exit 0: written; 2: nothing to write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="name on the hub, or a json, jsonl or parquet file")
    parser.add_argument("--output", required=True, help="parquet file to write")
    parser.add_argument("--split", choices=("train", "test"), default="train")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--keep_repeats", action="store_true", help="AIME 2024 keeps its 30 x 32 rows")
    args = parser.parse_args()
    options = Preparation(
        data_source="math_dapo", seed=args.seed, only_split=args.split, keep_repeats=args.keep_repeats
    )
    try:
        prepared = prepare(read_source(args.source, "train"), read, options)
        if not prepared.rows[args.split]:
            raise ValueError(f"{args.source}: no row could be used\n{report(prepared, {})}")
        write_rows(Path(args.output), prepared.rows[args.split])
    except (ValueError, OSError) as error:
        print(f"process_dapo.py: {error}", file=sys.stderr)
        return 2
    print(report(prepared, {args.split: Path(args.output)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
