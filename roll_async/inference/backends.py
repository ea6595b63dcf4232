"""Engines by strategy name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from roll_async.config.versions import refuse_unknown_release

if TYPE_CHECKING:
    from roll_async.inference.protocol import Engine
    from roll_async.inference.settings import EngineSettings

ENGINES = {
    "vllm": "roll_async.inference.vllm_engine.VllmEngine",
    "sglang": "roll_async.inference.sglang_engine.SglangEngine",
    "hf_infer": "roll_async.inference.hf_engine.HfEngine",
}


def create_engine(strategy: str, settings: EngineSettings) -> Engine:
    """Build (not start) the engine of a strategy. Raises ValueError for an untested release of its library."""
    refuse_unknown_release(strategy)
    module, name = ENGINES[strategy].rsplit(".", 1)
    return getattr(import_module(module), name)(settings)
