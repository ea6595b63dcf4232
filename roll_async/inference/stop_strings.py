"""Where a partial answer may be cut so that no stop string is ever split.

An engine looks for stop strings in what it samples itself. A request that goes on from kept tokens, after a weight push
or on another replica, is a new one to it: a stop string whose beginning was kept would not be found, and the answer
would run to its length limit. So what is handed over of an unfinished answer ends where no stop string has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

_UNFINISHED_CHARACTER = "\ufffd"
_LONGEST_CHARACTER_BYTES = 4


def safe_end(decode: Decode, token_ids: Sequence[int], stops: Sequence[str]) -> int:
    """The largest number of the tokens whose text does not end with the beginning of a stop string.

    Worked example: stop "</a>", tokens "x", "<", "/": the text "x</" ends with "</", "x<" with "<", "x" with nothing of
    it: 1. A token has one byte at least, so no more tokens than the longest stop string has bytes can be in question.
    """
    if not stops:
        return len(token_ids)
    longest = max(len(stop.encode()) for stop in stops) + _LONGEST_CHARACTER_BYTES
    # Twice as long: also the shortest text that is looked at has `longest` tokens before its end.
    window = max(0, len(token_ids) - 2 * longest)
    for end in range(len(token_ids), max(0, len(token_ids) - longest), -1):
        if not _begins_a_stop(decode(token_ids[window:end]), stops):
            return end
    return max(0, len(token_ids) - longest)


def _begins_a_stop(text: str, stops: Sequence[str]) -> bool:
    if text.endswith(_UNFINISHED_CHARACTER):  # the last character is incomplete
        return True
    # Not the whole stop string: that one has ended the request.
    return any(text.endswith(stop[:size]) for stop in stops for size in range(1, len(stop)))
