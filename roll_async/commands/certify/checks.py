"""What a certificate proves of a small model, check by check."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll_async.algorithms.objective import LossSettings
from roll_async.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.checkpoint.hf_names.table import Family
from roll_async.checkpoint.lora import LoraAdapter
from roll_async.commands.certify.rank_pool import RankPool
from roll_async.commands.certify.rank_side import (
    ROWS,
    WIDTH,
    LayoutReport,
    image_reader,
    look,
    measure,
    train_adapters,
    transformers_gradients,
    transformers_logprobs,
)
from roll_async.commands.certify.rounding import FLOAT32, SURE, Bounds, apart
from roll_async.commands.certify.template import REWARD, RUN
from roll_async.commands.demo.addition import problems
from roll_async.commands.demo.assets import make_tokenizer, write_rows
from roll_async.config.engine_traits import ENGINE_TRAITS
from roll_async.config.schema_algorithm import AlgorithmConfig
from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings, ParallelSizes
from roll_async.weight_sync.canary import BANDS

TINY: Mapping[str, object] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": 2, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
"""Sizes of all small models."""
_PROCESSOR: Mapping[str, Any] = {
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096},
}  # fmt: skip
_BOUNDS = Bounds(layers=4, hidden=64, inner=96, length=WIDTH, rows=ROWS)
LAYOUTS: Mapping[str, ParallelSizes] = {
    "1 rank": ParallelSizes(),
    "TP2 SP": ParallelSizes(tensor=2, sequence_parallel=True),
    "PP2": ParallelSizes(pipeline=2),
    "EP2": ParallelSizes(expert=2),
}
_ENGINE_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of a certificate."""

    what: str
    found: str
    holds: bool


def has_experts(family: Family) -> bool:
    """Whether expert parallelism spreads any of it."""
    return any(row.is_expert for row in family.rows)


def save_tiny(family: Family, shape: str, folder: Path, **sizes: int) -> torch.nn.Module:
    """Write the model with norms and biases that are not trivial; returns the Transformers model. `sizes`: others."""
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    (architecture,), wanted = family.architectures, {**TINY, **family.tiny[shape], **sizes}
    kind = architecture.partition("For")[0]
    torch.manual_seed(0)
    if family.reads_images:
        config = getattr(transformers, f"{kind}Config")(**_with_tower(wanted))
        transformers.Qwen2VLImageProcessorPil(**_PROCESSOR).save_pretrained(folder)
    else:
        config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
        config = config_class(**wanted)
    model = getattr(transformers, architecture)(config)
    for part, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in part or "norm" in part:
            tensor.data.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return model.eval()


def _with_tower(text: Mapping[str, Any]) -> dict[str, Any]:
    """The whole configuration of a model that reads images. Half of the tower's layers attend within windows of 2 x 2
    tokens.
    """
    head = text["hidden_size"] // text["num_attention_heads"]
    axes = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16]}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": text["hidden_size"],
        "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 16,
        "fullatt_block_indexes": [1], "initializer_range": 0.1,
    }  # fmt: skip
    last = text["vocab_size"] - 1
    ids = {"image_token_id": last - 3, "video_token_id": last - 2, "vision_start_token_id": last - 1}
    return {
        "text_config": {**text, "rope_parameters": axes}, "vision_config": vision, **ids, "vision_end_token_id": last,
        "tie_word_embeddings": text["tie_word_embeddings"], "dtype": text["dtype"],
    }  # fmt: skip


def settings_of(folder: Path, layout: str) -> MegatronSettings:
    """fp32, rows packed but on one rank, and there where they have images. Adam turns the rounding of tiny gradients
    into whole steps; the larger epsilon keeps a step a smooth function of them.
    """
    defaults = AlgorithmConfig()
    padded = layout == "1 rank" and image_reader(folder) is None
    packed = {} if padded else {"micro_batching": "packed", "max_tokens_per_microbatch": 2 * WIDTH}
    return MegatronSettings(
        model_folder=str(folder),
        dtype="fp32",
        parallel=LAYOUTS[layout],
        optimizer=OptimizerSettings(learning_rate=3e-3, epsilon=1e-6),
        loss=LossSettings(pg_variant=defaults.pg_variant, pg_options=defaults.pg_options),
        micro_batch_rows=4,
        mini_batch_rows=ROWS,
        **packed,  # type: ignore[arg-type]
    )


