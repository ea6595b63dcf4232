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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import ray
import torch
from ray.actor import ActorHandle
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import RoleGone, StallError
from roll_async.cluster.folders import SharedFolders, require_model
from roll_async.cluster.gc_policy import defer_gc_during_startup
from roll_async.cluster.network import listener, use_node_address
from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import ProcessPlacement
from roll_async.cluster.ray_channel import RayChannel, wait_ended
from roll_async.cluster.remote import CallRules, remote, served
from roll_async.cluster.role_log import log_lines, open_role_log
from roll_async.cluster.roles.training_role import TrainingRole
from roll_async.cluster.runtime import LOOPBACK
from roll_async.observe.trace import StartTimeline, starting
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.megatron.shares import BatchSplitter, DataParallelShard
from roll_async.trainer.protocol import STATE_KINDS, GivenRows, PolicyRows, StateMemory, TokenRows, ValueRows
from roll_async.weight_sync.bucket import Block, Bucket, UpdatePlan
from roll_async.weight_sync.digest import of_trainer

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

_SILENT_S, _LONGER = 60.0, 1.5
"""After this, or this many times the longest call so far, ranks that have not returned are named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A rank's answer once it has loaded its model."""

    data_parallel_rank: int
    splitter: BatchSplitter
    """The same on all ranks."""
    log: Sequence[str]
    """Log lines of the start, among them the rank's choices."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of the start, by phase."""


class WorkerCalls(Protocol):
    """Calls of a rank that its `MegatronWorker` answers."""

    async def compute_logprobs(self, share: DataParallelShard) -> Tensor | None: ...

    async def compute_squares(self, share: DataParallelShard) -> Tensor | None: ...

    async def compute_plain_logprobs(self, share: DataParallelShard) -> Tensor | None: ...

    async def compute_base_logprobs(self, share: DataParallelShard) -> Tensor | None: ...

    async def compute_values(self, share: DataParallelShard) -> Tensor | None: ...

    async def update_policy(self, share: DataParallelShard, step: int) -> tuple[Mapping[str, float], Tensor | None]: ...

    async def update_given(self, share: DataParallelShard, step: int) -> Mapping[str, float]: ...

    async def update_values(self, share: DataParallelShard, step: int) -> Mapping[str, float]: ...

    async def offload_states(self, kinds: Sequence[str]) -> StateMemory: ...

    async def load_states(self, kinds: Sequence[str]) -> StateMemory: ...

    async def save_written(self) -> bool: ...

    async def finish_save(self) -> None: ...

    async def load(self, folder: str) -> bytes: ...

    async def export_hf(self, folder: str) -> None: ...


class RankCalls(WorkerCalls, Protocol):
    """Calls of a rank process, see `MegatronRank`."""

    async def require_folders(self, folders: SharedFolders) -> None: ...

    async def listen(self, host: str) -> int: ...

    async def node_address(self) -> str: ...

    async def imports(self) -> None: ...

    async def start(self, world_size: int, master_addr: str, master_port: int) -> Started: ...

    async def restart(
        self, settings: MegatronSettings, world_size: int, master_addr: str, master_port: int
    ) -> Started: ...

    async def export_begin(self, plan: UpdatePlan, block_bytes: int) -> UpdatePlan: ...

    async def export_next(self) -> Block | None: ...

    async def export_digest(self) -> list[int]: ...

    async def save(self, folder: str, step: int, state: bytes, background: bool) -> None: ...


_STARTS = ("imports", "start", "restart")
"""Calls that take minutes with a large model."""
_READ_INPUT = {RankCalls.require_folders, RankCalls.node_address, RankCalls.start, RankCalls.restart, RankCalls.load}
"""Calls that find out what is wrong with folders, settings and checkpoints of the user."""


