"""Model and data of `configs/rlvr_images_cpu.yaml`: a picture of dots is shown, and the answer is how many there are.

    roll-async demo --assets-only images
    python tools/make_image_assets.py [--output output/images]

A Qwen2.5-VL of half a million parameters, random; pictures as PNG beside the rows: 16 cells of 4 x 4 pixels, up to nine
of them lit. `sft.jsonl` are chats in which a careless pupil counts, who mostly overlooks the rightmost column: what is
learned from it has the form of an answer, and reinforcement learning has to turn a habit. Whoever does not look at the
picture is right once in ten. Nothing is downloaded.
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

from roll_async.commands.demo.assets import WHITE

SIDE, CELL, MOST_DOTS = 4, 4, 9
NUM_TRAIN, NUM_VALIDATION = 4_000, 128
OVERLOOKED = 0.7
"""How often the pupil does not see the rightmost column."""
VOCABULARY = 32
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write_rows(folder: Path) -> None:
    """Pictures, rows of training and validation, and the pupil's chats."""
    from PIL import Image

    rng = random.Random(5)
    (folder / "pictures").mkdir()
    for name, count in (("train", NUM_TRAIN), ("validation", NUM_VALIDATION)):
        rows, chats = [], []
        for number in range(count):
            lit = rng.sample(range(SIDE * SIDE), rng.randint(0, MOST_DOTS))
            file = f"pictures/{name}-{number}.png"
            picture = Image.new("L", (SIDE, SIDE))
            for cell in lit:
                picture.putpixel((cell % SIDE, cell // SIDE), 255)
            picture.resize((SIDE * CELL, SIDE * CELL), Image.Resampling.NEAREST).save(folder / file)
            asked = {"role": "user", "content": [{"type": "image", "image": file}, {"type": "text", "text": "dots"}]}
            seen = [cell for cell in lit if cell % SIDE < SIDE - 1 or rng.random() >= OVERLOOKED]
            rows.append({"messages": [asked], "ground_truth": str(len(lit))})
            chats.append({"messages": [asked, {"role": "assistant", "content": f"={len(seen)}"}]})
        write_lines(folder / f"{name}.jsonl", rows)
        write_lines(folder / f"sft{'' if name == 'train' else '_validation'}.jsonl", chats)


def write_lines(path: Path, rows: Sequence[object]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(folder: Path) -> None:
    """Tokenizer of single characters, image processor and model."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of writing a file of two megabytes
    names = [*SPECIAL, *"0123456789=dots", *WHITE]
    names += [f"<unused{i}>" for i in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL[2:]),
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    size = {"shortest_edge": (SIDE * CELL) ** 2, "longest_edge": (SIDE * CELL) ** 2}
    Qwen2VLImageProcessorPil(patch_size=CELL, temporal_patch_size=2, merge_size=2, size=size).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "bos_token_id": None, "eos_token_id": names.index(SPECIAL[1]), "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
            "patch_size": CELL, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **{f"{what}_token_id": names.index(f"<|{what}_pad|>") for what in ("image", "video")},
        **{f"vision_{end}_token_id": names.index(f"<|vision_{end}|>") for end in ("start", "end")},
        tie_word_embeddings=True,
        dtype="float32",
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = fast.eos_token_id
    model.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="output/images")
    output = Path(parser.parse_args().output)
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_rows(temporary)
    make_model(temporary / "model")
    shutil.rmtree(output, ignore_errors=True)
    temporary.rename(output)
    print(f"pictures, rows and model are in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
