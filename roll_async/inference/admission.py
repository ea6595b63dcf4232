"""What all engines check, and what they wait for, before they compute a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roll_async.inference.settings import EngineSettings
from roll_async.schema import GenerateRequest


def token_budget(request: GenerateRequest, settings: EngineSettings) -> int:
    """Most tokens of the response. Raises ValueError for a prompt without a token, or one that leaves no room in the
    context, and for a response without a token.
    """
    if not request.prompt_token_ids or request.sampling.max_new_tokens < 1:
        asked = f"{len(request.prompt_token_ids)} prompt tokens, max_new_tokens {request.sampling.max_new_tokens}"
        raise ValueError(f"request {request.request_id}: {asked}: expected one of each at least")
    room = settings.max_model_len - len(request.prompt_token_ids)
    if room < 1:
        raise ValueError(
            f"request {request.request_id}: {len(request.prompt_token_ids)} prompt tokens leave no room in a context "
            f"of {settings.max_model_len}"
        )
    return min(room, request.sampling.max_new_tokens)


def held_back(request: GenerateRequest, settings: EngineSettings) -> int:
    """Last tokens that may be the beginning of a stop string: not reported before the request ends. Raises ValueError
    for stop strings where the engine was started without them.
    """
    stops = request.sampling.stop_strings
    if stops and not settings.stop_strings:
        raise ValueError(f"request {request.request_id} has stop_strings, and the engine was started without them")
    return max((len(stop.encode()) for stop in stops), default=1) - 1  # a token has a byte at least


def check_scored(token_ids: Sequence[int], max_model_len: int) -> None:
    """Raises ValueError for fewer than two tokens, or more than the context takes beside the one token that an engine
    samples after them.
    """
    if not 2 <= len(token_ids) < max_model_len:
        raise ValueError(f"{len(token_ids)} tokens to score: 2 to {max_model_len - 1} fit")


async def first_of(*events: asyncio.Event) -> None:
    """Wait until one of them is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
