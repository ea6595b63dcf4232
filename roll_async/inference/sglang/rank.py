"""Runs inside SGLang's ranks: each takes in, on its device, what it keeps of a weight update, as vLLM's workers do.

SGLang calls `obey` there (its `custom_weight_loader`) with what came by `update_weights_from_tensor`, which here is a
command in place of a tensor. Its own answer has no room for ours: the ranks gather them, and the first one, which is on
the node of the engine, writes them into a file that the command names.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from roll_async.inference.staging import Incoming
from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.changes import LastExport


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A method of `RankUpdate` and its arguments."""

    method: str
    arguments: tuple[object, ...]
    answers: str
    """File for a pickled list with (result, error) of each rank."""

    def as_tensors(self) -> list[tuple[str, Tensor]]:
        """What SGLang takes for one tensor, with the command for its name."""
        return [(base64.b64encode(pickle.dumps(self)).decode(), torch.empty(0))]


class RankUpdate:
    """The update under way in this rank. The model is paused: there is no room on the device for a second one."""

    def __init__(self) -> None:
        self._incoming: Incoming | None = None
        self._kept = LastExport()

    def begin(self, model: nn.Module, plan: UpdatePlan, names: Sequence[str]) -> None:
        """Expect a version; one left unfinished is given up. `names`: of all tensors that the model has."""
        from sglang.srt.distributed import get_tp_group

        self.give_up(model)
        self._incoming = Incoming(plan, names, self._kept, rank=get_tp_group().rank_in_group)

    def load(self, model: nn.Module, bucket: Bucket) -> None:
        """Take in what this rank keeps of a bucket, and load it into the served model."""
        assert self._incoming is not None, "load without begin"
        model.load_weights(self._incoming.take_in(bucket))  # type: ignore[operator]  # as SGLang's models have it

    def finish(self, model: nn.Module) -> str:
        """Digest of everything taken in. Raises RuntimeError when tensors are missing."""
        assert self._incoming is not None, "finish without begin"
        return self._incoming.finish()

    def commit(self, model: nn.Module) -> None:
        """What was taken in is served now."""
        assert self._incoming is not None, "commit without begin"
        self._incoming.need_whole()
        self._incoming.committed()
        self.give_up(model)

    def give_up(self, model: nn.Module) -> None:
        """Back to rest, with the memory of the buckets given back to other processes on the device."""
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


# Of the module: SGLang calls `obey` anew each time, and an update takes many calls.
_update = RankUpdate()


def obey(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Do what a `Command` says. A failure is an answer: an exception would end SGLang's process."""
    ((text, _),) = named_tensors
    command: Command = pickle.loads(base64.b64decode(text))
    try:
        answer = getattr(_update, command.method)(model, *command.arguments), ""
    except (RuntimeError, ValueError, OSError, LookupError, AssertionError) as error:
        answer = None, f"{type(error).__name__}: {error}"
    _tell(command.answers, answer)


def _tell(file: str, answer: tuple[object, str]) -> None:
    """Write the answers of all ranks; collective. SGLang answers the engine after that."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group().cpu_group
    answers: list[object] = [None] * group.size()
    torch.distributed.all_gather_object(answers, answer, group=group)
    if group.rank() == 0:
        Path(file).write_bytes(pickle.dumps(answers))
