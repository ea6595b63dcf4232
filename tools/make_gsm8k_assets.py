"""Tokenizer and a randomly initialised model for `configs/rlvr_gsm8k_cpu.yaml`: the data path is real, the model knows
nothing.

    roll-async demo --assets-only gsm8k|word_problems
    python tools/make_gsm8k_assets.py [--source data/gsm8k/train.jsonl] [--output output/gsm8k_assets]
    python tools/make_gsm8k_assets.py --word-problems [--output output/word_problems]

A byte-level BPE tokenizer, a token per digit, is trained on the file. Nothing is downloaded.

--word-problems: also questions of sums in GSM8K's columns (train.jsonl, validation.jsonl), and chats in which a
careless pupil solves them digit by digit (sft.jsonl, sft_validation.jsonl), for `configs/sft_word_problems_cpu.yaml`
and `rlvr_word_problems_cpu.yaml`. The pupil forgets most carries, as the demo's teacher does: what is learned from it
has the form of a solution, and reinforcement learning has to turn a habit.
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

from roll_async.commands.demo.addition import problems
from roll_async.commands.demo.assets import FORGOTTEN_CARRIES, WRONG_DIGITS
from roll_async.prompts.rows import missing_file

VOCABULARY = 2048
NUM_TRAIN, NUM_VALIDATION = 16_000, 128
STORIES = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "{name} sold {a} {things} in April and {b} in May. How many {things} were sold in both months?",
    "A box holds {a} {things}, another one {b}. {name} needs both. How many {things} are that?",
    "{name} counts {a} {things} in the morning. {b} come in the afternoon. How many {things} are there?",
)
NAMES = ("Ada", "Ben", "Chidi", "Dara", "Emil", "Fatma")
THINGS = ("pencils", "apples", "books", "stamps")


def write_problems(folder: Path) -> None:
    """Rows of training and validation, and the pupil's chats."""
    rng = random.Random(5)
    everything = problems(NUM_TRAIN + NUM_VALIDATION, seed=17)
    for ending, part in (("_validation", everything[NUM_TRAIN:]), ("", everything[:NUM_TRAIN])):
        rows, chats = [], []
        for each in part:
            story = rng.choice(STORIES)
            text = story.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=each.left, b=each.right)
            rows.append({"question": text, "answer": told(each.solution())})
            said = told(each.solution(rng, WRONG_DIGITS, FORGOTTEN_CARRIES))
            chats.append({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": said}]})
        write_lines(folder / f"{ending.removeprefix('_') or 'train'}.jsonl", rows)
        write_lines(folder / f"sft{ending}.jsonl", chats)


def told(solution: str) -> str:
    """A scratchpad of the demo in GSM8K's form.

    >>> print(told("8+7+0=15;5+6+1=12;=125"))
    8+7+0=15
    5+6+1=12
    #### 125
    """
    return solution.replace(";=", "\n#### ").replace(";", "\n")


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
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
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
    parser.add_argument("--word-problems", action="store_true", help="questions of sums, and a pupil's solutions")
    parser.add_argument("--output", help="[output/gsm8k_assets; output/word_problems]")
    args = parser.parse_args()
    source, own = Path(args.source), args.word_problems
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
