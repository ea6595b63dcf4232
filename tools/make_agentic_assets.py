"""Make what the agentic demos need: a tokenizer with a chat template that knows tools, and a tiny warm-started model.

    roll-async demo --assets-only agents
    python tools/make_agentic_assets.py [--output output/agentic_assets] [--force]

The model has seen clumsy play: lakes crossed with many random steps, and products mostly guessed, seldom computed with
the calculator. So it knows the form of both tasks, and reinforcement learning has something to choose from. That a call
must hold the question's own numbers is learned apart, from rows in which the call is given and from repeated tokens: a
model of this size copies nothing after products alone, and its calls would all be in vain. The share of right copies is
measured at the end. In the same way lakes are learned twice: clumsy walks as the demo asks for them, and walks under a
system message that no run has, where the good moves alone are learned: so the model can read a lake, and plays as if it
could not. Deterministic and idempotent; six minutes on one core; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
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
VERSION = 5
STEPS_WARM, RATE = 1000, 5e-3
CLUMSY_ROWS, TAUGHT_ROWS, PRODUCT_ROWS = 8, 10, 12
RANDOM_MOVES, CALLS = 0.5, 0.15
GIVEN_CALLS = 0.6  # share of the products in which the call is given and its content alone is learned
REPEATED_ROWS, REPEATED_TOKENS = 20, 64
LEAST_RIGHT_COPIES = 0.3
VOCABULARY = 384
MAX_TURNS = 10
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
WHOLE = (
    *WORDS, "<tool_call>", "</tool_call>", CALL, '"}}\n</tool_call>', "system\n", "user\n", "assistant\n", "tool\n",
    "calculator", *map(str, range(10, 100)),
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
    """A byte is a token, and so are the numbers of two digits and the frequent words of the demos.

    Byte-level, as the family of the model is: transformers loads what stands beside a Qwen2 as Qwen2's tokenizer, which
    spells a space and a line break as Qwen2 does, and drops those of any other spelling.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens([AddedToken(word, special=False, normalized=False) for word in WHOLE])
    assert len(fast) <= VOCABULARY
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def make_model(folder: Path) -> None:
    """A randomly initialised Qwen2 of about 0.1 million parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
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


def walk(world: FrozenLake, rng: random.Random) -> tuple[list[tuple[str, str]], list[bool]]:
    """(role, content) of a walk with many random steps, and which of its moves were not."""
    text, info = world.reset(seed=rng.randrange(1 << 20))
    chat, best = [], []
    for _ in range(MAX_TURNS):
        best.append(rng.random() >= RANDOM_MOVES)
        move = best_move(info["frame"], rng) if best[-1] else rng.randrange(4)
        chat += [("user", text), ("assistant", WORDS[move])]
        text, _, ended, _, info = world.step(WORDS[move])
        if ended:
            break
    return chat, best


def product(rng: random.Random, calls: float = CALLS) -> list[tuple[str, str]]:
    """A product, computed with the calculator in this share of cases, else guessed near the truth."""
    a, b, c = (rng.randint(10, 99) for _ in range(3))
    tasks = ((f"{a}*{b}", a * b), (f"{a}*{b}+{c}", a * b + c), (f"{a}+{b}*{c}", a + b * c), (f"{a}*{b}-{c}", a * b - c))
    expression, value = rng.choice(tasks)
    question = ("user", f"{expression}=")
    if rng.random() < calls:
        call = f'{CALL}{expression}"}}}}\n</tool_call>'
        return [question, ("assistant", call), ("tool", str(value)), ("assistant", str(value))]
    return [question, ("assistant", str(value + rng.choice((-100, -10, -1, 1, 10, 100)) * rng.randint(0, 3)))]


def encoded(
    tokenizer, chat: list[tuple[str, str]], *, tool: str = "", learned: list[bool] | None = None
) -> tuple[list[int], list[int]]:
    """(token ids, 1 where the assistant speaks) of a chat with this tool, if any; `learned` leaves out some turns."""
    ids, mask = [], []
    turns = iter(learned or [True] * len(chat))

    def add(text: str, spoken: bool) -> None:
        part = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(part)
        mask.extend([int(spoken)] * len(part))

    if tool:
        add(f"<|im_start|>system\n{tool}<|im_end|>\n", False)
    for role, content in chat:
        add(f"<|im_start|>{role}\n", False)
        add(f"{content}<|im_end|>", role == "assistant" and next(turns))
        add("\n", False)
    return ids, mask


def demo_rows(world: FrozenLake) -> Rows:
    """A batch of both tasks of the demos."""

    def rows(tokenizer, rng: random.Random) -> list[tuple[list[int], list[int]]]:
        walks = [encoded(tokenizer, walk(world, rng)[0]) for _ in range(CLUMSY_ROWS)]
        for _ in range(TAUGHT_ROWS):
            chat, best = walk(world, rng)
            walks.append(encoded(tokenizer, chat, tool="teacher", learned=best))
        repeated = [repeated_tokens(tokenizer, rng) for _ in range(REPEATED_ROWS)]
        return [*walks, *(worked_product(tokenizer, rng) for _ in range(PRODUCT_ROWS)), *repeated]

    return rows


def worked_product(tokenizer, rng: random.Random) -> tuple[list[int], list[int]]:
    """A product; where the call is given, its first token (the choice to call) is not learned."""
    if rng.random() >= GIVEN_CALLS:
        return encoded(tokenizer, product(rng), tool="calculator")
    ids, mask = encoded(tokenizer, product(rng, calls=1.0), tool="calculator")
    mask[mask.index(1)] = 0
    return ids, mask


def repeated_tokens(tokenizer, rng: random.Random) -> tuple[list[int], list[int]]:
    """A few numbers and signs over and over, learned from the first repetition on."""
    few = [
        str(rng.randint(10, 99)) if rng.random() < 0.7 else rng.choice("0123456789*+-=")
        for _ in range(rng.randint(3, 12))
    ]
    ids = tokenizer.convert_tokens_to_ids(few * REPEATED_TOKENS)[:REPEATED_TOKENS]
    return ids, [int(at > len(few)) for at in range(REPEATED_TOKENS)]


def share_of_right_copies(folder: Path, questions: int = 64) -> float:
    """How often a sampled call holds the question's own expression, once the model has begun a call."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(2)
    tokenizer, rng, right = AutoTokenizer.from_pretrained(folder), random.Random(2), 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for _ in range(questions):
        ids, mask = encoded(tokenizer, product(rng, calls=1.0)[:2], tool="calculator")
        begun = mask.index(1) + 1
        wanted = ids[begun:-1]
        answer = model.generate(torch.tensor([ids[:begun]]), do_sample=True, max_new_tokens=len(wanted))
        right += answer[0, begun:].tolist() == wanted
    return right / questions


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
    copies = share_of_right_copies(temporary / "model")
    if copies < LEAST_RIGHT_COPIES:
        raise SystemExit(f"only {copies:.2f} of the calls hold the question's numbers: there is nothing to learn from")
    found = {"version": VERSION, "warm_start_loss": loss, "right_copies": copies}
    (temporary / "manifest.json").write_text(json.dumps(found))
    shutil.rmtree(output, ignore_errors=True)
    temporary.rename(output)
    print(f"done in {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
