"""Models of random weights whose answers have lengths like those of a reasoning model, prompts and a reward for them:
what a comparison of speed needs where no weights can be downloaded.

    python tools/random_lengths.py --shape 0.5B --folder DIR [--mean 300] [--prompt 256] [--device cuda]

Every token ends an answer with the same probability, 1 / mean, whatever was read: lengths are geometric, and with
room for 1,024 tokens and a mean of 300 one answer of 30 is cut. Answers are otherwise noise over the whole vocabulary.
DIR gets model/ (bf16, shapes of gpu_trainer.py, and a tokenizer of a character a token), train.jsonl and manifest.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

END = 2
"""Id of the end token, of make_tokenizer."""
NUM_ROWS = 2_000
CONSTANT = 64.0
"""What every embedding has in its first component, beside others of 0.02: they and what the layers add then change the
norm of the residual stream by less than 0.2 %. A power of two, which bf16 has exactly.
"""
END_TIMES = 8.0
"""The end token's output row in multiples of CONSTANT. With tied embeddings all other rows have CONSTANT there, and
only the difference counts: the larger it is, the smaller are the logits, which bf16 then resolves better.
"""


def parity(text: str, ground_truth: str, extra: Mapping[str, str]) -> float:
    """The reward: 1 for a text of an odd number of characters. Costs nothing, and differs within a group."""
    return float(len(text) % 2)


def set_hazard(model: Qwen2ForCausalLM, probability: float) -> float:
    """Give a model of random weights this chance of ending at every token; what it is after rounding to its dtype.

    The first component of the residual stream holds a constant that layers do not read and that what they write there
    does not change; the final norm brings it to the output layer. The norm's weight for it, found by bisection on
    logits of random tokens, is the free size.
    """
    import torch

    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = CONSTANT
        for layer in model.model.layers:
            layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 0.0
        head = model.get_output_embeddings().weight
        head[END] = 0.0
        head[END, 0] = END_TIMES * CONSTANT
        size = model.model.norm.weight
        size[0] = 1.0
        tokens = torch.randint(END + 1, model.config.vocab_size, (4, 32), device=head.device)
        read = model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1).float()
        rest, constant = read[:, 1:] @ head[:, 1:].T.float(), torch.outer(read[:, 0], head[:, 0].float())

        def chance(size: float) -> float:
            return float((rest + size * constant).softmax(-1)[:, END].mean())

        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if chance(middle) < probability else (low, middle)
        size[0] = high
        return chance(float(size[0]))


def write(shape: str, folder: Path, mean: float, prompt: int, device: str) -> None:
    """The folder; the manifest comes last."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from roll_async.commands.demo.assets import make_tokenizer
    from tools.gpu_trainer import write_model

    model_folder = folder / "model"
    write_model(shape, model_folder, device)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).to(device)
    chance = set_hazard(model, 1 / mean)
    model.config.eos_token_id = END
    model.generation_config = GenerationConfig(eos_token_id=END)
    model.save_pretrained(model_folder)
    make_tokenizer(model_folder, model.config.vocab_size - 1)  # Transformers adds one of the family's own
    write_rows(folder / "train.jsonl", prompt)
    (folder / "manifest.json").write_text(json.dumps({"shape": shape, "mean": mean, "end_probability": chance}))


def write_rows(path: Path, prompt: int) -> None:
    """GSM8K's columns: questions of seven eighths to nine eighths of `prompt` tokens, words of digits."""
    draw = random.Random(7)
    with path.open("w") as file:
        for number in range(NUM_ROWS):
            length, words = draw.randint(prompt * 7 // 8, prompt * 9 // 8), ""
            while len(words) < length:
                words += str(draw.randrange(10 ** draw.randint(1, 8))) + " "
            file.write(json.dumps({"id": f"row-{number}", "question": words[: length - 1] + "=", "answer": "0"}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="of tools/gpu_trainer.py")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mean", type=float, default=300.0, help="tokens of an answer, without a limit")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt, about")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where the weights are drawn")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    write(args.shape, args.folder, args.mean, args.prompt, args.device)


if __name__ == "__main__":
    main()
