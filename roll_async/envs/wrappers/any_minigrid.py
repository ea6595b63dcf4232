"""MiniGrid as text (extra `minigrid`): the mission and the grid around the agent."""

from __future__ import annotations

import re
from dataclasses import dataclass

import gymnasium
import minigrid  # noqa: F401  (registers its environments)

from roll_async.envs.worlds.text_world import TextWorld

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")


@dataclass(frozen=True, kw_only=True)
class MinigridOptions:
    """`env_config` of minigrid."""

    id: str = "MiniGrid-Empty-5x5-v0"


class MinigridWorld(TextWorld):
    """The reward is MiniGrid's own: 1 minus a share for the steps taken."""

    Options = MinigridOptions
    quick = False

    def __init__(self, options: MinigridOptions) -> None:
        self._env = gymnasium.make(options.id)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The same seed, the same grid."""
        observation, _ = self._env.reset(seed=seed)
        instructions = f"Mission: {observation['mission']}. Each turn, answer with one of: {', '.join(ACTIONS)}."
        return self._text(), {"instructions": instructions}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """An answer without an action does not move."""
        found = [w for w in re.findall(r"\w+", action.lower()) if w in ACTIONS]
        if not found:
            return f"There is no action in that.\n{self._text()}", 0.0, False, False, {}
        _, reward, terminated, truncated, _ = self._env.step(ACTIONS.index(found[-1]))
        info = {"solved": float(reward) > 0} if terminated or truncated else {}
        return self._text(), float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        self._env.close()

    def _text(self) -> str:
        return str(self._env.unwrapped)
