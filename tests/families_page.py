"""The page docs_roll/families.md, made by running what a run runs on the tokenizers of `family_tokenizers.py`.

python -m tests.families_page [--write]
"""

import argparse
import asyncio
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from jinja2 import TemplateError

from roll_async.config.schema_rollout import RewardConfig
from roll_async.observe.thoughts import marks_of
from roll_async.prompts.call_forms import PROBE_TOOL, written_by
from roll_async.prompts.end_marks import EndMarks, leading_marks
from roll_async.prompts.load import DataOptions, load_prompts
from roll_async.prompts.rows import Columns
from roll_async.prompts.tokenizer import load_tokenizer, special_marks
from roll_async.prompts.tool_calls import HERMES, HERMES_EXAMPLE
from roll_async.rewards.serving.router import RewardRouter
from tests.cluster.family_sums import CALL_ENDS, pieces
from tests.family_talks import AFTER_USER, FIRST, talk, tool, user
from tests.family_tokenizers import FAMILIES, save_family

PAGE = Path(__file__).resolve().parents[1] / "docs_roll" / "families.md"
COLUMNS = (
    *("family", "a text begins with", "ends of a turn", "closed", "later turns", "after a thought", "after a call"),
    *("calls read", "calls a turn", "arguments", "thought opened by", "unfinished, finished"),
)
WITH_THOUGHT = {
    "glm-4.5": "\n<think>hm</think>\na1",
    "qwen-3": "<think>\nhm\n</think>\n\na1",
    "deepseek-r1": "hm</think>a1",
}
"""A turn of the families whose vocabulary has the marks of a thought."""
INTRODUCTION = """# Model families: turns, tools and thoughts

Made by `python -m tests.families_page --write`: each cell is what the code of a run does with a tokenizer of the
family's shape (its marks, and what its chat template says), and no cell is typed. How marks, openings and thoughts are
found: [data.md](data.md), [rewards.md](rewards.md#thoughts), [agentic.md](agentic.md#traces). Which weights can be
trained: [conversion.md](conversion.md).

"""
LEGEND = """
- **a text begins with**: marks that a whole chat holds once, written by template or tokenizer.
- **ends of a turn**: what engines stop at. Each is said once, whoever said it. **closed**: a turn has a mark of its
  own; else the head of the next turn is its end.
- **later turns**: whether the third prompt of a chat, made from the tokens that were sampled, is equal to what the
  template says of the whole chat; `other`: it continues what was sampled, where the template would trim white space or
  write another mark about it. **after a thought**, **after a call**: whether the next prompt continues what was
  sampled, or begins a branch, and why. A branch is a row of its own.
- **calls read**: the form of calls that is read in the model's text. **calls a turn**, **arguments**: as the template
  takes them; several calls are told to a template that takes one as several turns.
- **unfinished, finished**: scores of a right answer inside a thought that never ends, and after one that does.
"""
EXAMPLES = """
## What such a run trains

Four runs of two steps, of a tiny GLM-4 and a tiny Llama 3.1, with Ray, trainer and engine (Hugging Face's). The models
have learned to call `add` and to say its result. `tests/cluster/test_family_runs.py` compares the rows that the runs
dump with these texts, for the numbers of each row. Between `[[` and `]]` stands what was sampled, which alone is
trained; the rest is the template's, and the loss mask is 0 there.
"""
OWN_MODEL = """
## Your own model

With the folder of its tokenizer this prints the form in which its calls are read, the tokens that end its turns (and
what an engine would not stop at by itself), what its tokenizer puts before a text, and all that stands between a call,
ended by the model's own mark, and the answer to its result:

```python
{code}
```

No device and no weights are needed. What a run trained, token by token and with its loss mask, is in the files of
`tracking.rollout_dump_dir`.
"""
CODE = """\
from roll_async.agents.rendering import TemplateRenderer
from roll_async.prompts.tokenizer import Opening, load_tokenizer

tokenizer = load_tokenizer("FOLDER")
renderer = TemplateRenderer(tokenizer)
print("calls:", renderer.calls.family)
print("ends:", [tokenizer.decode([i]) for i in renderer.ends.ids], renderer.ends.difference)
print("opening:", repr(tokenizer.decode(Opening(tokenizer).before("?").tolist())))
print("after a call:", repr(tokenizer.decode(renderer.between(renderer.ends.own, ["42"]).tolist())))"""


