"""Megatron ranks as Ray actors, and the groups that call them.

    driver -- TrainerGroup --> MegatronRank 0..n-1 (one process each, torch.distributed among them)

A batch is put into the object store in shares, one for each data-parallel rank: a rank receives only its own rows, and
returns only their scores. A rank does one call at a time: a call's deadline (fault.rpc_timeout) includes the time of
the call before it, and must be longer than a step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import ray
import torch
from ray.actor import ActorHandle
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import StallError
from roll_async.cluster.errors import RoleGone, call, told, wait_ended
from roll_async.cluster.folders import SharedFolders, require_model
from roll_async.cluster.garbage import start_without_collections
from roll_async.cluster.network import listener, use_node_address
from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import ProcessPlacement
from roll_async.cluster.role_log import log_lines, open_role_log
from roll_async.cluster.runtime import LOOPBACK
from roll_async.config.schema import PipelineConfig, WorkerConfig
from roll_async.inference.settings import EngineSettings
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.megatron.shares import BatchSplitter, DataParallelShard
from roll_async.trainer.protocol import STATE_KINDS, PolicyRows, StateMemory, TokenRows, ValueRows
from roll_async.weight_sync.bucket import STAGED, Block, Bucket, UpdatePlan
from roll_async.weight_sync.digest import of_trainer
from roll_async.weight_sync.layout import EngineLayout
from roll_async.weight_sync.transports import needs_front_end

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SILENT_S, _LONGER = 60.0, 1.5
"""After this, or this many times the longest call so far, ranks that have not returned are named."""
_STARTS = ("start", "restart")
"""Calls that take minutes with a large model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRole:
    """All that a rank process needs to build its worker."""

    name: str
    """actor_train, critic, reference or teacher."""
    settings: MegatronSettings
    bucket_bytes: int
    """Largest total size of the blocks of a weight bucket, one per rank."""
    engine_tensor_parallel: int = 1
    """Tensor-parallel ranks of an engine that receive their parts of the weights."""
    engine_stages_whole: bool = False
    """Over transports of host memory the engine's front end receives whole tensors instead."""
    engine_expert_parallel: bool = False
    """Whether the engines spread whole experts over those ranks."""
    weights_folder: str | None = None
    """Folder of the files of weight_sync.transport filesystem."""

    @classmethod
    def of(cls, config: PipelineConfig, name: str, worker: WorkerConfig) -> TrainingRole:
        """One training role, as the config has it."""
        engine = EngineSettings.of(config, replica=0, restart=0)  # the same for all of them
        return cls(
            name=name,
            settings=MegatronSettings.of(config, worker),
            bucket_bytes=config.weight_sync.bucket_size_mb << 20,
            rpc_timeout_s=config.fault.rpc_timeout,
            engine_tensor_parallel=engine.tensor_parallel_size if needs_front_end(config) is None else 1,
            engine_stages_whole=not config.actor_infer.engine.traits.receives_parts,
            engine_expert_parallel=bool(engine.extra.keys() & {"enable_expert_parallel", "ep_size"}),
            weights_folder=str(Path(config.output_dir).resolve() / config.exp_name / "weights"),
        )

    rpc_timeout_s: float
    """Seconds of one call, the start included."""

    def engine_layout(self, transport: str, num_kv_heads: int) -> EngineLayout:
        """Which parts of the model the receivers of a push take."""
        whole = self.engine_stages_whole and transport in STAGED
        return EngineLayout(
            tensor=1 if whole else self.engine_tensor_parallel,
            num_kv_heads=num_kv_heads,
            expert_parallel=self.engine_expert_parallel,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A rank's answer once it has loaded its model."""

    data_parallel_rank: int
    splitter: BatchSplitter
    """The same on all ranks."""
    log: Sequence[str]
    """Log lines of the start, among them the rank's choices."""


@ray.remote(max_restarts=0)
@told
class MegatronRank:
    """One rank: a synchronous `MegatronWorker` in its own process."""

    def __init__(self, role: TrainingRole, placement: ProcessPlacement) -> None:
        open_role_log()
        self._role, self._placement = role, placement
        self._listener = self._export = None

    def require_folders(self, folders: SharedFolders) -> None:
        """Raises ValueError when a folder or the model is not the driver's in this process."""
        if problems := folders.problems():
            raise ValueError("; ".join(problems))
        require_model(self._role.settings.model_folder)

    def listen(self, host: str) -> int:
        """Begin to listen where the ranks of the group find each other at its next start. Returns the port."""
        self._listener = listener(host)
        return self._listener.getsockname()[1]

    def node_address(self) -> str:
        return use_node_address()

    def start(self, world_size: int, master_addr: str, master_port: int) -> Started:
        """Join the group and load the model; blocks until every rank is there."""
        with start_without_collections(), log_lines() as lines:
            from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec

            spec = RankSpec(
                rank=self._placement.index,
                world_size=world_size,
                master_addr=master_addr,
                master_port=master_port,
                device=self._placement.device,
                listener=self._listener,
            )
            self._worker = MegatronWorker(spec, self._role.settings)
            self._worker.start()
        return Started(data_parallel_rank=self._worker.data_parallel_rank, splitter=self._worker.splitter, log=lines)

    def restart(self, settings: MegatronSettings, world_size: int, master_addr: str, master_port: int) -> Started:
        """Load a model folder again, with settings of the same layout; blocks until every rank is there."""
        self._worker.stop()
        self._role = replace(self._role, settings=settings)
        return self.start(world_size, master_addr, master_port)

    def compute_logprobs(self, share: DataParallelShard) -> Tensor | None:
        return self._worker.compute_logprobs(share)

    def compute_squares(self, share: DataParallelShard) -> Tensor | None:
        return self._worker.compute_squares(share)

    def compute_plain_logprobs(self, share: DataParallelShard) -> Tensor | None:
        return self._worker.compute_plain_logprobs(share)

    def update_policy(self, share: DataParallelShard, step: int) -> Mapping[str, float]:
        return self._worker.update_policy(share, step)

    def compute_base_logprobs(self, share: DataParallelShard) -> Tensor | None:
        return self._worker.compute_base_logprobs(share)

    def compute_values(self, share: DataParallelShard) -> Tensor | None:
        return self._worker.compute_values(share)

    def update_values(self, share: DataParallelShard, step: int) -> Mapping[str, float]:
        return self._worker.update_values(share, step)

    def export_begin(self, plan: UpdatePlan, block_bytes: int) -> UpdatePlan:
        """Begin the export of this rank's part of a weight version. It needs no other rank."""
        from roll_async.weight_sync.transports import open_sender

        role = self._role
        layout = role.engine_layout(plan.transport, self._worker.num_kv_heads)
        self._export = open_sender(
            replace(plan, layout=layout),
            self._worker.weight_parts(plan.content),
            source=self._placement.index,
            block_bytes=block_bytes,
            previous=self._export,  # its memory, its connections and its copy of what was sent are used again
            folder=role.weights_folder,
        )
        return self._export.plan

    def export_next(self) -> Block | None:
        """Publish the next block; the one before it may be overwritten. None at the end."""
        assert self._export is not None, "export_next without export_begin"
        return self._export.next_block()

    def export_digest(self) -> list[int]:
        """Digest of what this rank sent to each engine rank."""
        assert self._export is not None
        return self._export.sent

    def offload_states(self, kinds: Sequence[str]) -> StateMemory:
        return self._worker.offload_states(kinds)

    def load_states(self, kinds: Sequence[str]) -> StateMemory:
        return self._worker.load_states(kinds)

    def save(self, folder: str, step: int, state: bytes, background: bool) -> None:
        self._worker.save(folder, step, state, background=background)

    def save_written(self) -> bool:
        return self._worker.save_written()

    def finish_save(self) -> None:
        self._worker.finish_save()

    def load(self, folder: str) -> bytes:
        return self._worker.load(folder)

    def export_hf(self, folder: str) -> None:
        self._worker.export_hf(folder)

    def close(self) -> None:
        """Unlink shared memory of an export that was under way."""
        if self._export is not None:
            self._export.close()


class RayTrainerGroup:
    """All ranks of a Megatron role. Implements TrainerGroup, ScoringGroup, CriticGroup and OffloadingGroup of
    `trainer/protocol.py`."""

    def __init__(self, name: str, ranks: Sequence[ActorHandle], *, bucket_bytes: int, rpc_timeout_s: float) -> None:
        self.name = name
        self._ranks = ranks
        self._bucket_bytes, self._rpc_timeout_s = bucket_bytes, rpc_timeout_s
        self._host = LOOPBACK
        self.hosts: frozenset[str] = frozenset()
        """Addresses of the nodes the ranks run on."""
        self._started: Sequence[Started] = ()
        self._lost: StallError | RoleGone | None = None
        self._longest_s = 0.0
        """Of a call that returned."""

    @classmethod
    async def start(
        cls,
        role: TrainingRole,
        placements: Sequence[ProcessPlacement],
        pool: NodePool,
        env: Mapping[str, str],
        *,
        embedded: bool,
        folders: SharedFolders,
    ) -> RayTrainerGroup:
        """Start one process per placement and join them in one torch.distributed group. Raises ValueError for what the
        user can fix, StallError when they do not come up in time.
        """
        if embedded:
            env = {**env, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        ranks: list[ActorHandle] = []
        for p in placements:
            options = pool.options(p, dict(env))
            rank = MegatronRank.options(**options, name=f"{role.name}-{p.index}", max_concurrency=1).remote(role, p)
            assert isinstance(rank, ActorHandle)  # Ray says "or the class itself", for the sake of editors
            ranks.append(rank)
        group = cls(role.name, ranks, bucket_bytes=role.bucket_bytes, rpc_timeout_s=role.rpc_timeout_s)
        try:
            await group._all("require_folders", lambda r: r.require_folders.remote(folders))
            addresses = await group._all("node_address", lambda r: r.node_address.remote())
            group.hosts = frozenset(addresses)
            if not embedded:
                group._host = addresses[0]
            port = await group._first("listen", ranks[0].listen.remote(group._host))
            group._started = await group._all("start", lambda r: r.start.remote(len(ranks), group._host, port))
        except BaseException:  # also when cancelled: the processes must not be left
            group._kill()
            raise
        for line in group._started[0].log:
            logger.info("%s: %s", role.name, line)
        return group

    async def restart(self, settings: MegatronSettings) -> None:
        """Return the role to the state of a new start, in the same processes: for many short runs on the same ranks."""
        port = await self._first("listen", self._ranks[0].listen.remote(self._host))
        self._started = await self._all(
            "restart", lambda r: r.restart.remote(settings, len(self._ranks), self._host, port)
        )

    async def compute_logprobs(self, rows: TokenRows) -> Tensor:
        """[B,T] float32, see ScoringGroup."""
        return await self._score("compute_logprobs", rows, lambda r, share: r.compute_logprobs.remote(share))

    async def compute_squares(self, rows: TokenRows) -> Tensor:
        """[B,T] float32, see TrainerGroup."""
        return await self._score("compute_squares", rows, lambda r, share: r.compute_squares.remote(share))

    async def compute_base_logprobs(self, rows: TokenRows) -> Tensor:
        """`compute_logprobs` of the model without its LoRA adapters."""
        return await self._score("compute_base_logprobs", rows, lambda r, share: r.compute_base_logprobs.remote(share))

    async def compute_values(self, rows: TokenRows) -> Tensor:
        """[B,T] float32, see CriticGroup."""
        return await self._score("compute_values", rows, lambda r, share: r.compute_values.remote(share))

    async def update_policy(self, rows: PolicyRows, step: int) -> Mapping[str, float]:
        """All optimizer steps of one training step."""
        _, refs = await self._put(self._splitter.policy, rows)
        return (await self._all("update_policy", lambda r, share: r.update_policy.remote(share, step), refs))[0]

    async def update_values(self, rows: ValueRows, step: int) -> Mapping[str, float]:
        """All optimizer steps of the critic."""
        _, refs = await self._put(self._splitter.values, rows)
        return (await self._all("update_values", lambda r, share: r.update_values.remote(share, step), refs))[0]

    async def score(self, rows: Sequence[Sequence[int]]) -> list[array]:
        """Log-probs of given rows at temperature 1, see WeightSource."""
        lengths = torch.tensor([len(row) for row in rows])
        tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]) & (torch.arange(tokens.shape[1]) > 0)
        asked = TokenRows(tokens=tokens, lengths=lengths, mask=mask)
        scored = await self._score(
            "compute_plain_logprobs", asked, lambda r, share: r.compute_plain_logprobs.remote(share)
        )
        return [array("f", scored[i, 1:length].tolist()) for i, length in enumerate(lengths.tolist())]

    async def _score(
        self, what: str, rows: TokenRows, remote_call: Callable[[ActorHandle, ray.ObjectRef], ray.ObjectRef]
    ) -> Tensor:
        """[B,T], merged from the ranks' scores of their own rows."""
        shares, refs = await self._put(self._splitter.scoring, rows)
        result = torch.zeros(rows.tokens.shape)
        answers = await self._all(what, remote_call, refs)
        for started, answer in zip(self._started, answers, strict=True):
            if answer is not None:
                result[shares[started.data_parallel_rank].numbers, : answer.shape[1]] = answer
        return result

    @property
    def _splitter(self) -> BatchSplitter:
        return self._started[0].splitter

    async def _put(
        self, split: Callable[[T], list[DataParallelShard]], rows: T
    ) -> tuple[list[DataParallelShard], list[ray.ObjectRef]]:
        """(shares, references): the shares by data-parallel rank, and each rank's reference to its own."""
        shares = await asyncio.to_thread(split, rows)
        refs = [ray.put(share) for share in shares]
        return shares, [refs[started.data_parallel_rank] for started in self._started]

    async def export_weights(self, plan: UpdatePlan) -> AsyncIterator[UpdatePlan | Bucket | str]:
        """The plan with the engines' layout, then every bucket, then the digest. The next bucket is filled while the
        caller uses the current one.
        """
        block_bytes = max(1, self._bucket_bytes // len(self._ranks))
        plans = await self._all("export_begin", lambda r: r.export_begin.remote(plan, block_bytes))
        pending = asyncio.ensure_future(self._next_bucket(0))
        try:
            yield plans[0]
            while (bucket := await pending) is not None:
                pending = asyncio.ensure_future(self._next_bucket(bucket.index + 1))
                yield bucket
        finally:
            if not pending.done():
                await asyncio.wait([pending])
        yield of_trainer(await self._all("export_digest", lambda r: r.export_digest.remote()))

    async def _next_bucket(self, index: int) -> Bucket | None:
        """The next blocks of all ranks; ranks that have sent all of theirs are left out."""
        blocks = await self._all("export_next", lambda r: r.export_next.remote())
        found = tuple(block for block in blocks if block is not None)
        return Bucket(index=index, blocks=found) if found else None

    async def offload_states(self, kinds: Sequence[str] = STATE_KINDS) -> list[StateMemory]:
        """Free the devices for the role that shares them, see OffloadingGroup."""
        return await self._all("offload_states", lambda r: r.offload_states.remote(kinds))

    async def load_states(self, kinds: Sequence[str] = STATE_KINDS) -> list[StateMemory]:
        """Inverse of `offload_states`."""
        return await self._all("load_states", lambda r: r.load_states.remote(kinds))

    async def save(self, folder: str, step: int, state: bytes, *, background: bool = False) -> None:
        """Atomic checkpoint of all ranks with the caller's own state; `finish_save` completes one in the background."""
        await self._all("save", lambda r: r.save.remote(folder, step, state, background))

    async def finish_save(self, poll_s: float = 0.5) -> None:
        """Wait until a save in the background is complete; the ranks train meanwhile."""
        await within(self._rpc_timeout_s, self._written(poll_s), f"{self.name}: the checkpoint was not written")
        await self._all("finish_save", lambda r: r.finish_save.remote())

    async def _written(self, poll_s: float) -> None:
        while not all(await self._all("save_written", lambda r: r.save_written.remote())):
            await asyncio.sleep(poll_s)

    async def load(self, folder: str) -> bytes:
        """Restore all ranks; returns the caller's state."""
        return (await self._all("load", lambda r: r.load.remote(folder)))[0]

    async def export_hf(self, folder: str) -> None:
        """Write a transformers-loadable folder."""
        await self._all("export_hf", lambda r: r.export_hf.remote(folder))

    async def close(self) -> None:
        """Let the ranks clean up, then end them. When one is lost, the others hang in a collective and cannot."""
        if self._lost is None:
            await wait_ended([r.close.remote() for r in self._ranks], timeout_s=5)
        self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)

    async def _first(self, what: str, ref: Awaitable[T]) -> T:
        """One call on rank 0."""
        return await call(f"{self.name} rank 0", what, ref, timeout_s=self._rpc_timeout_s)

    async def _all(self, what: str, remote_call: Callable[..., ray.ObjectRef], *of_ranks: Sequence) -> list:
        """One call on every rank, with its elements of `of_ranks`; the first failure is raised, naming the rank.

        A rank that is dead or hangs leaves the others in a collective for ever, so the group is not usable any more:
        later calls raise the same error at once.
        """
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))
        try:
            return await self._answers(what, [remote_call(*x) for x in zip(self._ranks, *of_ranks, strict=True)])
        except (StallError, RoleGone) as error:
            self._lost = error
            raise

    async def _answers(self, what: str, refs: Sequence[ray.ObjectRef]) -> list:
        """The answers in the order of the ranks. One deadline covers all calls; the calls have none of their own. Ranks
        that are silent for longer than usual are named meanwhile.
        """
        loop, since = asyncio.get_running_loop(), time.strftime("%H:%M:%S")
        began_s, limit_s = loop.time(), self._rpc_timeout_s
        patience_s = limit_s if what in _STARTS else min(limit_s, max(_SILENT_S, _LONGER * self._longest_s))
        calls = [
            asyncio.ensure_future(call(f"{self.name} rank {i}", what, _awaitable(ref), timeout_s=None))
            for i, ref in enumerate(refs)
        ]
        try:
            late = await self._late(calls, patience_s)
            if late and patience_s < limit_s:
                logger.warning(
                    "%s: %s, begun at %s, has not returned for %g s; the run waits until %g s (fault.rpc_timeout)",
                    late, what, since, patience_s, limit_s,
                )  # fmt: skip
                late = await self._late(calls, limit_s - patience_s)
            if late:
                raise StallError(f"{late}: {what} did not return within {limit_s:g} s (fault.rpc_timeout)")
            if what not in _STARTS:
                self._longest_s = max(self._longest_s, loop.time() - began_s)
            failed = [c for c in calls if c.done() and c.exception() is not None]
            return [c.result() for c in failed or calls]
        finally:
            for one in calls:
                one.cancel()

    async def _late(self, calls: Sequence[asyncio.Future], timeout_s: float) -> str:
        """Wait until all calls have returned or one has failed; which ranks have not returned when neither happens."""
        await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        late = [str(i) for i, c in enumerate(calls) if not c.done()]
        if not late or any(c.done() and c.exception() is not None for c in calls):
            return ""
        return f"{self.name} rank{'s' * (len(late) > 1)} {', '.join(late)}"


class BasePolicy:
    """The actor with its adapters off: the reference of a LoRA run, on the actor's ranks. Implements ScoringGroup."""

    def __init__(self, actor: RayTrainerGroup) -> None:
        self._actor = actor

    async def compute_logprobs(self, rows: TokenRows) -> Tensor:
        """[B,T] float32, see ScoringGroup."""
        return await self._actor.compute_base_logprobs(rows)


async def _awaitable(ref: ray.ObjectRef) -> object:
    return await ref
