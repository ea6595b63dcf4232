"""Skywork-OR1 mathematics as a training set: `DIR/train.parquet`, and `DIR/test.parquet` with --test_size.

    python examples/async_dapo/process_skywork.py --local_dir data/skywork_or1_1_5b_diff_sys [--source FILE]

The source's `extra_info.model_difficulty` counts how often a model failed in 16 attempts. Kept is what
--difficulty_model sometimes solves and sometimes does not: a problem that is always or never solved teaches nothing.
Give --exclude the prepared validation set, so that none of its problems is trained.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.prepare_rows import Preparation, Question, common_parser, excluded, run, text_of

MODELS = {
    "1.5b": "DeepSeek-R1-Distill-Qwen-1.5B",
    "7b": "DeepSeek-R1-Distill-Qwen-7B",
    "32b": "DeepSeek-R1-Distill-Qwen-32B",
}


def read(record: Mapping[str, object], *, model: str, low: int, high: int) -> Question | str:
    """One problem, or why it is none."""
    prompt, reward, info = (record.get(name) for name in ("prompt", "reward_model", "extra_info"))
    if not isinstance(prompt, list) or not isinstance(reward, dict) or not isinstance(info, dict):
        return "columns prompt, reward_model and extra_info expected"
    questions = [text_of(t, "content") for t in prompt if isinstance(t, dict) and t.get("role") == "user"]
    if len(questions) != 1 or not questions[0]:
        return "not one question"
    if record.get("ability", "math") != "math":
        return "not mathematics"
    answers = _answers(reward.get("ground_truth"))
    if len(answers) != 1:
        return "several answers" if answers else "no answer"
    difficulty = info.get("model_difficulty")
    failures = difficulty.get(model) if isinstance(difficulty, dict) else None
    if not isinstance(failures, int):
        return f"no difficulty for {model}"
    if failures < low:
        return f"too easy for {model}"
    if failures > high:
        return f"too hard for {model}"
    return Question(question=questions[0], answer=answers[0], data_source=text_of(record, "data_source"))


def _answers(value: object) -> list[str]:
    r"""The source writes them as the JSON text of a list: `["\\frac{1}{2}"]`."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            pass  # an interval like [0, 1) is an answer of its own
    values = value if isinstance(value, list) else [value]
    return [str(v).strip() for v in values if v is not None and str(v).strip()]


def main() -> int:
    """Exit 0: written; 2: nothing to write."""
    source, folder = "Skywork/Skywork-OR1-RL-Data", "data/skywork_or1_1_5b_diff_sys"
    parser = common_parser(__doc__, source=source, local_dir=folder, split="math")
    parser.add_argument("--difficulty_model", choices=list(MODELS), default="1.5b", help="whose failures count [1.5b]")
    parser.add_argument("--min_failures", type=int, default=1, help="of 16; fewer is too easy [1]")
    parser.add_argument("--max_failures", type=int, default=15, help="of 16; more is too hard [15]")
    parser.add_argument("--test_size", type=int, default=0, help="problems held out into test.parquet [0]")
    parser.add_argument("--exclude", nargs="*", default=[], help="prepared files whose problems are left out")
    args = parser.parse_args()
    model = MODELS[args.difficulty_model]
    try:
        options = Preparation(
            data_source="skywork_or1_math",
            system_prompt=args.system_prompt,
            seed=args.seed,
            test_size=args.test_size,
            keep_repeats=args.keep_repeats,
            exclude=excluded(args.exclude),
        )
    except ValueError as error:
        parser.error(str(error))
    return run(args, lambda record: read(record, model=model, low=args.min_failures, high=args.max_failures), options)


if __name__ == "__main__":
    sys.exit(main())
