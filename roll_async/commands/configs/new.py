"""`roll-async new`: a first config, and a reward to change, for a model, data and a number of GPUs."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import click

from roll_async.commands.command_line import HELP, POSITIVE, print_escaped

_MOST_GPUS = 8


@click.command(context_settings=HELP, options_metavar="--model M --data D --gpus N [--reward R]")
@click.argument("folder", required=False, metavar="[DIR]")
@click.option("--model", help="A folder, or a name on the hub.")
@click.option("--data", help="A .jsonl, .json or .parquet file, which is looked into; or gsm8k, deepmath, demo.")
@click.option("--gpus", type=click.IntRange(0, _MOST_GPUS), help="Of this machine; 0 = run on its CPU.")
@click.option("--reward", help="A shipped rule (math_rule, ...), or MODULE.NAME; without it DIR/reward.py is written.")
@click.option("--size", type=POSITIVE, help="Billions of parameters of a model whose name does not say it.")
@click.option("--device-gb", type=POSITIVE, default=80.0, show_default=True, help="GB of a GPU.")
def command(
    folder: str | None,
    model: str | None,
    data: str | None,
    gpus: int | None,
    reward: str | None,
    size: float | None,
    device_gb: float,
) -> int:
    """Write DIR/config.yaml, and DIR/reward.py unless --reward is given. Asks for what is missing on a terminal.

    \b
    Example:
      roll-async new my_run --model Qwen/Qwen2.5-0.5B-Instruct --data gsm8k --gpus 1 --reward math_rule
    """
    if sys.stdin.isatty():
        model = model or click.prompt("model (a folder or a hub name)", default="Qwen/Qwen2.5-0.5B-Instruct")
        data = data or click.prompt("data (a file, or gsm8k)", default="gsm8k")
        gpus = click.prompt("GPUs", type=click.IntRange(0, _MOST_GPUS), default=1) if gpus is None else gpus
        reward = reward or click.prompt("reward (a rule, or own: a file to change)", default="own")
    if missing := [f"--{n}" for n, v in (("model", model), ("data", data), ("gpus", gpus)) if v is None]:
        raise click.UsageError(f"{', '.join(missing)}: needed where nobody can be asked")
    assert model is not None and data is not None and gpus is not None
    try:
        written = write(folder, model, data, gpus, None if reward == "own" else reward, size, device_gb)
    except (ValueError, OSError) as error:
        print(f"roll-async new: {error}", file=sys.stderr)
        return 2
    run = shlex.join(["roll-async", "run", "--config", str(written[0])])
    print_escaped("\n".join([*(f"wrote {path}" for path in written), f"next: {run}"]), sys.stdout)
    return 0


def write(
    folder: str | None, model: str, data: str, gpus: int, reward: str | None, billions: float | None, device_gb: float
) -> list[Path]:
    """The files, the config first. Raises ValueError for what cannot be trained so, and for a folder with files."""
    from roll_async.commands.configs import template  # imports torch: not for --help

    described = template.describe_data(data)
    choices = template.Choices.of("", model, described, reward or template.OWN_REWARD, gpus, billions=billions)
    stem = data if data in template.DATA else Path(data).stem
    place = Path(folder or f"{stem}_{choices.billions:.2g}b_{gpus}gpu")
    if place.is_file() or (place.is_dir() and any(place.iterdir())):
        raise ValueError(f"{place} is there and not empty; name another folder, which is made")
    choices = replace(choices, name=place.resolve().name)
    files = {} if reward is not None else {"reward.py": template.REWARD_FILE}
    files = {"config.yaml": template.first_config(choices, int(device_gb * 1e9), files), **files}
    place.mkdir(parents=True, exist_ok=True)
    for file_name, text in files.items():
        (place / file_name).write_text(text)
    return [place / file_name for file_name in files]
