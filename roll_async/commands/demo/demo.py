"""`roll-async demo`: the first run, from nothing: a tiny model learns to add numbers, on this machine's CPU."""

from __future__ import annotations

import shlex
import subprocess
import sys

import click

from roll_async.commands.command_line import (
    AS_TYPED,
    EXIT_CODES,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_ROLE_FAILED,
    EXIT_USAGE,
)
from roll_async.commands.run import run_command
from roll_async.config.api import ConfigError, load
from roll_async.config.loading.lookup import resolve_config
from roll_async.config.yaml.compose import CHECKOUT, SHIPPED
from roll_async.launch.checks.gate import check_supported
from roll_async.launch.checks.on_cpu import ASSETS
from roll_async.launch.checks.packages import missing_packages

_CONFIG = SHIPPED / "rlvr_config_async_cpu.yaml"
_GSM8K = str(CHECKOUT / "tools" / "make_gsm8k_assets.py")  # a wheel has it there too
_MAKERS = {
    "addition": ("-m", "roll_async.commands.demo.assets", "--output", ASSETS),
    "agents": (str(CHECKOUT / "tools" / "make_agentic_assets.py"),),
    "word_problems": (_GSM8K, "--word-problems"),
    "gsm8k": (_GSM8K,),
    "images": (str(CHECKOUT / "tools" / "make_image_assets.py"),),
}


@click.command(context_settings=AS_TYPED, epilog=EXIT_CODES, options_metavar="[--small] [--assets-only [NAME]]")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]...")
@click.option("--small", is_flag=True, help="A barely trained model, made in seconds: it shows the run, not learning.")
@click.option(
    "--assets-only",
    is_flag=False,
    flag_value="addition",
    type=click.Choice(list(_MAKERS)),
    help="Make model and data, and train nothing: those of the demo (addition), or what the agentic configs, "
    "rlvr_word_problems_cpu, rlvr_gsm8k_cpu or rlvr_images_cpu need.",
)
def command(args: tuple[str, ...], small: bool, assets_only: str | None) -> int:
    """Make a tiny model and its data below output/ where they are missing, and train it to add numbers.

    The run is that of the config rlvr_config_async_cpu, of which KEY=VALUE overrides a key; without vLLM it generates
    with Transformers. Nothing is downloaded.

    \b
    Example:
      roll-async demo max_steps=20
      roll-async demo --assets-only agents
    """
    try:
        engine = engine_here()
        path, overrides = resolve_config(["--config", str(_CONFIG), *engine, *args], "rlvr")
        check_supported(path, overrides, "rlvr")  # before the minutes that the assets take
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    if small and assets_only not in (None, "addition"):
        print(f"--small: of the demo's own model only, not of --assets-only {assets_only}", file=sys.stderr)
        return EXIT_USAGE
    make = [sys.executable, *_MAKERS[assets_only or "addition"], *(["--small"] if small else [])]
    try:
        made = subprocess.run(make)  # a process of its own: the warm start is a rank of Megatron's
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if made.returncode:
        print("roll-async demo: model and data could not be made, see above", file=sys.stderr)
        return EXIT_ROLE_FAILED
    if assets_only:
        return EXIT_FINISHED
    if engine:
        print("vLLM is not installed here: Transformers generates (hf_infer)")
    print(shlex.join(["roll-async", "run", "--config", _CONFIG.stem, *engine, *args]), flush=True)
    return run_command(["--config", str(_CONFIG), *engine, *args], pipeline="rlvr")


def engine_here() -> list[str]:
    """What comes before the overrides of the user where the config's engine is not installed."""
    lacking = missing_packages(load(_CONFIG))
    if any(key == "actor_infer.strategy_args.strategy_name" for key, _ in lacking):
        return ["actor_infer.strategy_args={strategy_name: hf_infer}"]
    return []
