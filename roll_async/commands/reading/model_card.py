"""What is said of a run's model where others find it: the card, the curve, the config without what is of a machine."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roll_async import __version__
from roll_async.config.secrets import HIDDEN, is_secret
from roll_async.observe.reading.run_reader import RunReader, visible
from roll_async.observe.reading.sample_index import SampleFilter
from roll_async.observe.run_record import read_record

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

RUN_CONFIG = "run_config.yaml"
"""Beside config.json, which is the model's."""
MARK = "roll_async_run"
"""Key of the card with the id of the run."""
_OWN = (
    "output_dir", "checkpoint.output_dir", "checkpoint.resume_from", "ledger.path", "tracking.rollout_dump_dir",
    "tracking.tracker_kwargs",
)  # fmt: skip
"""Keys that say where one run was kept and who watched it. Without them a run is kept where its reader starts it."""
_CACHED = re.compile(r"(?<!\S)\S*?/(models|datasets)--([^/\s]+)/snapshots/[^/\s]+/?(\S*)")
"""A folder or file in the cache of the hub."""
_PATH = re.compile(r"(?<![\w./<-])(?:file:/*)?(?:~|\.\.)?(?:/[\w.@+%=~-]+){2,}/?")
_ADDRESS = re.compile(
    # The lengths have bounds, since a search in a long text without blanks would take their square.
    r"\b(?!(?:hf|file|modelscope):)[a-z][a-z0-9+.-]{0,30}://(?:[^\s/@]*@)?[^\s'\",;)]+"
    r"|\b[^\s'\",;/@=]{1,99}@[\w.-]{1,253}:\d{2,5}\b|\blocalhost:\d{2,5}\b"
    r"|\[[\da-f]{0,4}(?::[\da-f]{0,4}){2,7}\]:\d{2,5}\b"
    # With up to four digits it may be a line of a file.
    r"|\b(?:(?:[\w-]{1,63}\.){1,9}(?!(?:py|md|ya?ml|jsonl?|txt|log|toml):\d{1,4}\b)[a-z][\w-]{0,63}:\d{2,5}"
    r"|(?:[^\s'\",;/@=]{1,99}@)?\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?)\b",
    re.I,
)
_METHODS = {
    "rlvr": ("reinforcement learning with verifiable rewards", "reinforcement-learning"),
    "agentic": ("reinforcement learning of an agent in its worlds", "reinforcement-learning"),
    "sft": ("supervised fine-tuning", "sft"),
    "dpo": ("direct preference optimisation", "dpo"),
}
"""Pipeline to what it does, and its tag."""
_TRAINED = (
    "reward/mean", "reward/accuracy", "rewards/accuracies", "rewards/margins", "response/length_mean", "staleness/mean",
)  # fmt: skip
_VALIDATED = re.compile(r"validation/(sets/[^/]+/)?(reward|accuracy|loss|rewards/\w+|(avg|pass)@\d+)")
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM takes as --max-lora-rank."""
_FIRST_AND_LAST = 5
_SAMPLE_CHARACTERS, _TEXTS = 1500, (("Prompt", "prompt"), ("Answer", "response"))


def public_text(text: str) -> str:
    """A text without addresses and without folders of this machine: of an absolute path its last part is left, of one
    in the hub's cache its name on the hub.
    """

    def on_hub(match: re.Match[str]) -> str:
        name = match[2].replace("--", "/", 1)
        return name if match[1] == "models" else f"hf://datasets/{name}/{match[3]}"

    text = _without_home(_ADDRESS.sub("<address>", text))
    if text.startswith(("/", "~/", "../")) and text.count("/") > 1 and "\n" not in text and "/snapshots/" not in text:
        return f"./{Path(text).name}"  # the whole of it, as names may have blanks
    return _PATH.sub(lambda match: f"./{Path(match[0]).name}", _CACHED.sub(on_hub, text))


def _without_home(text: str) -> str:
    home = str(Path.home())
    # One of a single name, as /root, tells nothing, and may be the end of other words.
    before = r"(?<![\w./])" if home.count("/") == 1 else ""
    return re.sub(rf"{before}{re.escape(home)}(?![\w-])(?!\.\w)", "~", text) if home.strip("/") else text


def public_config(value: object, known: Mapping[str, str], path: tuple[str, ...] = ()) -> object:
    """A config as others may read it and run it: no secrets, no variables of the environment, no paths of a machine.
    `known`: folders and their names on the hub.
    """
    if isinstance(value, dict):
        items = ((str(key), item) for key, item in value.items())
        return {
            key: public_config(item, known, (*path, key))
            for key, item in items
            if key != "system_envs" and ".".join((*path, key)) not in _OWN
        }
    if isinstance(value, list):
        return [public_config(item, known, (*path, str(i))) for i, item in enumerate(value)]
    if value not in (None, "") and not isinstance(value, bool) and is_secret(path):
        return HIDDEN  # an earlier version may have written it
    return known.get(value, public_text(value)) if isinstance(value, str) else value


def base_of(run: RunReader) -> str | None:
    """Name on the hub of the model that a run began with; None for a folder."""
    from roll_async.launch.checks.inputs import is_hub_name

    name = public_text(str(run.config.get("pretrain", "")))
    return name if "/" in name and not name.startswith((".", "modelscope:")) and is_hub_name(name) else None


def run_id(run: RunReader) -> str:
    """Id of a run; `-` where an earlier version gave none."""
    record = read_record(run.path)
    return "-" if record is None else record.run_id


def write_card(
    folder: Path, run: RunReader, *, repo: str, revision: str | None, base: str | None, step: int, num_samples: int
) -> None:
    """Write README.md, the config and the curve into a folder with the model of `step` (0 = unknown)."""
    from huggingface_hub import ModelCard

    rows = [row for row in run.metrics if not step or row["step"] <= step]
    with_rewards = any("reward/mean" in row for row in rows)
    picture = ("reward.png" if with_rewards else "loss.png") if rows else None
    if picture:
        from roll_async.observe.report import draw

        draw(rows, folder / picture, run.path.name)
    config = run.path / "config.yaml"
    known = {str(run.config["pretrain"]): base} if base and "pretrain" in run.config else {}
    tree = public_config(yaml.safe_load(config.read_text()), known) if config.is_file() else {}
    (folder / RUN_CONFIG).write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    adapter = (folder / "adapter_config.json").is_file()
    parts = [
        f"---\n{_front(folder, run, base, adapter)}\n---\n",
        f"# {run.path.name}\n",
        _about(run, base, step, rows),
        _results(rows),
        f"![Over the training steps]({picture})\n" if picture else "",
        _use(folder, run, repo, revision, base if adapter else None),
        _repeat(run, repo, revision),
        _samples(run, step, num_samples),
    ]
    ModelCard("\n".join(part for part in parts if part)).save(folder / "README.md")


def _front(folder: Path, run: RunReader, base: str | None, adapter: bool) -> ModelCardData:
    """The head of the card. Licence and languages are those of the base's own card, where it came along."""
    from huggingface_hub import ModelCard, ModelCardData

    config = run.config
    kept, of_base = folder / "README.md", {}
    if kept.is_file():
        with suppress(ValueError, yaml.YAMLError):  # a card that nobody can read says nothing
            of_base = ModelCard.load(kept).data.to_dict()
    inherited = ("license", "license_name", "license_link", "language")
    more: dict[str, Any] = {key: of_base[key] for key in inherited if key in of_base}
    more[MARK] = run_id(run)
    data = re.findall(r"hf://datasets/([^/]+/[^/]+)", " ".join(_data(run)))
    tags = ["roll_async", _method(run)[1], config.get("algorithm.adv_estimator")]
    return ModelCardData(
        base_model=base,
        datasets=list(dict.fromkeys(data)) or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="image-text-to-text" if "vision_config" in json_of(folder / "config.json") else "text-generation",
        tags=[str(tag) for tag in [*tags, "lora" if config.get("actor_train.model_args.lora_rank") else None] if tag],
        **more,
    )


