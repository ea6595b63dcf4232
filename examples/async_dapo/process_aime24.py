"""AIME 2024 as a validation set: `DIR/test.parquet`.

    python examples/async_dapo/process_aime24.py --local_dir data/aime24_sys [--source FILE]

Columns of the source: problem (or question), answer, and optionally solution. Answers are whole numbers from 0 to 999.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.prepare_rows import Preparation, Question, common_parser, run, text_of


def read(record: Mapping[str, object]) -> Question | str:
    """One problem, or why it is none."""
    question = text_of(record, "problem", "question", "Problem", "Question")
    answer = text_of(record, "answer", "Answer")
    if not question:
        return "no question"
    if not (answer.isascii() and answer.isdigit() and int(answer) <= 999):
        return "answer is not a whole number from 0 to 999" if answer else "no answer"
    return Question(question=question, answer=str(int(answer)), solution=text_of(record, "solution", "Solution"))


def main() -> int:
    """Exit 0: written; 2: nothing to write."""
    parser = common_parser(__doc__, source="HuggingFaceH4/aime_2024", local_dir="data/aime24_sys", split="train")
    args = parser.parse_args()
    options = Preparation(
        data_source="aime24",
        system_prompt=args.system_prompt,
        seed=args.seed,
        only_split="test",
        keep_repeats=args.keep_repeats,
    )
    return run(args, read, options)


if __name__ == "__main__":
    sys.exit(main())