def checks_of_layouts(family: Family, shape: str, pool: RankPool, work: Path) -> Iterator[Check]:
    """Weights, log-probs, a step and a checkpoint under each layout."""
    folder = work / "hf"
    vocabulary = int(str(TINY["vocab_size"]))
    save_tiny(family, shape, folder)
    theirs = transformers_logprobs(folder, vocabulary)
    one: LayoutReport | None = None
    for layout, sizes in LAYOUTS.items():
        if layout == "EP2" and not has_experts(family):
            continue
        world_size = sizes.tensor * sizes.pipeline * sizes.expert
        given = {"settings": settings_of(folder, layout), "checkpoint": str(work / "checkpoint")}
        found: LayoutReport = pool.run(measure, world_size, vocabulary=vocabulary, **given)[0]
        exact = "every tensor, bit for bit" if not found.unequal else f"not {', '.join(found.unequal[:3])}"
        yield Check(what=f"export, {layout}", found=exact, holds=not found.unequal)
        yield _near(f"log-probs against Transformers, {layout}", found.before, theirs, _BOUNDS.forward)
        if one is None:
            one = found
            if family.reads_images:
                yield from _checks_of_images(folder, pool, vocabulary, theirs)
            continue
        yield _near(
            f"gradient norm, {layout}", torch.tensor(found.grad_norm), torch.tensor(one.grad_norm), _BOUNDS.step
        )
        moved = float((one.after - one.before).abs().max())
        routed = has_experts(family)
        yield _near(f"after a step, {layout}", found.after, one.after, _BOUNDS.moved, of=moved, routed=routed)
        yield _near(f"after a resume, {layout}", found.resumed, one.resumed, _BOUNDS.moved, of=moved, routed=routed)


def _checks_of_images(folder: Path, pool: RankPool, vocabulary: int, theirs: Tensor) -> Iterator[Check]:
    """`theirs` [B,T]: Transformers' log-probs of the rows as they are."""
    settings = settings_of(folder, "1 rank")
    assert settings.optimizer is not None
    unclipped = replace(settings, optimizer=replace(settings.optimizer, max_grad_norm=0.0))
    mixed, gradients = pool.run(look, 1, vocabulary=vocabulary, settings=unclipped)[0]
    wanted = transformers_logprobs(folder, vocabulary, mixed=True)
    yield _near("log-probs against Transformers, patches of images mixed, 1 rank", mixed, wanted, _BOUNDS.forward)
    moved = float((mixed - theirs).abs().max())
    yield Check(what="mixing them moves log-probs", found=f"by {moved:.1e} nats", holds=moved > 0.01)
    expected = transformers_gradients(folder, vocabulary)
    largest = max(float(x.abs().max()) for x in expected.values())
    worst = max(apart(gradients[name], x) for name, x in expected.items())
    bound = _BOUNDS.step * largest
    found = f"{worst:.1e} of {len(expected)} tensors (rounding explains {bound:.1e})"
    holds = worst <= bound and gradients.keys() == expected.keys()
    yield Check(what="gradients against Transformers, 1 rank", found=found, holds=holds)


def _near(
    what: str, found: Tensor, wanted: Tensor, relative: float, *, of: float | None = None, routed: bool = False
) -> Check:
    """`relative`: what rounding explains, of the largest number or of `of`. `routed`: after a step a token may be where
    two experts are a rounding apart, and goes to the other one; one in a hundred may.
    """
    bound = relative * (float(wanted.abs().max()) if of is None else of)
    if routed:
        rerouted = (found - wanted).abs() > bound
        if 0 < rerouted.sum() <= found.numel() // 100:
            found = torch.where(rerouted, wanted, found)
    difference = apart(found, wanted)
    return Check(what=what, found=f"{difference:.1e} (rounding explains {bound:.1e})", holds=difference <= bound)


