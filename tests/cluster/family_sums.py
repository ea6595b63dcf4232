"""Sums that a tiny model asks a tool for, in the words of its family: its rows, its warm start, the tool, the reward.

    3+4        add(a=3, b=4)        7        7
    question   call                 result   answer

The model copies and cannot add: while it learns, results are any digits. So a right answer was read in the result.

    python tests/cluster/family_sums.py --config NAME [KEY=VALUE ...]      an RLVR run with the tool
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from roll_async.agents.tools.toolbox import function
from roll_async.rewards.verdict import Verdict
from tests.family_tokenizers import end_ids_of, save_family

SCHEMA = function("add", "a+b", {"a": {"type": "integer"}, "b": {"type": "integer"}})
QUESTIONS = [(a, b) for a in range(1, 5) for b in range(1, 5)]
DIGITS = "123456789"
CALL_ENDS = {"glm-4": ("<|observation|>",), "llama-3.1": ("<|eot_id|>", "<|eom_id|>")}
"""What ends a call, each equally often."""
ANSWER_END = {"glm-4": "<|user|>", "llama-3.1": "<|eot_id|>"}
_LLAMA_TURN = "<|start_header_id|>{role}<|end_header_id|>\n\n"
OFFER = {"glm-4": "<|system|>\n# Tools\n{schema}\n", "llama-3.1": "Environment: ipython\n{schema}\n"}
PROMPT = {
    "glm-4": "[gMASK]<sop>{offer}<|user|>\n{a}+{b}<|assistant|>",
    "llama-3.1": "<|begin_of_text|>"
    + "".join(
        _LLAMA_TURN.format(role=role) + said
        for role, said in (("system", "{offer}<|eot_id|>"), ("user", "{a}+{b}<|eot_id|>"), ("assistant", ""))
    ),
}
CALL = {
    "glm-4": 'add\n{{"a": {a}, "b": {b}}}{end}',
    "llama-3.1": '{{"name": "add", "parameters": {{"a": {a}, "b": {b}}}}}{end}',
}
RESULT = {
    "glm-4": "\n{sum}<|assistant|>",
    "llama-3.1": _LLAMA_TURN.format(role="ipython") + '"{sum}"<|eot_id|>' + _LLAMA_TURN.format(role="assistant"),
}
ANSWER = {"glm-4": "\n{sum}<|user|>", "llama-3.1": "{sum}<|eot_id|>"}
"""What stands in a row of a run, piece by piece, typed from the templates of the families. Of the four, the model says
the call and the answer.
"""
ARCHITECTURE = {"glm-4": "Glm4", "llama-3.1": "Llama"}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # it learns to copy within 50 steps; at 0.02 a Llama does not within 200
    "tie_word_embeddings": True,
}
SHORT_STEPS, STEPS, BATCH, RATE = 50, 140, 16, 3e-3
"""Conversations with tools offered come after `SHORT_STEPS`: they are four times as long."""
DIGIT_WEIGHT = 4.0


def pieces(name, a, b, *, offered, end=""):
    """Prompt, call, result and answer of a row. `offered`: the tool, in the prompt. `end`: of the call."""
    offer = OFFER[name].format(schema=json.dumps(SCHEMA)) if offered else ""
    values = {"a": a, "b": b, "sum": a + b, "offer": offer, "end": end or CALL_ENDS[name][0]}
    return tuple(piece[name].format(**values) for piece in (PROMPT, CALL, RESULT, ANSWER))


async def add(arguments):
    """The tool of RLVR runs."""
    return str(arguments["a"] + arguments["b"])


class Adder:
    """The tool of agentic runs."""

    schemas = (SCHEMA,)

    async def call(self, name, arguments):
        return await add(arguments)


class LastLine:
    """1 where the last line of the whole response is the sum alone; marks of a template are counted."""

    def __call__(self, text, ground_truth, extra):
        right = float(text.splitlines()[-1:] == [ground_truth])
        return Verdict(score=right, acc=right, metrics={"marks": float(text.count("<|"))})


def make_assets(name, folder):
    """model/ and train.jsonl of a family. Returns the share of conversations that the model says whole, its likeliest
    token taken each time.
    """
    rows = [
        {"id": f"{a}+{b}", "messages": [{"role": "user", "content": f"{a}+{b}"}], "ground_truth": str(a + b)}
        for a, b in QUESTIONS
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "model").mkdir()
    return _warm_start(name, folder / "model")


def _warm_start(name, folder):
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer, rng = save_family(name, folder), random.Random(0)
    ends = list(end_ids_of(name, tokenizer))
    marks = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends, "pad_token_id": None}
    kind = getattr(transformers, f"{ARCHITECTURE[name]}Config")
    config = kind(**SIZES, **marks, vocab_size=len(tokenizer), dtype="float32")
    model = getattr(transformers, f"{ARCHITECTURE[name]}ForCausalLM")(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # where cores are shared, waiting for a second thread costs more
    try:
        for step in range(STEPS):
            _, losses, weights = _said(model, name, tokenizer, rng, step >= SHORT_STEPS and step % 2)
            ((losses * weights).sum() / weights.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        with torch.no_grad():
            right = [_said(model, name, tokenizer, rng, tools)[0] for tools in (False, True)]
    finally:
        torch.set_num_threads(threads)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    return float(torch.cat(right).mean())


def _said(model, name, tokenizer, rng, tools):
    """([B] 1 where the likeliest tokens are right, [B, T] losses, [B, T] weights) of a batch of one length."""
    import torch

    rows = [conversation(name, tokenizer, rng, [SCHEMA] if tools else None) for _ in range(BATCH)]
    tokens, weights = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
    logits, tokens, weights = model(input_ids=tokens).logits[:, :-1], tokens[:, 1:], weights[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    digits = weights == DIGIT_WEIGHT
    return ((logits.argmax(-1) == tokens) | ~digits).all(1).float(), losses, weights


def conversation(name, tokenizer, rng, tools):
    """(token ids, weight of each in the loss) of a question, a call, any result, and that result as the answer: what
    the family's template says.
    """
    (a, b), result = rng.choice(QUESTIONS), rng.choice(DIGITS)
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    chat = [
        {"role": "user", "content": f"{a}+{b}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": result},
        {"role": "assistant", "content": result},
    ]

    def said(turns, *, begins):
        text = tokenizer.apply_chat_template(chat[:turns], tools=tools, add_generation_prompt=begins, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)

    marks = tokenizer.convert_tokens_to_ids([*CALL_ENDS[name], ANSWER_END[name]])
    question, read, whole = said(1, begins=True), said(3, begins=True), said(4, begins=False)
    whole += [] if whole[-1] == marks[-1] else marks[-1:]  # a template of GLM closes no turn
    closes = whole.index(marks[0], len(question))
    whole[closes] = rng.choice(marks[:-1])
    digits = {*tokenizer.convert_tokens_to_ids(list(DIGITS))}
    speaks = [len(question) <= i <= closes or i >= len(read) for i in range(len(whole))]
    return whole, [speak * (DIGIT_WEIGHT if i in digits else 1.0) for i, speak in zip(whole, speaks, strict=True)]


if __name__ == "__main__":
    from roll_async.commands.fully_async import FullyAsyncMain

    sys.exit(FullyAsyncMain(tools={"add": add}).run(sys.argv[1:]))
