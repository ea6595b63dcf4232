"""`from roll_async import train`: a run from a script, a notebook or a test; what `roll-async run` does, as a function.

    from roll_async import train

    run = train(model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, reward=lambda text, truth, extra: float(truth in text))
    print(run.metrics[-1]["reward/mean"], run.hf)

What a script has and no file (rows, a function, the config) is written beside the run's folder, from where
`roll-async run` goes on with the run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from roll_async.commands.command_line import EXIT_INTERRUPTED, EXIT_USAGE
from roll_async.commands.configs import template
from roll_async.commands.run import exit_code, opened, origin, shown_cause, trained
from roll_async.config.secrets import shown_override
from roll_async.config.user_code import is_library
from roll_async.config.yaml.diagnostics import printable
from roll_async.launch.run_start import checkpoints_of
from roll_async.pipelines.protocol import RunEnd
from roll_async.pipelines.wire import UserHooks
from roll_async.prompts.rows import found_columns

Metrics = Mapping[str, float]
RewardFunction = Callable[[str, str, Mapping[str, str]], float | Mapping[str, float]]

_SHIM = '''"""The reward that `train` was given, as cloudpickle has it."""

import sys
from pathlib import Path

import cloudpickle

sys.path += [folder for folder in {folders!r} if folder not in sys.path]
score = cloudpickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run left."""

    folder: Path
    """config.yaml, metrics.jsonl, run.log, reward.png, ..."""
    metrics: Sequence[Metrics]
    """A row for each step; docs_roll/metrics.md has their names."""
    hf: Path
    """The trained model, as Transformers loads it."""
    checkpoint: Path | None
    """The last one; None = there is none."""
    samples: Path | None
    """The folder of the samples; None = the run kept none."""


def train(
    model: str | Path,
    data: str | Path | Sequence[Mapping[str, object]],
    reward: str | RewardFunction,
    *,
    steps: int = 100,
    on_step: Callable[[int, Metrics], object] | None = None,
    gpus: int | None = None,
    hooks: UserHooks | None = None,
    **overrides: object,
) -> Run:
    """Train `model`, a folder or a hub name, by reinforcement learning with verifiable rewards.

    `data`: a file, or rows with `prompt` or `messages`, and `ground_truth`. `reward(text, ground_truth, extra)`: a
    number, or a dict with `score` and numbers of its own; or the name of a shipped rule. `on_step(step, metrics)` is
    called in this process. `gpus`: of this machine, by default all; 0 = its CPU. `overrides`: keys of the config
    (docs_roll/configuration.md), nested as dicts or dotted: `**{"checkpoint.resume_from": "latest"}`.

    Raises ValueError for bad input, RuntimeError when a role failed, KeyboardInterrupt after a Ctrl-C, when the state
    is saved; what `on_step` or another hook raises is raised as it is.
    """
    hooks = replace(hooks or UserHooks(), **({} if on_step is None else {"on_step": on_step}))
    overrides = {"max_steps": steps, **overrides}
    name = str(overrides.pop("exp_name", "train"))
    # Beside the run's folder, which is moved when another run begins there: one that was moved can still go on.
    inputs = (Path(str(overrides.get("output_dir", "./output"))) / f"{name}.inputs").absolute()
    files: dict[str, bytes] = {}
    kind = reward if isinstance(reward, str) else _pickled(reward, files)
    rows = template.describe_data(str(data)) if isinstance(data, str | Path) else _written(data, inputs, files)
    has, device_bytes = _gpus()
    choices = template.Choices.of(name, str(model), rows, kind, has if gpus is None else gpus, overrides=overrides)
    code = {file: content.decode() for file, content in files.items() if file.endswith(".py")}
    text = template.first_config(choices, device_bytes, code)
    config_file = inputs / f"train_{_digest(text.encode())}.yaml"
    inputs.mkdir(parents=True, exist_ok=True)
    for file, content in {**files, config_file.name: text.encode()}.items():
        (inputs / file).write_bytes(content)
    words = list(_flat(overrides))
    with ExitStack() as held:
        config, folder = opened(config_file, words, "rlvr", hooks, held)
        typed = "roll-async", "run", "--config", str(config_file), *map(shown_override, words)
        folder.update_record(command=typed)  # of the program that goes on with it
        try:
            end = trained(config, folder, hooks)
        except BaseException as error:  # also an interrupt, which may be inside an ExceptionGroup
            if (raised := _for_caller(error)) is error:
                raise
            raise raised from error
    if end is RunEnd.INTERRUPTED:
        raise KeyboardInterrupt
    saved = checkpoints_of(config, folder.record)
    samples = folder.path / "samples"
    return Run(
        folder=folder.path,
        metrics=folder.read_metrics(),
        hf=folder.path / "hf",
        checkpoint=saved.find("latest"),
        samples=samples if samples.is_dir() else None,
    )


