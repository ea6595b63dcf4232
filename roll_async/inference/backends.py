"""Engines by strategy name."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from roll_async.checkpoint.folders.hf_config import HfConfig, read_json
from roll_async.config.engine_traits import ENGINE_TRAITS, EngineTraits
from roll_async.config.versions import refuse_unknown_release

if TYPE_CHECKING:
    from roll_async.inference.engine import Engine
    from roll_async.inference.protocol import Follower
    from roll_async.inference.settings import EngineSettings

logger = logging.getLogger(__name__)
_ATTEMPTS = 3
"""Starts of an engine whose device's memory moves: an engine takes a minute to find that out."""

# Paths, not classes: a process imports the one library that it runs; the others may not be installed.
ENGINES = {
    "vllm": "roll_async.inference.vllm.engine.VllmEngine",
    "sglang": "roll_async.inference.sglang.engine.SglangEngine",
    "hf_infer": "roll_async.inference.hf.engine.HfEngine",
}


FOLLOWERS = {
    "vllm": "roll_async.inference.vllm.follower.VllmFollower",
    "sglang": "roll_async.inference.sglang.follower.SglangFollower",
}
"""Engines whose replicas may span nodes, and what runs their ranks on the nodes after the first."""

SGLANG_ON_CPU = str(Path(sys.prefix) / "sglang")
"""Where SGLang may lie for runs on CPU, apart from the other packages, which its pins would replace."""


def create_engine(strategy: str, settings: EngineSettings) -> Engine:
    """Build (not start) the engine of a strategy. Raises ValueError for an untested release of its library, and for a
    model that reads images where it shows none.
    """
    refuse_unknown_release(strategy)
    if (file := Path(settings.model_folder, "config.json")).is_file():
        refuse_images_unshown(HfConfig(read_json(file), str(file)), ENGINE_TRAITS[strategy])
    return _named(ENGINES[strategy])(settings)


def create_follower(strategy: str, settings: EngineSettings) -> Follower:
    """Build (not start) what runs the ranks of a replica on a node after its first."""
    refuse_unknown_release(strategy)
    return _named(FOLLOWERS[strategy])(settings)


class MemoryMoved(RuntimeError):
    """Another process took or freed memory of the device while the engine measured it."""


async def started(engine: Engine, another: Callable[[], Engine], *, wait_s: float = 10.0) -> Engine:
    """Start the engine. Where memory moved meanwhile, `another` one is started after a wait; the deadline of the call
    (fault.rpc_timeout) is that of all attempts. Raises what `Engine.start` raises.
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            await engine.start()
            return engine
        except MemoryMoved as error:
            logger.warning("attempt %d of %d, the next one in %g s: %s", attempt, _ATTEMPTS, wait_s, error)
        await asyncio.sleep(wait_s)
        engine = another()
    await engine.start()
    return engine


def refuse_attention_on_cpu(config: HfConfig, traits: EngineTraits) -> None:
    """Raises ValueError for attention that an engine's CPU build computes wrongly, and for a head size that it has none
    for: it would die at its first token.
    """
    if traits.cpu_head_sizes is None:
        return
    if "kv_lora_rank" in config:
        raise ValueError(
            f"{config.source}: {traits.title}'s CPU build computes latent attention otherwise than Transformers, by "
            "tenths of a nat a token; use strategy_name: hf_infer"
        )
    heads = config.integer("num_attention_heads")
    # Qwen3, for one, has a head_dim that is not hidden_size / heads.
    size = config.integer("head_dim", default=config.integer("hidden_size") // heads)
    if size not in traits.cpu_head_sizes:
        sizes = ", ".join(map(str, traits.cpu_head_sizes))
        raise ValueError(
            f"{config.source}: {traits.title}'s CPU build has attention for heads of {sizes} only, this model's are of "
            f"{size}; use another model, or strategy_name: hf_infer"
        )


def refuse_images_unshown(config: HfConfig, traits: EngineTraits) -> None:
    """Raises ValueError for a model that reads images and an engine that would let it answer without them."""
    if "vision_config" in config and traits.unshown is not None:
        raise ValueError(
            f"{config.source}: {config.architecture()} reads images, and {traits.title} shows it none: "
            f"{traits.unshown}; use strategy_name: hf_infer"
        )


def _named(path: str):  # noqa: ANN202 (a class of an engine's module)
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)