def page():
    """Its text."""
    rows = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ("---",) * len(COLUMNS), *map(cells_of, FAMILIES))]
    parts = [INTRODUCTION, "\n".join(rows) + "\n", LEGEND, EXAMPLES]
    for name in CALL_ENDS:
        for kind, offered in (("RLVR: a question, the tool of `FullyAsyncMain(tools=...)`", False), ("agentic", True)):
            parts.append(f"\n{name}, {kind}:\n\n```\n{shown(name, offered=offered)}\n```\n")
    return "".join([*parts, OWN_MODEL.format(code=CODE)])


def shown(name, *, offered):
    """A row of a run, what was sampled in double brackets."""
    prompt, call, result, answer = pieces(name, 3, 4, offered=offered)
    return f"{prompt}[[{call}]]{result}[[{answer}]]"


def cells_of(name):
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        save_family(name, Path(folder))
        tokenizer = load_tokenizer(folder)
        prompt, ends = _prompt(folder), EndMarks.of(tokenizer)
        written, last = written_by(partial(_render, tokenizer)), WITH_THOUGHT.get(name)
        return (
            name,
            _code(_openings(tokenizer)) or "nothing",
            _code(tokenizer.decode([i]) for i in ends.ids),
            "yes" if ends.closes else "no",
            _later_turns(name, tokenizer),
            "" if last is None else _next_turn(name, tokenizer, last, user("q2")),
            _after_call(name, tokenizer, written),
            "Hermes, in our own words" if written is None else written.form.family,
            "" if written is None else "several" if written.takes_several else "one",
            "" if written is None else "text" if written.as_text else "objects",
            "the template" if prompt.thought else "" if last is None else "the model",
            ", ".join(f"{score:g}" for score in asyncio.run(_scores(tokenizer, prompt))),
        )


def _code(texts):
    return ", ".join(f"`{text}`".replace("|", "\\|") for text in texts)  # a cell of Markdown ends at the sign


def _openings(tokenizer):
    """Marks at the beginning of a chat that no further turn repeats."""
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return [mark for mark in leading_marks(text, special_marks(tokenizer)) if text.count(mark) == 1]


def _later_turns(name, tokenizer):
    thought, head = ("hm</think>" if name == "deepseek-r1" else ""), FIRST.get(name, "")
    turns = [(f"{thought}{head}a{number}", AFTER_USER[name]) for number in (1, 2, 3)]
    asked, _, session = talk(name, turns, [user("q2"), user("q3")], tokenizer)
    texts = {"user": ["q1", "q2", "q3"], "assistant": [f"{thought}a1", f"{thought}a2"]}
    roles = ("user", "assistant", "user", "assistant", "user")
    chat = [{"role": role, "content": texts[role].pop(0)} for role in roles]
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    said = "equal" if asked[-1] == whole else "other"
    return f"{said}, by branches" if session.tree.branches else said


def _after_a_call(name):
    return "<|observation|>" if name.startswith("glm") else AFTER_USER[name]


def _next_turn(name, tokenizer, said, follow_up, mark="", tools=()):
    turns = [(said, mark or AFTER_USER[name]), ("a2", AFTER_USER[name])]
    branches = talk(name, turns, [follow_up], tokenizer, tools)[2].tree.branches
    return ", ".join(f"branch (`{reason}`)" for reason in branches) or "continued"


def _after_call(name, tokenizer, written):
    form, example = (HERMES, HERMES_EXAMPLE) if written is None else (written.form, written.example)
    assert len(form.read(example)[1]) == 1
    head = {"glm-4.5": FIRST["glm-4.5"], "deepseek-r1": "hm</think>"}.get(name, "")
    return _next_turn(name, tokenizer, head + example, tool("42"), _after_a_call(name), [PROBE_TOOL])


def _render(tokenizer, chat):
    """Empty where the template refuses."""
    try:
        return tokenizer.apply_chat_template(chat, tools=[PROBE_TOOL], add_generation_prompt=True, tokenize=False)
    except (TemplateError, TypeError, LookupError, AttributeError):
        return ""


def _prompt(folder):
    rows = Path(folder) / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "9+9?"}], "ground_truth": "18"}))
    options = DataOptions(
        files=(str(rows),),
        columns=Columns(),
        template="native",
        prompt_length=500,
        domains={"math": ()},
        tokenizer_folder=folder,
    )
    return load_prompts(options)["math"][0]


async def _scores(tokenizer, prompt):
    router = RewardRouter({"math": RewardConfig(type="qa", answer_format="boxed")}, marks_of(tokenizer))
    await router.start()
    try:
        opening = "" if prompt.thought else "<think>"
        said = [rf"{opening}9+9 is \boxed{{18}}", rf"{opening}9+9</think>\boxed{{18}}"]
        return [(await router.score(prompt, text)).score for text in said]
    finally:
        await router.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the document")
    args = parser.parse_args()
    text = page()
    if args.write:
        PAGE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    sys.exit(main())
