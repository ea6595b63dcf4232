"""Asynchronous RL post-training: `from roll_async import train`. Nothing is imported before it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll_async.commands.train import Run, train

__version__ = "0.1.0"
__all__ = ["Run", "train"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("roll_async.commands.train"), name)
    raise AttributeError(f"module 'roll_async' has no attribute '{name}'")
