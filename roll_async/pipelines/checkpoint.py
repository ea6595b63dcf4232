"""The checkpoint of a whole run at one step: every trained role, the learner's state, the position in the prompts.

    step_00000004/actor_train/  megatron/ huggingface/ state.bin manifest.json (trainer/megatron/state/checkpoints.py)
    step_00000004/critic/       the same, with advantage estimator gae
    step_00000004/hf/           weights for transformers, with checkpoint.save_hf_model

The folder is written under a temporary name and renamed when the last role is done.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from roll_async.buffer.errors import LedgerError, StallError
from roll_async.checkpoint.run_checkpoints import RunCheckpoints
from roll_async.config.schema import RunConfig
from roll_async.observe.sample_dump import SampleDump
from roll_async.pipelines.protocol import BatchQueue

logger = logging.getLogger(__name__)

_ACTOR = "actor_train"


class SavedRole(Protocol):
    """What a checkpoint needs of a group of ranks; see `cluster/roles/trainer_group.py`."""

    async def save(self, folder: str, step: int, state: bytes, *, background: bool = False) -> None: ...

    async def finish_save(self) -> None: ...

    async def load(self, folder: str) -> bytes: ...

    async def export_hf(self, folder: str) -> None: ...


class SavedLearner(Protocol):
    """What a checkpoint needs of `trainer/learner.py`."""

    def export_state(self) -> dict[str, object]:
        """Plain JSON values."""
        ...

    def restore_state(self, state: Mapping[str, object]) -> None: ...


class LoopCheckpoint:
    """`pipelines/protocol.py: Checkpointer`. With `async_save` the loop waits only for the copy of the weights."""

    def __init__(
        self,
        config: RunConfig,
        roles: Mapping[str, SavedRole],
        learner: SavedLearner,
        queue: BatchQueue | None,
        checkpoints: RunCheckpoints,
        samples: SampleDump | None = None,
    ) -> None:
        """`queue`: None where the learner holds the position in the data."""
        self._config, self._roles, self._learner = config, roles, learner
        self._queue, self._checkpoints, self._samples = queue, checkpoints, samples
        self._pending: asyncio.Task[None] | None = None

    async def save(self, step: int) -> None:
        """Write the checkpoint of a step, once the one before it is complete. Raises the error of a save in the
        background.
        """
        await self.finish()
        position = None if self._queue is None else await self._queue.checkpoint_state(step)
        state = {"step": step, "learner": self._learner.export_state(), "queue": position}
        if self._samples is not None:  # a restored run does not dump these steps again
            await asyncio.to_thread(self._samples.flush)
        staging, background = self._checkpoints.begin(step), self._config.checkpoint.async_save
        for name, role in self._roles.items():
            own = json.dumps(state).encode() if name == _ACTOR else b""  # once: `restore_loop` reads the actor's
            await role.save(str(staging / name), step, own, background=background)
        if self._config.checkpoint.save_hf_model:
            await self._roles[_ACTOR].export_hf(str(staging / "hf"))
        self._pending = asyncio.create_task(self._complete(step), name=f"checkpoint of step {step}")
        if not background:
            await self.finish()

    async def _complete(self, step: int) -> None:
        for role in self._roles.values():
            await role.finish_save()
        await asyncio.to_thread(self._checkpoints.commit, step, list(self._roles))
        await asyncio.to_thread(self._checkpoints.prune)  # only now: until the new one is whole the old ones are needed
        if self._queue is None:
            return
        try:
            await self._queue.checkpointed(step)
        except (LedgerError, StallError, ConnectionError) as error:
            # The checkpoint is complete. A ledger that stays broken, or a rollout process that is gone, raises next.
            logger.error("the checkpoint of step %d is complete, but the ledger was not pruned: %s", step, error)

    async def finish(self) -> None:
        """Wait for the save in the background, if any."""
        pending, self._pending = self._pending, None  # first: its error is raised once, not with the next save again
        if pending is not None:
            await pending

    async def close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """At the end of a run: complete the save under way, or abandon it when the run failed."""
        if error is None:
            await self.finish()
        elif self._pending is not None:
            self._pending.cancel()  # its folder keeps the temporary name, which no resume takes


async def restore_loop(
    config: RunConfig, roles: Mapping[str, SavedRole], learner: SavedLearner, checkpoints: RunCheckpoints
) -> tuple[int, Mapping[str, object] | None]:
    """Load the checkpoint that `checkpoint.resume_from` names. Returns its step (0 for a fresh run) and its position in
    the prompt stream.
    """
    wanted = config.checkpoint.resume_from
    if wanted is None:
        return 0, None
    folder = checkpoints.find(wanted)
    if folder is None:
        logger.info("resume_from latest: no checkpoint yet, starting fresh")
        return 0, None
    names = list(roles)
    answers = await asyncio.gather(*(roles[name].load(str(folder / name)) for name in names))
    state = json.loads(answers[names.index(_ACTOR)])
    learner.restore_state(state["learner"])
    logger.info("resumed after step %d from %s", state["step"], folder)
    return int(state["step"]), state.get("queue")