def _method(run: RunReader) -> tuple[str, str]:
    return _METHODS.get(str(run.config.get("pipeline")), _METHODS["rlvr"])


def _data(run: RunReader) -> list[str]:
    """The files of the prompts or rows, as they are said."""
    found = run.config.get("actor_train.data_args.file_name") or []
    return [public_text(str(name)) for name in (found if isinstance(found, list) else [found])]


def _about(run: RunReader, base: str | None, step: int, rows: Sequence[Mapping[str, float]]) -> str:
    config = run.config

    def of(section: str, key: str) -> str:
        found = [(name.split("."), value) for name, value in config.items()]
        return ", ".join(f"{n[1]}: `{v}`" for n, v in found if len(n) == 3 and (n[0], n[2]) == (section, key))

    estimator, ratio = config.get("algorithm.adv_estimator"), config.get("async_generation_ratio")
    rank, trained = config.get("actor_train.model_args.lora_rank"), step or (int(rows[-1]["step"]) if rows else 0)
    method = [_method(run)[0], f"`{estimator}`" if estimator else "", f"LoRA of rank {rank}" if rank else ""]
    said = [
        ("Base model", f"[{base}](https://huggingface.co/{base})" if base else "a local folder"),
        ("Method", ", ".join(filter(None, method))),
        ("Steps", f"{trained} of {config.get('max_steps', '-')}"),
        ("Generated ahead", None if ratio is None else f"{ratio:g} batches (`async_generation_ratio`)"),
        ("Data", ", ".join(f"`{name}`" for name in _data(run))),
        ("Rewards", of("rewards", "type")),
        ("Worlds", of("custom_envs", "env_type")),
        ("Learning rate", config.get("actor_train.training_args.learning_rate")),
        ("Software", f"roll_async {__version__}"),
    ]
    return "".join(f"- {name}: {value}\n" for name, value in said if value not in (None, ""))


