"""The settings that positions in the prompt stream and finished groups depend on; a resumed run compares them.

They are saved with ledger and checkpoint. If data, seed or order have changed, a position means another prompt, and
resuming is refused. If only the size or the filter of groups has changed, finished groups are generated again.
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
"""A change of these makes a position mean another prompt."""
_CHECKED_PROMPTS = 256


def prompts_checksum(at: Callable[[int], Prompt | None]) -> str:
    """A checksum of the first prompts of a stream: their rows, tokens and order."""
    checksum = 0
    for index in range(_CHECKED_PROMPTS):
        prompt = at(index)
        if prompt is None:
            return f"{checksum:08x}, {index} prompts"
        checksum = zlib.crc32(f"{prompt.row_id}/{prompt.domain}/".encode() + prompt.token_ids.tobytes(), checksum)
    return f"{checksum:08x}"


def changes(before: Fingerprint, now: Fingerprint) -> dict[str, str]:
    """The differences by name: `from A to B`. Names that only one of them has are not compared."""
    names = before.keys() & now.keys()
    return {name: f"from {before[name]} to {now[name]}" for name in sorted(names) if before[name] != now[name]}


def same_or_regenerate(before: Fingerprint, now: Fingerprint, *, step: int) -> bool:
    """Whether the finished groups of the earlier run can be used after `step`; if not, they are generated again. Raises
    LedgerError when positions of the stream mean other prompts now.
    """
    changed = changes(before, now)
    described = "; ".join(f"{name} {how}" for name, how in changed.items())
    if _POSITIONS & changed.keys() and (step or before):
        raise LedgerError(
            f"the run to resume (step {step}) had other prompts: {described}; a position in the stream means another "
            "prompt now: restore the old value, or start a new run under another exp_name"
        )
    if changed:
        logger.warning("%s: finished groups of the earlier run cannot be used and are generated again", described)
    return not changed
