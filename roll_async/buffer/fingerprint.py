"""What positions in the prompt stream and finished groups depend on: a resumed run must find it unchanged.

Ledger and checkpoint carry it. A position means another prompt when data, seed or order have changed: then resuming is
refused. Finished groups of another size or filter cannot be used, but their positions can: they are generated again.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping

from roll_async.buffer.errors import LedgerError
from roll_async.schema import Prompt

logger = logging.getLogger(__name__)

Fingerprint = Mapping[str, str]

PROMPTS = "prompts"
SEED = "seed"
_POSITIONS = frozenset({PROMPTS, SEED})
"""Changes of these make a position mean something else."""
_LOOKED_AT = 256


def mark_of(at: Callable[[int], Prompt | None]) -> str:
    """A checksum of the first prompts of a stream: their rows, tokens and order."""
    mark = 0
    for index in range(_LOOKED_AT):
        prompt = at(index)
        if prompt is None:
            return f"{mark:08x}, {index} prompts"
        mark = zlib.crc32(f"{prompt.row_id}/{prompt.domain}/".encode() + prompt.token_ids.tobytes(), mark)
    return f"{mark:08x}"


def changes(before: Fingerprint, now: Fingerprint) -> dict[str, str]:
    """The differences by name: `from A to B`. Names that only one of them has are not compared."""
    names = before.keys() & now.keys()
    return {name: f"from {before[name]} to {now[name]}" for name in sorted(names) if before[name] != now[name]}


def same_or_regenerate(before: Fingerprint, now: Fingerprint, *, step: int) -> bool:
    """Whether the finished groups of the run before can be used after `step`; if not, they are generated again. Raises
    LedgerError when positions of the stream mean other prompts.
    """
    changed = changes(before, now)
    described = "; ".join(f"{name} {how}" for name, how in changed.items())
    if _POSITIONS & changed.keys() and (step or before):
        raise LedgerError(
            f"the run to go on with (step {step}) had other prompts: {described}; a position in them means something "
            "else now: set it back, or start fresh under another exp_name"
        )
    if changed:
        logger.warning("%s: finished groups of the earlier run cannot be used and are generated again", described)
    return not changed
