"""What all engines check before they score given tokens (`Engine.score`)."""

from __future__ import annotations

from collections.abc import Sequence


def check_scored(token_ids: Sequence[int], max_model_len: int) -> None:
    """Raises ValueError for fewer than two tokens, or more than the context takes beside the one token that an engine
    samples after them.
    """
    if not 2 <= len(token_ids) < max_model_len:
        raise ValueError(f"{len(token_ids)} tokens to score: 2 to {max_model_len - 1} fit")
