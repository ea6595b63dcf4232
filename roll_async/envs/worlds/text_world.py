"""The base of our own worlds: a gymnasium environment whose spaces are text."""

from __future__ import annotations

import string
from typing import ClassVar

import gymnasium
from gymnasium.spaces import Text

_ANY_TEXT = Text(max_length=1 << 20, min_length=0, charset=string.printable)
MOST_TRIES = 10_000
"""Of a generator whose options may leave nothing that can be solved."""


class TextWorld(gymnasium.Env[str, str]):
    """Text in, text out."""

    observation_space = _ANY_TEXT
    action_space = _ANY_TEXT
    quick: ClassVar[bool] = True
    """Its steps take microseconds: thousands of them run in one event loop."""
