"""Generators of reasoning-gym (extra `reasoning-gym`): one question, its own scorer. The import takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from roll_async.envs.worlds.text_world import TextWorld

if find_spec("reasoning_gym") is None:  # importing it takes seconds, and only the worker needs it
    raise ImportError("No module named 'reasoning_gym'")


@dataclass(frozen=True, kw_only=True)
class ReasoningGymOptions:
    """`env_config` of reasoning_gym."""

    dataset: str = "chain_sum"
    config: Mapping[str, object] = field(default_factory=dict)
    """Arguments of reasoning_gym.create_dataset."""


class ReasoningGymWorld(TextWorld):
    """One answer, scored by the generator."""

    Options = ReasoningGymOptions
    quick = False

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options = options

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The same seed, the same question."""
        import reasoning_gym

        chosen = self._options
        self._data = reasoning_gym.create_dataset(chosen.dataset, size=1, seed=seed or 0, **chosen.config)
        self._entry = self._data[0]
        return self._entry["question"], {"instructions": "Answer with the result alone in <answer>...</answer>."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """The answer."""
        from reasoning_gym.utils import extract_answer

        stated = extract_answer(action)
        answer = action.strip() if stated is None else stated
        score = float(self._data.score_answer(answer, self._entry))
        return "", score, True, False, {"solved": score >= 1.0}