@ray.remote(max_restarts=0)
@served({"_worker": WorkerCalls}, synchronous=True)
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

    def imports(self) -> None:
        """Import what a rank computes with, before any of its modules is asked for."""
        with defer_gc_during_startup():
            import roll_async.trainer.megatron.worker  # noqa: F401

    def start(self, world_size: int, master_addr: str, master_port: int) -> Started:
        """Join the group and load the model; blocks until every rank is there."""
        with StartTimeline().current() as timeline, defer_gc_during_startup(), log_lines() as lines:
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
        return Started(
            data_parallel_rank=self._worker.data_parallel_rank,
            splitter=self._worker.splitter,
            log=lines,
            seconds=timeline.seconds(),
        )

    def restart(self, settings: MegatronSettings, world_size: int, master_addr: str, master_port: int) -> Started:
        """Load a model folder again, with settings of the same layout; blocks until every rank is there."""
        self._worker.stop()
        self._role = replace(self._role, settings=settings)
        return self.start(world_size, master_addr, master_port)

    def export_begin(self, plan: UpdatePlan, block_bytes: int) -> UpdatePlan:
        """Begin the export of this rank's part of a weight version. It needs no other rank."""
        from roll_async.weight_sync.transfer import open_sender

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

    def save(self, folder: str, step: int, state: bytes, background: bool) -> None:
        self._worker.save(folder, step, state, background=background)

    def close(self) -> None:
        """Unlink shared memory of an export that was under way."""
        if self._export is not None:
            self._export.close()


