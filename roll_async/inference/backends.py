"""Engines by strategy name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from roll_async.config.versions import refuse_unknown_release

if TYPE_CHECKING:
    from roll_async.inference.protocol import Engine, Follower
    from roll_async.inference.settings import EngineSettings

ENGINES = {
    "vllm": "roll_async.inference.vllm_engine.VllmEngine",
    "sglang": "roll_async.inference.sglang_engine.SglangEngine",
    "hf_infer": "roll_async.inference.hf_engine.HfEngine",
}


FOLLOWERS = {
    "vllm": "roll_async.inference.vllm_follower.VllmFollower",
    "sglang": "roll_async.inference.sglang_follower.SglangFollower",
}
"""Engines whose replicas may span nodes, and what runs their ranks on the nodes after the first."""


def create_engine(strategy: str, settings: EngineSettings) -> Engine:
    """Build (not start) the engine of a strategy. Raises ValueError for an untested release of its library."""
    refuse_unknown_release(strategy)
    return _named(ENGINES[strategy])(settings)


def create_follower(strategy: str, settings: EngineSettings) -> Follower:
    """Build (not start) what runs the ranks of a replica on a node after its first."""
    refuse_unknown_release(strategy)
    return _named(FOLLOWERS[strategy])(settings)


def _named(path: str):  # noqa: ANN202 (a class of an engine's module)
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)
