"""Single-player games of TextArena (extra `textarena`)."""

from __future__ import annotations

from dataclasses import dataclass

import textarena

from roll_async.envs.worlds.text_world import TextWorld


@dataclass(frozen=True, kw_only=True)
class TextArenaOptions:
    """`env_config` of textarena."""

    id: str = "Wordle-v0"


_PLAYER, _WON = 0, 1.0
"""The only player of these games, and what they pay for a win; less is a share of the way."""


class TextArenaWorld(TextWorld):
    """Rewards come at the end, as TextArena gives them. An observation is what the game has said since the last one."""

    Options = TextArenaOptions
    quick = False

    def __init__(self, options: TextArenaOptions) -> None:
        self._env = self._game = textarena.make(env_id=options.id)
        while isinstance(self._game, textarena.Wrapper):  # the wrappers say everything again in every observation
            self._game = self._game.env

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The same seed, the same game."""
        self._env.reset(num_players=1, seed=seed)
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One move."""
        try:
            done, _ = self._env.step(action=action)
        except (ValueError, LookupError) as error:  # the game could not read it: a move of the policy like any other
            return f"This move is not valid: {error}", 0.0, True, False, {"solved": False}
        if not done:
            return self._observation(), 0.0, False, False, {}
        rewards, about = self._env.close()
        reward = float((rewards or {}).get(_PLAYER, 0.0))
        mine = (about or {}).get(_PLAYER, {})
        solved = reward >= _WON and not mine.get("invalid_move", False)
        return str(mine.get("reason") or "The game is over."), reward, True, False, {"solved": solved}

    def close(self) -> None:
        """TextArena closes with the game."""

    def _observation(self) -> str:
        _, said = self._game.get_observation()
        return "\n".join(str(text) for sender, text, *_ in said if sender != _PLAYER)
