"""`roll-async certify`: whether a model family is computed, sharded, trained, saved and pushed as it should be."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import click

from roll_async.checkpoint.folders.hf_config import HfConfig, read_json
from roll_async.checkpoint.hf_names.families import FAMILIES, family_of
from roll_async.checkpoint.hf_names.table import Family
from roll_async.commands.command_line import EXIT_FINISHED, EXIT_INTERRUPTED, HELP, bad_usage, print_pairs
from roll_async.config.yaml.suggest import closest
from roll_async.launch.checks.model_fit import described_family
from roll_async.observe.disk import cannot

_ENGINES = ("auto", "hf_infer", "vllm", "sglang", "none")


@click.command(context_settings=HELP)
@click.argument("models", metavar="[FAMILY]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every family.")
@click.option(
    "--engine",
    type=click.Choice(_ENGINES),
    default="auto",
    show_default=True,
    help="What pushes are checked with; auto: hf_infer, and vllm for what that cannot serve.",
)
@click.option("--pages", type=click.Path(path_type=Path), metavar="DIR", help="Also write a page for each family here.")
def command(models: Sequence[str], everything: bool, engine: str, pages: Path | None) -> int:
    """Prove that FAMILY is what Transformers says it is, with small random models of every part it may have.

    FAMILY: a name of the list that the command prints without arguments, an architecture, or a folder with a
    config.json. Proved are, for one rank and for tensor, pipeline and expert parallelism: the export bit for bit,
    log-probs of packed rows, a training step, a resume under another layout; conversion both ways, adapters, and an
    engine's log-probs after the pushes of a run. Needs the CPU and one to five minutes a family.

    \b
    Example:
      roll-async certify
      roll-async certify qwen3 glm4_moe --engine none
      roll-async certify models/Qwen3-0.6B

    Exit codes: 0 all checks hold, 1 one does not, 2 bad usage or a model that no family describes.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        chosen = (
            list(FAMILIES) if everything else list({family.name: family for family in map(_family, models)}.values())
        )
        if pages is not None:
            pages.mkdir(parents=True, exist_ok=True)  # rather than fail after the checks
    except ValueError as error:
        return bad_usage("certify", error)
    except OSError as error:
        return bad_usage("certify", cannot(f"--pages {pages}", error, "folder"))
    if not chosen:
        print_pairs([(f.name, f"{', '.join(f.architectures)}; small models: {', '.join(f.tiny)}") for f in FAMILIES])
        return EXIT_FINISHED
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as ranks and engines on the CPU want it
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of Megatron, about packages and names; in ranks and engines
    warnings.simplefilter("ignore")
    try:
        return _certify(chosen, engine, pages)
    except KeyboardInterrupt:
        print("roll-async certify: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _family(model: str) -> Family:
    """Raises ValueError for what none describes."""
    named = {family.name: family for family in FAMILIES}
    if model in named:
        return named[model]
    file = Path(model) / "config.json"
    if file.is_file():
        return described_family(HfConfig(read_json(file), str(file)))
    if Path(model).is_dir():
        raise ValueError(f"{model} has no config.json; name a family, or a folder with a model")
    if model.endswith(("ForCausalLM", "ForConditionalGeneration")):
        return family_of(model)
    near = closest(model, list(named))
    raise ValueError(
        f"no family or folder '{model}'; " + (f"did you mean '{near}'?" if near else f"families: {', '.join(named)}")
    )


def _certify(families: Sequence[Family], engine: str, pages: Path | None) -> int:
    from roll_async.commands.certify.checks import Check, checks_of_engine, checks_of_files, checks_of_layouts
    from roll_async.commands.certify.pages import write_page
    from roll_async.commands.certify.rank_pool import RankPool

    pool, failed, began = RankPool(), 0, time.monotonic()
    for family in families:
        found: dict[str, list[Check]] = {}
        for shape in family.tiny:
            print(f"{family.name}: {shape}", flush=True)
            work = Path(tempfile.mkdtemp(prefix="roll-certify-"))
            found[shape] = []
            try:
                for checks in (
                    checks_of_layouts(family, shape, pool, work),
                    checks_of_files(family, pool, work),
                    checks_of_engine(family, shape, engine, work) if engine != "none" else (),
                ):
                    for check in checks:
                        found[shape].append(check)
                        print(f"  {'ok  ' if check.holds else 'FAIL'} {check.what}: {check.found}", flush=True)
            except RuntimeError as error:  # of a rank: the shape has no certificate, others may
                print(error, file=sys.stderr)
                found[shape].append(Check(what="ranks", found=str(error).strip().splitlines()[-1], holds=False))
                print(f"  FAIL ranks: {found[shape][-1].found}", flush=True)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        failed += sum(not check.holds for checks in found.values() for check in checks)
        if pages is not None:
            write_page(pages, family, found)
    checks = "all checks hold" if not failed else f"checks FAILED: {failed}"
    print(f"{checks}; families: {len(families)}; {time.monotonic() - began:.0f} s")
    return 1 if failed else EXIT_FINISHED
