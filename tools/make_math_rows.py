"""`data/math_deepmath_deal.jsonl`, the prompts of `configs/rlvr_config_async.yaml`: problems with answers for a rule.

    python tools/make_math_rows.py [--source zwhe99/DeepMath-103K | FILE | bundled] [--output FILE]

From the hub, or from a json, jsonl or parquet file with the columns question and final_answer (or answer), and
optionally difficulty. Where there is no network, `--source bundled` writes word problems in the manner of GSM8K, made
here: enough to see a run, too easy to learn from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.prepare_rows import Preparation, Question, prepare, read_source, report, text_of, write_chats

DEEPMATH, BUNDLED = "zwhe99/DeepMath-103K", "bundled"
_PEOPLE = ("Ada", "Ben", "Chiara", "Deniz", "Emeka", "Fatima", "Goran", "Hana")
_PROBLEMS = (
    ("{name} buys {a} boxes of {b} pencils and gives {c} pencils away. How many pencils are left?", -1),
    ("{name} has {c} stamps and gets {a} more in each of {b} weeks. How many stamps are there then?", 1),
    ("A shelf holds {a} rows of {b} jars. {name} fills {c} of them. How many jars are empty?", -1),
    ("{name} walks {a} km on each of {b} days and {c} km on one more. How many km is that together?", 1),
)
"""The answer is a * b, and c more or less."""


def bundled() -> Iterator[Mapping[str, object]]:
    """900 problems, always the same."""
    for a in range(3, 13):
        for b in range(4, 13):
            for c in range(1, 11):
                index = a * 7 + b * 3 + c
                text, sign = _PROBLEMS[index % len(_PROBLEMS)]
                name = _PEOPLE[index % len(_PEOPLE)]
                yield {"question": text.format(name=name, a=a, b=b, c=c), "answer": str(a * b + sign * c)}


def reader(least: float, most: float):
    """What makes a record one problem of this difficulty, or says why it is none."""

    def read(record: Mapping[str, object]) -> Question | str:
        question, answer = text_of(record, "question", "problem"), text_of(record, "final_answer", "answer")
        difficulty = record.get("difficulty")
        if not question:
            return "no question"
        if not answer:
            return "no answer"
        if isinstance(difficulty, int | float) and not least <= difficulty <= most:
            return f"difficulty outside of {least:g} to {most:g}"
        return Question(question=question, answer=answer)

    return read


def main() -> int:
    """Exit 0: written; 2: nothing to write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=DEEPMATH, help=f"name on the hub, file, or {BUNDLED} [{DEEPMATH}]")
    parser.add_argument("--source_split", default="train", help="split on the hub [train]")
    parser.add_argument("--output", default="data/math_deepmath_deal.jsonl")
    parser.add_argument("--min_difficulty", type=float, default=-1.0, help="of DeepMath, -1 to 10 [-1]")
    parser.add_argument("--max_difficulty", type=float, default=10.0, help="[10]")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    args = parser.parse_args()
    own = args.source == BUNDLED
    options = Preparation(data_source="word_problems" if own else "deepmath_103k", seed=args.seed)
    try:
        records = bundled() if own else read_source(args.source, args.source_split)
        prepared = prepare(records, reader(args.min_difficulty, args.max_difficulty), options)
        if not prepared.rows["train"]:
            raise ValueError(f"{args.source}: no row could be used\n{report(prepared, {})}")
        write_chats(Path(args.output), prepared.rows["train"])
    except (ValueError, OSError) as error:
        print(f"make_math_rows.py: {error}", file=sys.stderr)
        if not own:
            print(f"make_math_rows.py: without a network: --source {BUNDLED}", file=sys.stderr)
        return 2
    print(report(prepared, {"train": Path(args.output)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
