"""Worlds by name, or a user's own by dotted path. A world's class defines how it is configured and run:

class MyWorld:
    Options = MyOptions       # a dataclass; `env_config` must fit it. Without it the world takes no settings.
    quick = False             # True: its steps take microseconds and run in the event loop
    def __init__(self, options): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from roll_async.config.options.user_options import build_options
from roll_async.config.schema_rollout import WORLDS as NAMES
from roll_async.config.user_code import find, told

WORLDS = {name: path for name, path in NAMES.items() if path is not None}


@dataclass(frozen=True)
class NoOptions:
    """Options of a world without settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpec:
    """Which world, with which settings; plain values, so that a worker process can build it too."""

    env_type: str
    values: Mapping[str, object]
    key: str = "env_config"
    """Where the settings were written, for messages."""


def load_class(env_type: str, key: str = "env_type") -> type:
    """The class of a world (or of an agent). Raises ValueError when it cannot be imported."""
    path = WORLDS.get(env_type, env_type)
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"{key}: {env_type!r} is not one of {' | '.join(WORLDS)}, nor a dotted path")
    try:
        found = find(path)
    except Exception as error:  # a user's module may raise anything
        extra = next((n for n in ("minigrid", "textarena", "reasoning_gym") if n == env_type), None)
        hint = f'; pip install "roll_async[{extra.replace("_", "-")}]"' if extra else ""
        what = f"cannot import {path}: {told(error)}{hint}"
        if isinstance(error, AttributeError) and error.name == name:
            what = f"{module} has no class {name}"
        raise ValueError(f"{key}: {what}") from error
    if not inspect.isclass(found):
        raise ValueError(f"{key}: {module} has no class {name}")
    return found


def check(spec: WorldSpec) -> object:
    """The checked options of a world. Raises ValueError naming key, value and remedy."""
    cls = load_class(spec.env_type, f"{spec.key.removesuffix('env_config')}env_type")
    return build_options(getattr(cls, "Options", NoOptions), spec.values, spec.key)


def build(spec: WorldSpec) -> object:
    """Build a world. Raises ValueError for settings that it refuses."""
    cls, options = load_class(spec.env_type), check(spec)
    return cls(options) if hasattr(cls, "Options") else cls()


def runs_in_loop(spec: WorldSpec) -> bool:
    """Whether its steps may run in the event loop: async ones, and those that are quick."""
    cls = load_class(spec.env_type)
    return inspect.iscoroutinefunction(getattr(cls, "step", None)) or bool(getattr(cls, "quick", False))
