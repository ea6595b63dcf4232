"""Make what the agentic demos need: a tokenizer with a chat template that knows tools, and a tiny warm-started model.

    python tools/make_agentic_assets.py [--output output/agentic_assets] [--force]

The model has seen clumsy play: lakes crossed with many random steps, and products mostly guessed, seldom computed with
the calculator. So it knows the form of both tasks, and reinforcement learning has something to choose from.
Deterministic and idempotent; a few minutes on one core; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import string
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.envs.worlds.frozen_lake import FrozenLake, FrozenLakeOptions
from roll_async.envs.worlds.moves import STEPS, WORDS

Rows = Callable[..., list[tuple[list[int], list[int]]]]
"""(tokenizer, random.Random) to a batch of (token ids, 1 where the assistant speaks)."""
VERSION = 2
STEPS_WARM, BATCH, RATE = 500, 12, 4e-3
RANDOM_MOVES, CALLS = 0.55, 0.15
MAX_TURNS = 10
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
WHOLE = (
    *WORDS, "<tool_call>", "</tool_call>", CALL, '"}}\n</tool_call>', "system\n", "user\n", "assistant\n", "tool\n",
    "calculator",
)  # fmt: skip
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>\n' + "
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """A character is a token, and so are the frequent words of the demos."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<|im_start|>", "<|im_end|>", "\n", *string.printable[:95]]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens([AddedToken(word, special=False, normalized=False) for word in WHOLE])
    assert len(fast) <= 128
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def make_model(folder: Path) -> None:
    """A randomly initialised Qwen2 of about 0.1 million parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 numbers each, the least that vLLM's CPU build knows
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)


def best_move(rows: list[str], rng: random.Random) -> int:
    """First step of a shortest way to the goal."""
    cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    start = next(cell for cell, symbol in cells.items() if symbol == "P")
    queue, seen = deque([(start, None)]), {start}
    while queue:
        cell, first = queue.popleft()
        if cells[cell] == "G":
            return first
        for move in rng.sample(range(4), 4):
            to = (cell[0] + STEPS[move][0], cell[1] + STEPS[move][1])
            if cells.get(to, "O") != "O" and to not in seen:
                seen.add(to)
                queue.append((to, move if first is None else first))
    raise AssertionError("every lake can be crossed")


def walk(world: FrozenLake, rng: random.Random) -> list[tuple[str, str]]:
    """(role, content) of a walk with many random steps."""
    text, info = world.reset(seed=rng.randrange(1 << 20))
    chat = []
    for _ in range(MAX_TURNS):
        move = rng.randrange(4) if rng.random() < RANDOM_MOVES else best_move(info["frame"], rng)
        chat += [("user", text), ("assistant", WORDS[move])]
        text, _, ended, _, info = world.step(WORDS[move])
        if ended:
            break
    return chat


def product(rng: random.Random) -> list[tuple[str, str]]:
    """A product, seldom computed with the calculator, else guessed near the truth."""
    a, b, c = (rng.randint(10, 99) for _ in range(3))
    tasks = ((f"{a}*{b}", a * b), (f"{a}*{b}+{c}", a * b + c), (f"{a}+{b}*{c}", a + b * c), (f"{a}*{b}-{c}", a * b - c))
    expression, value = rng.choice(tasks)
    question = ("user", f"{expression}=")
    if rng.random() < CALLS:
        call = f'{CALL}{expression}"}}}}\n</tool_call>'
        return [question, ("assistant", call), ("tool", str(value)), ("assistant", str(value))]
    return [question, ("assistant", str(value + rng.choice((-100, -10, -1, 1, 10, 100)) * rng.randint(0, 3)))]


def encoded(tokenizer, chat: list[tuple[str, str]], *, tool: str = "") -> tuple[list[int], list[int]]:
    """(token ids, 1 where the assistant speaks) of a chat with this tool, if any."""
    ids, mask = [], []

    def add(text: str, spoken: int) -> None:
        part = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(part)
        mask.extend([spoken] * len(part))

    if tool:
        add(f"<|im_start|>system\n{tool}<|im_end|>\n", 0)
    for role, content in chat:
        add(f"<|im_start|>{role}\n", 0)
        add(f"{content}<|im_end|>", int(role == "assistant"))
        add("\n", 0)
    return ids, mask


def demo_rows(world: FrozenLake) -> Rows:
    """A batch of both tasks of the demos."""

    def rows(tokenizer, rng: random.Random) -> list[tuple[list[int], list[int]]]:
        walks = [encoded(tokenizer, walk(world, rng)) for _ in range(BATCH)]
        return walks + [encoded(tokenizer, product(rng), tool="calculator") for _ in range(BATCH)]

    return rows


def warm_start(source: Path, target: Path, batch: Rows, steps: int) -> float:
    """Supervised steps on the rows of `batch`; the last loss."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    rng, loss = random.Random(1), torch.zeros(())
    for step in range(steps):
        rows = batch(tokenizer, rng)
        width = max(len(ids) for ids, _ in rows)
        tokens, labels = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
        for row, (ids, mask) in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.where(torch.tensor(mask, dtype=torch.bool), torch.tensor(ids), -100)
        loss = model(input_ids=tokens, attention_mask=tokens > 0, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"  warm start: step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="output/agentic_assets")
    parser.add_argument("--force", action="store_true", help="make it anew")
    args = parser.parse_args()
    output = Path(args.output)
    manifest = output / "manifest.json"
    if not args.force and manifest.is_file() and json.loads(manifest.read_text()).get("version") == VERSION:
        print(f"agentic assets are complete in {output}")
        return
    started = time.time()
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    print(f"making agentic assets in {output}")
    make_model(temporary / "random")
    make_tokenizer(temporary / "random")
    world = FrozenLake(FrozenLakeOptions(words="short"))
    loss = warm_start(temporary / "random", temporary / "model", demo_rows(world), STEPS_WARM)
    shutil.rmtree(temporary / "random")
    (temporary / "manifest.json").write_text(json.dumps({"version": VERSION, "warm_start_loss": loss}))
    shutil.rmtree(output, ignore_errors=True)
    temporary.rename(output)
    print(f"done in {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
