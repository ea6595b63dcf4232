"""The settings that positions in the prompt stream and finished groups depend on; a resumed run compares them.

They are saved with ledger and checkpoint. Prompts are known by what their rows say, not by how they were rendered or
where their files lie. If data, seed or order have changed, a position means another prompt, and resuming is refused. If
only the rendering has changed, the run goes on with a warning. If only the size or the filter of groups or the
variables of the chat template have changed, finished groups are generated again.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Mapping

from roll_async.buffer.errors import LedgerError, OtherPrompts
from roll_async.schema import Prompt

logger = logging.getLogger(__name__)

Fingerprint = Mapping[str, str]
PromptAt = Callable[[int], Prompt | None]

PROMPTS = "prompts"
RENDERING = "rendering"
SEED = "seed"
RUN = "run id"
_CHECKED_PROMPTS = 256
_FORMAT = "rows "
"""Begins the value of `prompts`. An earlier version had a checksum of rendered tokens there, which compares with
nothing."""
_DIGITS = 8
"""Of the checksum of each prompt."""
_SHOWN_CHARACTERS = 60


def prompts_checksum(at: PromptAt) -> str:
    """Checksums of what the first prompts of a stream say, in order."""
    return _FORMAT + "".join(_checksum(_said(prompt)) for prompt in _first(at))


def stream_fingerprint(at: PromptAt) -> Fingerprint:
    """What the first prompts of a stream say, and their tokens."""
    return {
        PROMPTS: prompts_checksum(at),
        RENDERING: "".join(_checksum(prompt.token_ids.tobytes()) for prompt in _first(at)),
    }


def _first(at: PromptAt) -> list[Prompt]:
    prompts = (at(index) for index in range(_CHECKED_PROMPTS))
    return [prompt for prompt in prompts if prompt is not None]


def _said(prompt: Prompt) -> bytes:
    """A row's content; a task without a row (a world and its seed) is what its fields say."""
    content = prompt.content or [prompt.row_id, prompt.text, prompt.ground_truth, dict(prompt.extra)]
    return sorted_json([prompt.domain, content]).encode()


def sorted_json(value: object) -> str:
    """The same whatever the order in which keys were written."""
    return json.dumps(value, sort_keys=True)


def _checksum(said: bytes) -> str:
    return f"{zlib.crc32(said):0{_DIGITS}x}"  # of fixed width: `_first_change` cuts the text into its checksums


def changes(before: Fingerprint, now: Fingerprint) -> dict[str, str]:
    """The differences by name: `from A to B`. Names that only one of them has are not compared, nor are prompts that an
    earlier version described.
    """
    names = (before.keys() & now.keys()) - {RUN}  # a run may begin at the checkpoint of another
    if not before.get(PROMPTS, _FORMAT).startswith(_FORMAT):
        names -= {PROMPTS}
    return {name: f"from {before[name]} to {now[name]}" for name in sorted(names) if before[name] != now[name]}


def require_own_ledger(stored: Fingerprint, now: Fingerprint) -> None:
    """Raises LedgerError for the ledger of another run."""
    whose = stored.get(RUN)
    if whose is not None and whose != now.get(RUN, whose):  # without an id nothing is compared
        raise LedgerError(
            f"the ledger is of run {whose}, and this is run {now[RUN]}: set ledger.path to a file of its own, or "
            "continue that run with its exp_name and checkpoint.resume_from=latest"
        )


def same_or_regenerate(before: Fingerprint, now: Fingerprint, *, step: int, at: PromptAt | None = None) -> bool:
    """Whether the finished groups of the earlier run can be used after `step`; if not, they are generated again. `at`:
    the prompts, to name the first that differs. Raises OtherPrompts when positions mean other prompts now.
    """
    changed = changes(before, now)
    if (PROMPTS in changed or SEED in changed) and (step or before):
        what = f"seed {changed[SEED]}" if SEED in changed else _first_change(before[PROMPTS], now[PROMPTS], at)
        raise OtherPrompts(
            f"the run to resume (step {step}) had other prompts: {what}; a position in the stream means another prompt "
            "now: restore the old data and seed, or start a new run: leave out checkpoint.resume_from"
        )
    if RENDERING in changed and PROMPTS not in changed:  # other rows have other tokens in any case
        what = _first_change(before[RENDERING], now[RENDERING], at)
        logger.warning("the same rows are rendered to other tokens than before (tokenizer or chat template): %s", what)
    others = {name: how for name, how in changed.items() if name not in (PROMPTS, RENDERING)}
    if others:
        described = "; ".join(f"{name} {how}" for name, how in others.items())
        logger.warning("%s: finished groups of the earlier run cannot be used and are generated again", described)
    return not others


def _first_change(before: str, now: str, at: PromptAt | None) -> str:
    """The first position at which two lists of checksums differ, and the prompt there."""
    skip = len(_FORMAT) if now.startswith(_FORMAT) else 0
    lists = [[text[i : i + _DIGITS] for i in range(skip, len(text), _DIGITS)] for text in (before, now)]
    # Not strict: one of them may have fewer prompts.
    same = next((i for i, (a, b) in enumerate(zip(*lists, strict=False)) if a != b), min(map(len, lists)))
    prompt = None if at is None else at(same)
    shown = "" if prompt is None else f" is row {prompt.row_id}, {prompt.text[:_SHOWN_CHARACTERS]!r}, and was another"
    return f"the prompt at position {same}{shown}"
