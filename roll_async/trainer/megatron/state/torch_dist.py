"""Writing a torch_dist folder from all ranks, each its own file, the bytes in a thread of this process.

Megatron's own asynchronous writer forks processes and starts a manager for them; here the ranks agree on the plan at
once (collective), `write` puts the bytes on disk alone, and `finish` (collective) makes the folder complete.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult

from roll_async.checkpoint.folders.find_model import TORCH_DIST
from roll_async.checkpoint.folders.manifest import fingerprint
from roll_async.checkpoint.folders.megatron_folder import COMMON, FORMAT, INDEX
from roll_async.checkpoint.folders.torch_files import disk_errors


class TorchDistSave:
    """One save under way. `finish` must be called by every rank, after which the folder can be loaded."""

    def __init__(self, folder: Path, state: dict, *, background: bool, fresh: Collection[int] = ()) -> None:
        """Plan the save of a sharded state dict (collective). `background`: copy what the next step would overwrite and
        write in a thread; else write before returning. `fresh`: addresses of storages that nobody else writes to.
        """
        self._folder, self._rank = folder, dist.get_rank()
        sharded, self._common = save_preprocess(state)
        assert isinstance(sharded, dict)  # as `state` is
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        if background:
            _detach_from_training(flat, fresh)
        # No deduplication: of each replica only the main one is in `flat`.
        self._planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._writer = FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=True, thread_count=1)
        self._plan(mcore_to_pyt_state_dict(flat, False))
        self._written: Future[tuple[list[WriteResult], dict[str, str]]] = Future()
        if background:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._written = self._thread.submit(self._write)
            # The thread ends with its one task.
            self._thread.shutdown(wait=False)
        else:
            self._written.set_result(self._write())

    def _plan(self, state: dict) -> None:
        """The planner's and the writer's agreement, as torch.distributed.checkpoint.save holds it."""
        first = self._rank == 0
        self._planner.set_up_planner(state, is_coordinator=first)
        self._writer.set_up_storage_writer(first)
        local = self._writer.prepare_local_plan(self._planner.create_local_plan())
        plans: list = [None] * dist.get_world_size()
        dist.all_gather_object(plans, local)
        plans, self._metadata = self._planner.create_global_plan(plans)
        plans = self._writer.prepare_global_plan(plans)
        self._central = self._planner.finish_plan(plans[self._rank])

    def _write(self) -> tuple[list[WriteResult], dict[str, str]]:
        """This rank's file; where its parts lie, and its fingerprint."""
        with disk_errors(self._folder):
            results = list(self._writer.write_data(self._central, self._planner).wait())
        names = {result.storage_data.relative_path for result in results}
        return results, {name: fingerprint(self._folder / name) for name in names}

    def done(self) -> bool:
        """Whether this rank's bytes are on disk."""
        return self._written.done()

    def finish(self) -> dict[str, str]:
        """Wait for all ranks and complete the folder; fingerprints of its files on rank 0. Raises what a rank's disk
        raised, on every rank.
        """
        problem, mine = None, ([], {})
        try:
            mine = self._written.result()
        except OSError as error:
            problem = error
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (problem, *mine))
        for error, _, _ in gathered:
            if error is not None:
                raise error
        files = {name: value for _, _, part in gathered for name, value in part.items()}
        if self._rank == 0:
            self._writer.finish(self._metadata, [results for _, results, _ in gathered])
            with disk_errors(self._folder), open(self._folder / COMMON, "wb") as file:
                torch.save(self._common, file)
            (self._folder / TORCH_DIST).write_text(json.dumps(FORMAT))
            files |= {name: fingerprint(self._folder / name) for name in (INDEX, COMMON, TORCH_DIST)}
        return files


def _detach_from_training(flat: dict[str, list], fresh: Collection[int]) -> None:
    """Copy what this rank writes to memory of its own, unless it is that already: training goes on meanwhile."""
    for parts in flat.values():
        for part in parts:
            if isinstance(part, ShardedTensor) and is_main_replica(part.replica_id):
                assert part.data is not None
                if part.data.untyped_storage().data_ptr() not in fresh:
                    part.data = part.data.detach().to("cpu", copy=True)