def _gpus() -> tuple[int, int]:
    """(GPUs of this machine, bytes of one; where there is none, those of the ones that are usual)."""
    import torch

    if not torch.cuda.is_available():
        return 0, int(80e9)
    return torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory


def _written(
    data: Sequence[Mapping[str, object]], inputs: Path, files: dict[str, bytes]
) -> tuple[str, Mapping[str, str]]:
    """(file of the rows, keys of `data_args`)."""
    if isinstance(data, Mapping) or not data:
        raise ValueError("data: no rows; give rows with prompt and ground_truth, or the path of a file")
    lines, columns = [], found_columns(data[0], "data[0]")
    for number, row in enumerate(data):
        if found_columns(row, f"data[{number}]") != columns:
            raise ValueError(f"data[{number}]: other columns than data[0]; rows have the same")
        try:
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise ValueError(f"data[{number}]: {error}; rows hold what JSON can hold") from error
    content = "".join(lines).encode()
    name = f"data_{_digest(content)}.jsonl"
    files[name] = content
    return str(inputs / name), columns


def _pickled(reward: RewardFunction, files: dict[str, bytes]) -> str:
    """The dotted path of a module that loads the function in the reward processes. Its name is the function's digest:
    another one in the same process is another module.
    """
    import cloudpickle

    if not callable(reward):
        raise ValueError(f"reward: {reward!r} is neither a function nor the name of a rule")
    module = inspect.getmodule(reward)
    # By value: a script's own module is not found, or is another one, in a process that it did not start.
    by_value = module is not None and module.__name__ != "__main__" and not is_library(module)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        pickled = cloudpickle.dumps(reward)
    except Exception as error:  # what a user's objects raise; told as one line
        raise ValueError(
            f"reward: {getattr(reward, '__qualname__', reward)} cannot be sent to the reward processes: {error}; "
            "make what cannot be pickled (locks, clients, open files) inside of it"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    name = f"reward_{_digest(pickled)}"
    files[f"{name}.pkl"] = pickled
    files[f"{name}.py"] = _SHIM.format(folders=[folder for folder in sys.path if folder]).encode()
    return f"{name}.score"


def _digest(content: bytes) -> str:
    """Of a file's name: what a former run began with is never overwritten."""
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """`KEY=VALUE` of each leaf of nested keys."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
            continue
        try:
            text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
            yield f"{prefix}{key}={printable(text)}"  # YAML knows these escapes, and not the pairs of JSON
        except TypeError as error:
            raise ValueError(f"{prefix}{key}: {error}; give a number, a text, a list or a dict") from error


def _for_caller(error: BaseException) -> BaseException:
    """What `train` raises for it."""
    code, cause = exit_code(error), shown_cause(error)
    if code == EXIT_INTERRUPTED:
        return cause if isinstance(cause, KeyboardInterrupt) else KeyboardInterrupt()
    if code in (EXIT_USAGE, None) or isinstance(cause, RuntimeError):
        return cause
    return RuntimeError(f"{type(cause).__name__}: {cause}{origin(error)}")
