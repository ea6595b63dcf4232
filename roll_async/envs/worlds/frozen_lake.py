"""FrozenLake of gymnasium on random, solvable, seeded maps, as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, is_valid
from gymnasium.utils.seeding import np_random

from roll_async.envs.worlds.moves import WORDS, direction
from roll_async.envs.worlds.text_world import TextWorld

_SYMBOLS = {"S": "_", "F": "_", "H": "O", "G": "G"}
_MOST_TRIES = 10_000


@dataclass(frozen=True, kw_only=True)
class FrozenLakeOptions:
    """`env_config` of frozen_lake."""

    size: int = 4
    """Rows and columns."""
    frozen_share: float = 0.8
    """Probability that a cell is not a hole; maps without a path to the goal are discarded."""
    is_slippery: bool = False
    format_penalty: float = 0.0
    """Added to the reward of a turn without a direction, which does not move."""
    words: Literal["full", "short"] = "full"
    """full: instructions and sentences; short: only the map, for models trained from scratch."""

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 32 or not 0 < self.frozen_share <= 1:
            raise ValueError("size must be 2 to 32 and frozen_share in (0, 1]")


def _solvable_map(options: FrozenLakeOptions, seed: int) -> list[str]:
    """The map of `generate_random_map` of gymnasium, which goes on for ever where there is none."""
    rng, share = np_random(seed)[0], options.frozen_share
    for _ in range(_MOST_TRIES):
        board = rng.choice(["F", "H"], (options.size, options.size), p=[share, 1 - share]).tolist()
        board[0][0], board[-1][-1] = "S", "G"
        if is_valid(board, options.size):
            return ["".join(row) for row in board]
    raise ValueError(
        f"a map with frozen_share {share:g} and a path to the goal: none was found in {_MOST_TRIES} tries; raise "
        "frozen_share"
    )


class FrozenLake(TextWorld):
    """Reach the goal, reward 1; fall into a hole, reward 0."""

    Options = FrozenLakeOptions

    def __init__(self, options: FrozenLakeOptions) -> None:
        self._options = options
        self._lake: FrozenLakeEnv | None = None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """A new map: the same seed, the same map and the same slips."""
        super().reset(seed=seed)
        chosen = self._options
        map_seed = int(self.np_random.integers(2**31))
        self._lake = FrozenLakeEnv(desc=_solvable_map(chosen, map_seed), is_slippery=chosen.is_slippery)
        self._place, _ = self._lake.reset(seed=map_seed)
        info = self._info()
        if chosen.words == "full":
            info["instructions"] = (
                "You walk over a frozen lake. P is you, _ is ice, O is a hole, G is the goal. Reach G without falling "
                "into a hole. Each turn, answer with one of <answer>Left</answer>, <answer>Down</answer>, "
                "<answer>Right</answer>, <answer>Up</answer>."
            )
        return self._text(), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One move."""
        assert self._lake is not None, "reset() first"
        move = direction(action)
        if move is None:
            text = self._text() if self._options.words == "short" else f"There is no direction in that.\n{self._text()}"
            return text, self._options.format_penalty, False, False, self._info()
        self._place, reward, terminated, _, _ = self._lake.step(move)
        self._place = int(self._place)
        info = self._info(solved=reward > 0) if terminated else self._info()
        text = self._text()
        if self._options.words == "full":
            text = f"You went {WORDS[move]}.\n{text}" if not terminated else "You are there." if reward else "You fell."
        return text, float(reward), bool(terminated), False, info

    def _rows(self) -> list[str]:
        assert self._lake is not None
        size = self._options.size
        cells = [[_SYMBOLS[cell.decode()] for cell in row] for row in self._lake.desc]
        row, column = divmod(int(self._place), size)
        cells[row][column] = {"_": "P", "O": "X", "G": "V"}[cells[row][column]]  # on ice, in a hole, at the goal
        return ["".join(row) for row in cells]

    def _text(self) -> str:
        return "\n".join(self._rows())

    def _info(self, **more: object) -> dict:
        rows = self._rows()
        return {"state": "".join(rows), "frame": rows, **more}
