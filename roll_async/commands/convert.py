"""`roll-async convert SOURCE TARGET`: Hugging Face checkpoints to Megatron's torch_dist format and back.

The direction follows from what SOURCE is. No GPU is needed; memory is one tensor, but for --verify, whose logits probe
holds the model twice in float32. Exit codes: 0 converted, 1 the disk failed or the verification found a difference,
2 bad usage or input, 130 interrupted; in each case but 0 nothing is left under TARGET.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roll_async.commands.command_line import HELP, execute

if TYPE_CHECKING:
    from roll_async.checkpoint.comparison import Comparison
    from roll_async.checkpoint.conversion import ConversionOptions

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_PATH = click.Path(path_type=Path)
_MAX_LOGIT_DIFFERENCE = 1e-4
"""Tolerance as a fraction of the largest logit; both sides compute in float32."""


class VerificationError(RuntimeError):
    """The written checkpoint differs from its source."""


@dataclass(frozen=True, kw_only=True)
class _ConvertArguments:
    source: Path
    target: Path
    dtype: str | None
    adapter_path: Path | None
    adapter_only: bool
    lora_alpha: float | None
    like: Path | None
    max_file_gb: float
    verify: bool


@click.command(context_settings=HELP)
@click.argument("source", type=_PATH)
@click.argument("target", type=_PATH)
@click.option("--dtype", type=click.Choice(list(_DTYPES)), help="Cast to this; default: each tensor keeps its own.")
@click.option("--adapter-path", type=_PATH, metavar="DIR", help="A PEFT LoRA adapter to merge into the weights.")
@click.option("--adapter-only", is_flag=True, help="Write the adapter of a LoRA run alone, in PEFT's format.")
@click.option(
    "--lora-alpha", type=float, metavar="A", help="Merge adapters, scaled by A / rank (default: what the run recorded)."
)
@click.option(
    "--like", type=_PATH, metavar="DIR", help="config.json and tokenizer for a Megatron SOURCE that carries none."
)
@click.option("--max-file-gb", type=float, default=4.0, show_default=True, metavar="N", help="Size of files.")
@click.option("--verify", is_flag=True, help="Compare digests of all tensors, and logits.")
def command(**options: Any) -> int:
    """Hugging Face checkpoints to Megatron's torch_dist format and back.

    The direction follows from what SOURCE is: a model (a folder, or its name on the hub), a checkpoint, or a run (its
    newest checkpoint). TARGET is a
    folder that does not exist yet. No GPU is needed; memory is one tensor, but for --verify, whose logits probe holds
    the model twice in float32.

    \b
    Example:
      roll-async convert models/Qwen2.5-0.5B models/Qwen2.5-0.5B-megatron --dtype bf16 --verify
      roll-async convert output/addition_demo/checkpoints/step_00000100 models/adder --verify

    Exit codes: 0 converted, 1 the disk failed or the verification found a difference, 2 bad usage or input, 130
    interrupted; in each case but 0 nothing is left under TARGET.
    """
    arguments = _ConvertArguments(**options)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch, imported below: large pages for large tensors
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        _convert(arguments)
    except ValueError as error:
        return _fail(str(error), 2)
    except VerificationError as error:
        return _fail(f"{error}; nothing was written to {arguments.target}", 1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _fail(f"{error.strerror or error}{where}; nothing was written to {arguments.target}", 1)
    except KeyboardInterrupt:
        return _fail(f"interrupted; nothing was written to {arguments.target}", 130)
    return 0


def run_convert(args: Sequence[str]) -> int:
    """The command; returns the exit code."""
    return execute(command, args, "roll-async convert")


def _fail(problem: str, code: int) -> int:
    print(f"roll-async convert: {problem}", file=sys.stderr)
    return code


def _convert(arguments: _ConvertArguments) -> None:
    import torch

    from roll_async.checkpoint.comparison import compare_adapter
    from roll_async.checkpoint.conversion import (
        ConversionOptions,
        hf_to_megatron,
        megatron_to_hf,
        write_run_adapter,
    )
    from roll_async.checkpoint.folders.find_model import find_model, hf_files_of, is_hf, torch_dist_in
    from roll_async.launch.checks.inputs import model_folder
    from roll_async.trainer.megatron.cpu_shim import hide_cuda

    hide_cuda()  # the conversion and its logits probe run on the CPU of every machine
    if arguments.max_file_gb <= 0:
        raise ValueError(f"--max-file-gb {arguments.max_file_gb} must be positive")
    named = str(arguments.source)
    # A word without a slash is rather a folder that is not there than one of the few models with such a name.
    source = find_model(Path(model_folder("SOURCE", named) if "/" in named else named))
    bar = _Bar()
    to_megatron = is_hf(source)
    if to_megatron and (arguments.like or arguments.lora_alpha is not None or arguments.adapter_only):
        raise ValueError("--like, --lora-alpha and --adapter-only are for a Megatron SOURCE")
    if arguments.adapter_only and (arguments.dtype or arguments.adapter_path):
        raise ValueError("--adapter-only writes the run's adapter as it is; leave out --dtype and --adapter-path")

    def check(written: Path) -> None:
        bar.close()
        if arguments.verify:
            megatron, hf = (written, source) if to_megatron else (torch_dist_in(source), written)
            files = source if to_megatron else hf_files_of(megatron, arguments.like)
            if arguments.adapter_only:
                _require_equal(compare_adapter(megatron, written, files, options))
            else:
                _verify(megatron, hf, files, options, to_megatron)

    options = ConversionOptions(
        dtype=getattr(torch, _DTYPES[arguments.dtype]) if arguments.dtype else None,
        adapter=arguments.adapter_path,
        lora_alpha=arguments.lora_alpha,
        file_bytes=int(arguments.max_file_gb * 1e9),
        progress=bar,
        check=check,
    )
    try:
        if to_megatron:
            left_out = hf_to_megatron(source, arguments.target, options)
            if left_out:
                print(f"left out {len(left_out)} tensors the trainer has no use for, the first is {left_out[0]}")
        else:
            write = write_run_adapter if arguments.adapter_only else megatron_to_hf
            write(source, arguments.target, options, like=arguments.like)
    finally:
        bar.close()
    of = "" if source == arguments.source else f" of {source}"
    print(f"{'Hugging Face -> Megatron' if to_megatron else 'Megatron -> Hugging Face'}{of}: {arguments.target}")


class _Bar:
    """A progress bar on a terminal. It appears after the first tensor, because the input is checked before that."""

    def __init__(self) -> None:
        self._advance: Callable[[int], object] | None = None
        self.close: Callable[[], object] = lambda: None

    def __call__(self, num_bytes: int, total: int) -> None:
        if self._advance is None:
            from tqdm import tqdm

            # disable=None: none where stderr is no terminal.
            bar = tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="converting")
            self._advance, self.close = bar.update, bar.close
        self._advance(num_bytes)


def _require_equal(result: Comparison) -> None:
    if result.differing:
        raise VerificationError(f"{len(result.differing)} tensors differ, the first is {result.differing[0]}")
    print(f"digest {result.found} on both sides, {result.num_tensors} tensors")


def _verify(megatron: Path, hf: Path, files: Path, options: ConversionOptions, source_is_hf: bool) -> None:
    from roll_async.checkpoint.comparison import compare
    from roll_async.checkpoint.folders.hf_folder import HfFolder
    from roll_async.checkpoint.hf_names.value_head import has_value_head

    result = compare(megatron, hf, files, options, source_is_hf=source_is_hf)
    _require_equal(result)
    if options.adapter is not None or result.merged_adapters or options.dtype is not None:
        print("logits not compared: source and target differ by intent")
        return
    if has_value_head(HfFolder(files).config.architecture()):
        print("logits not compared: the model is a critic")
        return
    from roll_async.trainer.megatron.model.logits_probe import largest_difference

    difference, scale = largest_difference(megatron, hf, files)
    if not difference <= _MAX_LOGIT_DIFFERENCE * scale:  # so written that nan fails
        raise VerificationError(f"logits differ by {difference:.2e}, the largest is {scale:.2e}")
    print(f"logits differ by {difference:.2e} from Transformers, the largest is {scale:.2e}")
