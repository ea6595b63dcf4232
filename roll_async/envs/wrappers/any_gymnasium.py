"""Any gymnasium environment with discrete actions, as text: observations as they print, actions by name or number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from roll_async.envs.worlds.text_world import TextWorld


@dataclass(frozen=True, kw_only=True)
class GymnasiumOptions:
    """`env_config` of gymnasium."""

    id: str
    """Argument `id` of gymnasium.make, e.g. Taxi-v4."""
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of gymnasium.make."""
    actions: tuple[str, ...] = ()
    """Names of the actions in the order of their numbers; none: numbers."""
    instructions: str = ""
    solved_above: float = 0.0
    """A sum of rewards above it counts as solved."""


class GymnasiumWorld(TextWorld):
    """`gymnasium.make(id)`. It runs in a worker process, because its code is unknown."""

    Options = GymnasiumOptions
    quick = False

    def __init__(self, options: GymnasiumOptions) -> None:
        self._options = options
        arguments: dict[str, Any] = dict(options.kwargs)
        self._env = gymnasium.make(options.id, **arguments)
        if "ansi" in self._env.metadata.get("render_modes", ()) and "render_mode" not in options.kwargs:
            # The render mode can be given only when it is made, its modes are known only then.
            self._env = gymnasium.make(options.id, render_mode="ansi", **arguments)
        if not isinstance(self._env.action_space, gymnasium.spaces.Discrete):
            raise ValueError(f"{options.id} has no discrete actions")
        # Numbers of a Discrete space may begin elsewhere than at 0.
        self._start, self._count = int(self._env.action_space.start), int(self._env.action_space.n)
        self._total = 0.0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Reset the wrapped environment."""
        self._total = 0.0
        observation, _ = self._env.reset(seed=seed)
        names = self._options.actions or tuple(map(str, range(self._count)))
        asked = f"Answer with one of: {', '.join(names)}."
        return self._text(observation), {"instructions": f"{self._options.instructions} {asked}".strip()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """An answer without an action does not move."""
        number = self._number(action)
        if number is None:
            return "There is no action in that.", 0.0, False, False, {}
        observation, reward, terminated, truncated, _ = self._env.step(number)
        self._total += float(reward)
        info = {"solved": self._total > self._options.solved_above} if terminated or truncated else {}
        return self._text(observation), float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: object) -> str:
        picture = self._env.render() if self._env.render_mode == "ansi" else None
        text = picture if isinstance(picture, str) else str(observation)
        return re.sub(r"\x1b\[[0-9;]*m", "", text)  # colours of a terminal

    def _number(self, text: str) -> int | None:
        names = [name.lower() for name in self._options.actions]
        if names:
            found = [w for w in re.findall(r"[\w-]+", text.lower()) if w in names]
            return self._start + names.index(found[-1]) if found else None
        numbers = [int(n) for n in re.findall(r"\d+", text)]
        return numbers[-1] if numbers and self._start <= numbers[-1] < self._start + self._count else None
