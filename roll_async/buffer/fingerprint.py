"""What positions in the prompt stream and finished groups depend on: a run that goes on must find it unchanged.

Ledger and checkpoint carry it. A position means another prompt when data, seed or order are others: then going on is
refused. Finished groups of another size or filter are of no use, while their positions are: they are generated again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

from roll_async.schema import Prompt

Fingerprint = Mapping[str, str]

PROMPTS = "prompts"
SEED = "seed"
_POSITIONS = frozenset({PROMPTS, SEED})
"""Changes of these make a position mean something else."""
_LOOKED_AT = 256


def mark_of(at: Callable[[int], Prompt | None]) -> str:
    """Of the first prompts of a stream: their rows, tokens and order."""
    mark = 0
    for index in range(_LOOKED_AT):
        prompt = at(index)
        if prompt is None:
            return f"{mark:08x}, {index} prompts"
        mark = zlib.crc32(f"{prompt.row_id}/{prompt.domain}/".encode() + prompt.token_ids.tobytes(), mark)
    return f"{mark:08x}"


def changes(before: Fingerprint, now: Fingerprint) -> dict[str, str]:
    """What is not as it was, by name: `from A to B`. Names that only one of them has are not compared."""
    names = before.keys() & now.keys()
    return {name: f"from {before[name]} to {now[name]}" for name in sorted(names) if before[name] != now[name]}


def moves_positions(changed: Mapping[str, str]) -> bool:
    """Positions of the stream mean other prompts."""
    return bool(_POSITIONS & changed.keys())
