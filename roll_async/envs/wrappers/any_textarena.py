"""Single-player games of TextArena (extra `textarena`)."""

from __future__ import annotations

from dataclasses import dataclass

import textarena

from roll_async.envs.worlds.text_world import TextWorld


@dataclass(frozen=True, kw_only=True)
class TextArenaOptions:
    """`env_config` of textarena."""

    id: str = "Wordle-v0"


class TextArenaWorld(TextWorld):
    """Rewards come at the end, as TextArena gives them."""

    Options = TextArenaOptions
    quick = False

    def __init__(self, options: TextArenaOptions) -> None:
        self._env = textarena.make(env_id=options.id)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The same seed, the same game."""
        self._env.reset(num_players=1, seed=seed)
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One move."""
        done, _ = self._env.step(action=action)
        if not done:
            return self._observation(), 0.0, False, False, {}
        rewards, _ = self._env.close()
        reward = float((rewards or {}).get(0, 0.0))
        return "The game is over.", reward, True, False, {"solved": reward > 0}

    def close(self) -> None:
        """TextArena closes with the game."""

    def _observation(self) -> str:
        _, observation = self._env.get_observation()
        return observation if isinstance(observation, str) else "\n".join(str(part[1]) for part in observation)