def _results(rows: Sequence[Mapping[str, float]]) -> str:
    """A table: means of the first and the last steps, the first and the last validation."""
    keys = [*_TRAINED, *([] if any("reward/mean" in row for row in rows) else ["trainer/loss"])]
    lines = []
    for key in keys:
        values = [row[key] for row in rows if key in row]
        ends = values[:_FIRST_AND_LAST], values[-_FIRST_AND_LAST:]
        if values:
            lines.append(f"| `{key}` | {' | '.join(f'{sum(part) / len(part):.4g}' for part in ends)} |")
    for key in dict.fromkeys(key for row in rows for key in row if _VALIDATED.fullmatch(key)):
        told = [f"{row[key]:.4g} (step {row['step']:.0f})" for row in rows if key in row]
        lines.append(f"| `{key}` | {told[0]} | {told[-1]} |")
    head = f"## Results\n\nMeans of the first and last {_FIRST_AND_LAST} steps; validations with their step.\n\n"
    head += "| | first | last |\n|---|---|---|\n"
    return head + "\n".join(lines) + "\n" if lines else ""


def _use(folder: Path, run: RunReader, repo: str, revision: str | None, base: str | None) -> str:
    """Commands that load the model. `base`: of an adapter."""
    where = f'"{repo}"' + (f', revision="{revision}"' if revision else "")
    at = f" --revision {shlex.quote(revision)}" if revision else ""
    chat = (folder / "chat_template.jinja").is_file() or "chat_template" in json_of(folder / "tokenizer_config.json")
    sees = "vision_config" in json_of(folder / "config.json")
    reader, reads = ("processor", "AutoProcessor") if sees else ("tokenizer", "AutoTokenizer")
    parts = '[{"type": "image", "path": "..."}, {"type": "text", "text": "..."}]' if sees else '"..."'
    asks = (
        f'inputs = {reader}.apply_chat_template(\n    [{{"role": "user", "content": {parts}}}],\n    '
        f'add_generation_prompt=True, {"tokenize=True, " if sees else ""}return_tensors="pt", return_dict=True,\n)'
        if chat or sees
        else 'inputs = tokenizer("...", return_tensors="pt")'
    )
    kind = "AutoModelForImageTextToText" if sees else "AutoPeftModelForCausalLM" if base else "AutoModelForCausalLM"
    imports = f"from peft import {kind}\nfrom transformers import AutoTokenizer"
    if sees or not base:
        imports = f"from transformers import {kind}, {reads}"
    tokens = run.config.get("response_length") or 512
    of_tokenizer = f'"{base}"' if base and not (folder / "tokenizer_config.json").is_file() else where
    name, rank = repo.rpartition("/")[2], int(str(json_of(folder / "adapter_config.json").get("r", 0)))
    limit = next((limit for limit in _LORA_RANKS if limit >= rank), rank)
    serve = (
        f"vllm serve {base} --enable-lora --max-lora-rank {limit} --lora-modules {name}={repo}"
        if base
        else f"vllm serve {repo}{at}  # an OpenAI-compatible server on port 8000"
    )
    return f"""## Use

```python
{imports}

{reader} = {reads}.from_pretrained({of_tokenizer})
model = {kind}.from_pretrained({where}, dtype="auto")
{asks}
output = model.generate(**inputs, max_new_tokens={tokens})
print({reader}.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```

```bash
{serve}
```
"""


