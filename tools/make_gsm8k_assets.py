"""Tokenizer and a randomly initialised model for `configs/rlvr_gsm8k_cpu.yaml`: the data path is real, the model knows
nothing.

    python tools/make_gsm8k_assets.py [--source data/gsm8k/train.jsonl | bundled] [--output output/gsm8k_assets]

A byte-level BPE tokenizer is trained on the file. Nothing is downloaded.

`--source bundled`, by default into output/word_problems: the word problems of `tools/make_math_rows.py` in GSM8K's
columns (train.jsonl, validation.jsonl), and chats in which a careless pupil solves them (sft.jsonl,
sft_validation.jsonl), for `configs/sft_word_problems_cpu.yaml` and `rlvr_word_problems_cpu.yaml`. The pupil adds where
something is taken away, or the other way round, in 3 of 10 solutions: what is learned from them has the form of one,
and reinforcement learning has to turn a habit.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.prompts.rows import missing_file
from tools.make_math_rows import BUNDLED, word_problems

VOCABULARY = 2048
HELD_OUT = 100
"""Problems of the 900 that no row of training has."""
TOLD, SWAPPED = 10, 0.3
"""Times that the pupil solves each problem; share of its mistakes."""


def solution(a: int, b: int, c: int) -> str:
    """`a * b + c` in GSM8K's way: steps, then `#### N`."""
    total = a * b + c
    return f"{a} * {b} = {a * b}\n{a * b} {'-' if c < 0 else '+'} {abs(c)} = {total}\n#### {total}"


def write_problems(folder: Path) -> None:
    """Rows of training and validation, and the pupil's chats."""
    rng = random.Random(5)
    problems = list(word_problems())
    rng.shuffle(problems)
    for ending, part in (("_validation", problems[:HELD_OUT]), ("", problems[HELD_OUT:])):
        rows = [{"question": text, "answer": solution(*numbers)} for text, numbers in part]
        write_lines(folder / f"{ending.removeprefix('_') or 'train'}.jsonl", rows)
        chats = []
        for text, (a, b, c) in part * TOLD:
            said = solution(a, b, -c if rng.random() < SWAPPED else c)
            chats.append({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": said}]})
        write_lines(folder / f"sft{ending}.jsonl", chats)


def write_lines(path: Path, rows: Sequence[object]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(source: Path, model_folder: Path) -> None:
    """Write tokenizer and model."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["question"] + "\n" + row["answer"] for row in rows), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.save_pretrained(model_folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = fast.eos_token_id
    model.save_pretrained(model_folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="data/gsm8k/train.jsonl")
    parser.add_argument("--output", help="[output/gsm8k_assets; output/word_problems of bundled]")
    args = parser.parse_args()
    own = args.source == BUNDLED
    source = Path(args.source)
    output = Path(args.output or ("output/word_problems" if own else "output/gsm8k_assets"))
    if not own and not source.is_file():
        print(missing_file(str(source)), file=sys.stderr)
        return 2
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if own:
        write_problems(temporary)
        source = temporary / "train.jsonl"
    make(source, temporary / "model")
    shutil.rmtree(output, ignore_errors=True)
    temporary.rename(output)
    print(f"{'word problems' if own else 'GSM8K assets'} are in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