def checks_of_files(family: Family, pool: RankPool, work: Path) -> Iterator[Check]:
    """Conversion, and adapters. After `checks_of_layouts`."""
    hf, vocabulary = work / "hf", int(str(TINY["vocab_size"]))
    options = ConversionOptions()
    hf_to_megatron(hf, work / "megatron", options)
    megatron_to_hf(work / "megatron", work / "back", options)
    unequal = _unequal(HfFolder(hf), HfFolder(work / "back"))
    exact = f"not {unequal[0]}" if unequal else "every tensor, bit for bit"
    yield Check(what="conversion to Megatron and back", found=exact, holds=not unequal)

    settings = replace(settings_of(hf, "TP2 SP"), lora_rank=4, lora_alpha=16.0)
    merged = work / "merged"
    after = pool.run(train_adapters, 2, settings=settings, folder=str(merged), vocabulary=vocabulary)[0]
    theirs = transformers_logprobs(merged, vocabulary)
    yield _near("adapters: Transformers on the export, TP2 SP", after, theirs, _BOUNDS.step)
    adapter, base, exported = LoraAdapter(Path(f"{merged}_adapter")), HfFolder(hf), HfFolder(merged)
    worst = max(apart(adapter.merge(n, base.tensor(n)), exported.tensor(n)) for n in base.names())
    adapter.check_all_used()
    bound = SURE * FLOAT32 * max(float(exported.tensor(n).abs().max()) for n in base.names())
    found = f"{worst:.1e} (rounding explains {bound:.1e})"
    yield Check(what="adapters: base and adapter are the export", found=found, holds=worst <= bound)


def _unequal(one: HfFolder, other: HfFolder) -> list[str]:
    names = sorted({*one.names(), *other.names()})
    return [n for n in names if n not in one or n not in other or not torch.equal(one.tensor(n), other.tensor(n))]


def checks_of_engine(family: Family, shape: str, engine: str, work: Path) -> Iterator[Check]:
    """A run of two steps that change the weights: after each push the engine scores rows as the trainer does. With the
    routes of experts replayed, where the engine records them.
    """
    reasons = {name: traits.unserved.get(family.name) for name, traits in ENGINE_TRAITS.items()}
    if engine == "auto" and all(reasons.values()):
        told = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        yield Check(what="an engine against the trainer, pushes of a run", found=f"none serves it: {told}", holds=True)
        return
    # vLLM's CPU build has no attention for smaller heads.
    save_tiny(family, shape, work / "engine", hidden_size=32 * int(str(TINY["num_attention_heads"])))
    if engine == "auto":
        fields = family.fields(HfFolder(str(work / "engine")).config)
        traits = ENGINE_TRAITS["hf_infer"]
        serves = traits.sliding_windows or "window_size" not in fields
        engine = "hf_infer" if serves and family.name not in traits.unserved else "vllm"
    make_tokenizer(work / "engine")
    write_rows(work / "train.jsonl", problems(64, seed=7))
    (work / "certificate_reward.py").write_text(REWARD)
    config = work / "certificate.yaml"
    replays = has_experts(family) and ENGINE_TRAITS[engine].records_whole  # which is asked for on the CPU
    config.write_text(RUN.format(work=work, replays=str(replays).lower()))
    command = [sys.executable, "-m", "roll_async", "run", "--config", str(config)]
    # As an override: the options of the demo's engine are not merged into those of another.
    command.append(f"actor_infer.strategy_args={{strategy_name: {engine}}}")
    if family.reads_images:
        command += ["actor_train.micro_batching=packed", "actor_train.max_tokens_per_microbatch=1024"]
    found = _pushes_of(command, work)
    yield Check(
        what="an engine against the trainer, pushes of a run", **{**found, "found": f"{engine}: {found['found']}"}
    )


def _pushes_of(command: Sequence[str], work: Path) -> dict[str, Any]:
    """What was found of a run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ENGINE_TIMEOUT_S, cwd=work)
    except subprocess.TimeoutExpired:
        return {"found": f"the run did not end within {_ENGINE_TIMEOUT_S:g} s", "holds": False}
    if done.returncode:
        told = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        why = next((line for line in reversed(told) if line.startswith("ERROR")), told[-1] if told else "no word")
        return {"found": f"the run ended with {done.returncode}: {why[:300]}", "holds": False}
    steps = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    compared = [m for m in steps if "weights/canary_difference" in m]
    found = max((m["weights/canary_difference"] for m in compared), default=math.inf)
    moved = max((m["weights/canary_moved"] for m in compared if "weights/canary_moved" in m), default=0.0)
    # An engine that stayed behind would be off by what the steps moved.
    return {
        "found": f"{found:.1e} nats, after steps that moved them by {moved:.1e}",
        "holds": found <= BANDS["fp32"] and moved > 10 * BANDS["fp32"],
    }
