"""Tokenizer and a randomly initialised model for `configs/rlvr_gsm8k_cpu.yaml`: the data path is real, the model knows
nothing.

    python tools/make_gsm8k_assets.py [--source data/gsm8k/train.jsonl] [--output output/gsm8k_assets]

A byte-level BPE tokenizer is trained on the file. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.prompts.rows import missing_file

VOCABULARY = 2048


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
    parser.add_argument("--output", default="output/gsm8k_assets")
    args = parser.parse_args()
    source, output = Path(args.source), Path(args.output)
    if not source.is_file():
        print(missing_file(str(source)), file=sys.stderr)
        return 2
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    make(source, temporary / "model")
    shutil.rmtree(output, ignore_errors=True)
    temporary.rename(output)
    print(f"GSM8K assets are in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
