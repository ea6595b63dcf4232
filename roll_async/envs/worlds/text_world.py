"""The base of our own worlds: a gymnasium environment whose spaces are text."""

from __future__ import annotations

import re
import string
from typing import ClassVar

import gymnasium
from gymnasium.spaces import Text

_ANY_TEXT = Text(max_length=1 << 20, min_length=0, charset=string.printable)
OPEN_TAG = re.compile(r"<answer>(?!\W{0,3}tags?\b)")
"""Where a stop string may have closed an answer; not where tags are only spoken of."""


class TextWorld(gymnasium.Env[str, str]):
    """Text in, text out."""

    observation_space = _ANY_TEXT
    action_space = _ANY_TEXT
    quick: ClassVar[bool] = True
    """Its steps take microseconds: thousands of them run in one event loop."""