class RayTrainerGroup:
    """All ranks of a Megatron role. Implements TrainerGroup, ScoringGroup, CriticGroup and OffloadingGroup of
    `trainer/protocol.py`."""

    def __init__(self, name: str, ranks: Sequence[ActorHandle], *, bucket_bytes: int, rpc_timeout_s: float) -> None:
        self.name = name
        self._actors = ranks
        self._ranks = [self._calls_of(f"{name} rank {i}", actor) for i, actor in enumerate(ranks)]
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
        """Start one process per placement, which `load_model` joins in one torch.distributed group. Raises ValueError
        for what the user can fix, StallError when they do not come up in time.
        """
        if embedded:
            # All ranks are on this machine, so none of their ports need be open to others.
            env = {**env, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        ranks: list[ActorHandle] = []
        for p in placements:
            options = pool.options(p, dict(env))
            rank = MegatronRank.options(**options, name=f"{role.name}-{p.index}", max_concurrency=1).remote(role, p)
            assert isinstance(rank, ActorHandle)  # Ray says "or the class itself", for the sake of editors
            ranks.append(rank)
        group = cls(role.name, ranks, bucket_bytes=role.bucket_bytes, rpc_timeout_s=role.rpc_timeout_s)
        try:
            with starting(role.name, "process"):
                await group._all(RankCalls.require_folders, folders)
                addresses = await group._all(RankCalls.node_address)
            group.hosts = frozenset(addresses)
            if not embedded:
                group._host = addresses[0]  # rank 0 listens, so its node
            with starting(role.name, "imports"):
                await group._all(RankCalls.imports)
        except BaseException:  # also when cancelled: the processes must not be left
            group._kill()
            raise
        return group

    async def load_model(self) -> None:
        """Load the model on the devices. Raises what `start` raises."""
        try:
            port = await self._listen()
            with starting(self.name, "load") as parts:
                self._started = await self._all(RankCalls.start, len(self._ranks), self._host, port)
                parts.update(max((s.seconds for s in self._started), key=lambda seconds: sum(seconds.values())))
        except BaseException:  # ranks that wait for others would not close
            self._kill()
            raise
        for line in self._started[0].log:
            logger.info("%s: %s", self.name, line)

    async def restart(self, settings: MegatronSettings) -> None:
        """Return the role to the state of a new start, in the same processes: for many short runs on the same ranks."""
        port = await self._listen()
        self._started = await self._all(RankCalls.restart, settings, len(self._ranks), self._host, port)

    async def compute_logprobs(self, rows: TokenRows) -> Tensor:
        """[B,T] float32, see ScoringGroup."""
        return await self._score(RankCalls.compute_logprobs, rows)

    async def compute_squares(self, rows: TokenRows) -> Tensor:
        """[B,T] float32, see TrainerGroup."""
        return await self._score(RankCalls.compute_squares, rows)

    async def compute_base_logprobs(self, rows: TokenRows) -> Tensor:
        """`compute_logprobs` of the model without its LoRA adapters."""
        return await self._score(RankCalls.compute_base_logprobs, rows)

    async def compute_values(self, rows: TokenRows) -> Tensor:
        """[B,T] float32, see CriticGroup."""
        return await self._score(RankCalls.compute_values, rows)

    async def update_policy(self, rows: PolicyRows, step: int) -> tuple[Mapping[str, float], Tensor | None]:
        """All optimizer steps of one training step, see TrainerGroup."""
        shares, of_ranks = await self._put(self._splitter.policy, rows)
        answers = await self._each(RankCalls.update_policy, [(share, step) for share in of_ranks])
        if rows.kept is None:
            return answers[0][0], None
        numbers = [share.numbers[share.rows.fields["kept"]] for share in shares]
        return answers[0][0], self._whole(rows.tokens, numbers, [found for _, found in answers], torch.nan)

    async def update_given(self, rows: GivenRows, step: int) -> Mapping[str, float]:
        """One optimizer step on rows that are not sampled."""
        _, of_ranks = await self._put(self._splitter.given, rows)
        return (await self._each(RankCalls.update_given, [(share, step) for share in of_ranks]))[0]

    async def update_values(self, rows: ValueRows, step: int) -> Mapping[str, float]:
        """All optimizer steps of the critic."""
        _, of_ranks = await self._put(self._splitter.values, rows)
        return (await self._each(RankCalls.update_values, [(share, step) for share in of_ranks]))[0]

    async def score(self, rows: Sequence[Sequence[int]]) -> list[array]:
        """Log-probs of given rows at temperature 1, see WeightSource."""
        lengths = torch.tensor([len(row) for row in rows])
        tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        # Without the first token, which has nothing before it.
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]) & (torch.arange(tokens.shape[1]) > 0)
        asked = TokenRows(tokens=tokens, lengths=lengths, mask=mask)
        scored = await self._score(RankCalls.compute_plain_logprobs, asked)
        return [array("f", scored[i, 1:length].tolist()) for i, length in enumerate(lengths.tolist())]

    async def _score(
        self, method: Callable[[RankCalls, DataParallelShard], Coroutine[Any, Any, Tensor | None]], rows: TokenRows
    ) -> Tensor:
        """[B,T], merged from the ranks' scores of their own rows."""
        shares, of_ranks = await self._put(self._splitter.scoring, rows)
        answers = await self._each(method, [(share,) for share in of_ranks])
        return self._whole(rows.tokens, [share.numbers for share in shares], answers, 0.0)

    def _whole(
        self, like: Tensor, numbers: Sequence[Tensor], answers: Sequence[Tensor | None], missing: float
    ) -> Tensor:
        """[B,T] as `like`, from the answers of ranks. `numbers`: the rows that each data-parallel rank answers for."""
        result = torch.full(like.shape, missing)
        for started, answer in zip(self._started, answers, strict=True):
            if answer is not None:
                result[numbers[started.data_parallel_rank], : answer.shape[1]] = answer
        return result

    @property
    def _splitter(self) -> BatchSplitter:
        return self._started[0].splitter

    async def _put(
        self, split: Callable[[T], list[DataParallelShard]], rows: T
    ) -> tuple[list[DataParallelShard], list[DataParallelShard]]:
        """The shares by data-parallel rank, and each rank's own in the object store."""
        shares = await asyncio.to_thread(split, rows)  # the loop goes on meanwhile
        # One object for each share: ranks that share a data-parallel rank read the same one.
        refs = cast(
            list[DataParallelShard], [ray.put(share) for share in shares]
        )  # as an argument it arrives as the share itself
        return shares, [refs[started.data_parallel_rank] for started in self._started]

    async def export_weights(self, plan: UpdatePlan) -> AsyncIterator[UpdatePlan | Bucket | str]:
        """The plan with the engines' layout, then every bucket, then the digest. The next bucket is filled while the
        caller uses the current one.
        """
        block_bytes = max(1, self._bucket_bytes // len(self._ranks))
        plans = await self._all(RankCalls.export_begin, plan, block_bytes)
        pending = asyncio.ensure_future(self._next_bucket(0))
        try:
            yield plans[0]
            while (bucket := await pending) is not None:
                pending = asyncio.ensure_future(self._next_bucket(bucket.index + 1))
                yield bucket
        finally:
            # Not cancelled: the ranks are in that call, and whatever is asked next comes after it.
            if not pending.done():
                await asyncio.wait([pending])
        yield of_trainer(await self._all(RankCalls.export_digest))

    async def _next_bucket(self, index: int) -> Bucket | None:
        """The next blocks of all ranks; ranks that have sent all of theirs are left out."""
        blocks = await self._all(RankCalls.export_next)
        found = tuple(block for block in blocks if block is not None)
        return Bucket(index=index, blocks=found) if found else None

    async def offload_states(self, kinds: Sequence[str] = STATE_KINDS) -> list[StateMemory]:
        """Free the devices for the role that shares them, see OffloadingGroup."""
        return await self._all(RankCalls.offload_states, kinds)

    async def load_states(self, kinds: Sequence[str] = STATE_KINDS) -> list[StateMemory]:
        """Inverse of `offload_states`."""
        return await self._all(RankCalls.load_states, kinds)

    async def save(self, folder: str, step: int, state: bytes, *, background: bool = False) -> None:
        """Atomic checkpoint of all ranks with the caller's own state; `finish_save` completes one in the background."""
        await self._all(RankCalls.save, folder, step, state, background)

    async def finish_save(self, poll_s: float = 0.5) -> None:
        """Wait until a save in the background is complete; the ranks train meanwhile."""
        await within(self._rpc_timeout_s, self._written(poll_s), f"{self.name}: the checkpoint was not written")
        await self._all(RankCalls.finish_save)

    async def _written(self, poll_s: float) -> None:
        while not all(await self._all(RankCalls.save_written)):
            await asyncio.sleep(poll_s)

    async def load(self, folder: str) -> bytes:
        """Restore all ranks; returns the caller's state."""
        return (await self._all(RankCalls.load, folder))[0]

    async def export_hf(self, folder: str) -> None:
        """Write a transformers-loadable folder."""
        await self._all(RankCalls.export_hf, folder)

    async def close(self) -> None:
        """Let the ranks clean up, then end them. When one is lost, the others hang in a collective and cannot."""
        if self._lost is None:
            await wait_ended([actor.close.remote() for actor in self._actors], timeout_s=5)
        self._kill()

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def _calls_of(self, role: str, actor: ActorHandle) -> RankCalls:
        rules = CallRules(role=role, deadline_s=None, starts=_READ_INPUT)  # the deadline is that of all ranks together
        return remote(RankCalls, RayChannel(actor), rules)

    async def _listen(self) -> int:
        """The port where the ranks find each other: of rank 0."""
        (port,) = await self._answers("listen", [self._ranks[0].listen(self._host)])
        return port

    async def _all(
        self, method: Callable[Concatenate[RankCalls, P], Coroutine[Any, Any, T]], *args: P.args, **none: P.kwargs
    ) -> list[T]:
        """One call on every rank, with the same arguments."""
        assert not none, "arguments travel by position"
        return await self._each(method, [args] * len(self._ranks))

    async def _each(
        self, method: Callable[..., Coroutine[Any, Any, T]], of_ranks: Sequence[tuple[object, ...]]
    ) -> list[T]:
        """One call on every rank, with its own arguments; the first failure is raised, naming the rank.

        A rank that is dead or hangs leaves the others in a collective for ever, so the group is not usable any more:
        later calls raise the same error at once.
        """
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))  # a new one: raised again, the same would gather notes
        name = method.__name__
        calls = [getattr(rank, name)(*args) for rank, args in zip(self._ranks, of_ranks, strict=True)]
        try:
            return await self._answers(name, calls)
        except (StallError, RoleGone) as error:
            self._lost = error
            raise

    async def _answers(self, what: str, asked: Sequence[Awaitable[T]]) -> list[T]:
        """The answers in the order of the ranks. One deadline covers all calls; the calls have none of their own. Ranks
        that are silent for longer than usual are named meanwhile.
        """
        loop, since = asyncio.get_running_loop(), time.strftime("%H:%M:%S")
        began_s, limit_s = loop.time(), self._rpc_timeout_s
        patience_s = limit_s if what in _STARTS else min(limit_s, max(_SILENT_S, _LONGER * self._longest_s))
        calls = [asyncio.ensure_future(one) for one in asked]
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
            if what not in _STARTS:  # a start takes minutes, and would hide a slow call for the rest of the run
                self._longest_s = max(self._longest_s, loop.time() - began_s)
            failed = [c for c in calls if c.done() and c.exception() is not None]
            return [c.result() for c in failed or calls]  # that of a failed one raises it, the first rank's first
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