def _repeat(run: RunReader, repo: str, revision: str | None) -> str:
    at = f" --revision {shlex.quote(revision)}" if revision else ""
    record = read_record(run.path)
    typed = f"\nIt was started with `{public_text(shlex.join(record.command))}`.\n" if record and record.command else ""
    return f"""## Repeat

[`{RUN_CONFIG}`]({RUN_CONFIG}) is the config with all defaults. Paths that begin with `./` were files and folders of the
machine of the run, `{HIDDEN}` a secret and `<address>` a server: put your own there. Rewards, worlds and tools whose
name is a dotted path are code of the author and not in this repository.

```bash
hf download {repo} {RUN_CONFIG}{at} --local-dir .
roll-async run --config {RUN_CONFIG}
```
{typed}"""


def _samples(run: RunReader, step: int, count: int) -> str:
    """The first sample of some groups of the newest step that has any, as they come: not the best ones."""
    if not count:
        return ""
    index = run.samples
    try:
        index.refresh()
        _, entries = index.page(SampleFilter(last_step=step or None), limit=1000)
        firsts = {entry["group_id"]: entry for entry in reversed(entries) if entry["step"] == entries[0]["step"]}
        chosen = sorted(firsts.values(), key=lambda entry: int(str(entry["id"])))[:count]
        rows = [next(row for row in index.group_of(int(str(e["id"]))) if row["id"] == e["id"]) for e in chosen]
    finally:
        run.close()
    told = []
    for entry, row in zip(chosen, rows, strict=True):
        score = "-" if entry["score"] is None else f"{entry['score']:.3f}"
        texts = "\n\n".join(_fenced(name, str(row[key])) for name, key in _TEXTS)
        told.append(f"Step {entry['step']}, {entry['domain']}, score {score}\n\n{texts}\n")
    return "## Samples\n\nOf the last step that is kept, not chosen by score.\n\n" + "\n".join(told) if told else ""


def _fenced(name: str, text: str) -> str:
    """A text as a block that it cannot end, however many backquotes are in it, without the home folder's name."""
    cut = "" if len(text) <= _SAMPLE_CHARACTERS else "\n..."
    shown = visible(_without_home(text)[:_SAMPLE_CHARACTERS]) + cut
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{name}:\n\n{fence}text\n{shown}\n{fence}"


def json_of(path: Path) -> dict[str, object]:
    """What a file of a model says; nothing where there is none. Raises ValueError for one that is damaged."""
    with suppress(ValueError):
        if isinstance(values := json.loads(path.read_text("utf-8")) if path.is_file() else {}, dict):
            return values
    raise ValueError(f"{path} is no JSON object; restore it, or make the model again with roll-async convert")
