"""What travels to the ranks of a trainer group, and back: each receives the rows of its data-parallel part."""

import asyncio
from dataclasses import replace

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("megatron.core")

import megatron_cases as cases
import torch

from roll_async.cluster.roles.trainer_group import RayTrainerGroup, Started
from roll_async.cluster.runtime import ray_runtime
from roll_async.trainer.megatron.model.model_flops import ModelFlops
from roll_async.trainer.megatron.shares import BatchSplitter, ModelTraits
from roll_async.trainer.protocol import ValueRows

NUM_RANKS = 4


@ray.remote(num_cpus=0)
class CountingRank:
    """Scores a token with its own number; says how many bytes of rows it received."""

    def __init__(self, index):
        self._index, self._received = index, 0

    def listen(self, host):
        return 0

    def restart(self, settings, world_size, master_addr, master_port):
        self._tensor = settings.parallel.tensor
        flops = ModelFlops(per_token=24 * 64 * 64, per_pair=4 * 64, backward=2)
        model = ModelTraits(flops=flops, has_experts=False, common_shape=False)
        splitter = BatchSplitter(settings, model, world_size // self._tensor)
        return Started(data_parallel_rank=self._index // self._tensor, splitter=splitter, log=())

    def compute_logprobs(self, share):
        self._count(share)
        return share.rows.tokens.float() if self._index % self._tensor == 0 else None

    def update_policy(self, share, step):
        kept = share.rows.tokens[share.rows.fields["kept"]].float()
        return self.update_values(share, step), kept if self._index % self._tensor == 0 else None

    def update_values(self, share, step):
        self._count(share)
        return {"rows": float(len(share.numbers))}

    def received(self):
        received, self._received = self._received, 0
        return received

    def _count(self, share):
        rows = share.rows
        self._received += sum(x.nbytes for x in (rows.tokens, rows.lengths, rows.mask, *rows.fields.values()))


async def bytes_by_call(ranks, tensor):
    """What each rank receives in each call, with that many tensor-parallel ranks."""
    group = RayTrainerGroup("actor_train", ranks, bucket_bytes=1, rpc_timeout_s=240.0)
    await group.restart(cases.settings_of("", parallel={"tensor": tensor}))
    rows, policy = cases.batch()
    values = ValueRows(
        tokens=rows.tokens,
        lengths=rows.lengths,
        mask=rows.mask,
        old_values=policy.behaviour_logprobs,
        returns=policy.advantages,
    )
    found = {}
    scored = await group.compute_logprobs(rows)
    assert torch.equal(scored, rows.tokens.float()), "answers of all ranks, each row at its place"
    found["compute_logprobs"] = await asyncio.gather(*(r.received.remote() for r in ranks))
    kept = torch.arange(cases.NUM_ROWS) % 3 == 0
    metrics, entropies = await group.update_policy(replace(policy, kept=kept), 1)
    assert metrics["rows"] == cases.NUM_ROWS * tensor / NUM_RANKS
    assert torch.equal(entropies[kept].nan_to_num(0), rows.tokens[kept].float()) and entropies[~kept].isnan().all()
    found["update_policy"] = await asyncio.gather(*(r.received.remote() for r in ranks))
    await group.update_values(values, 1)
    found["update_values"] = await asyncio.gather(*(r.received.remote() for r in ranks))
    return found


def test_a_rank_receives_fewer_bytes_the_more_data_parallel_ranks_there_are():
    with ray_runtime(num_processes=NUM_RANKS, env={}):
        ranks = [CountingRank.remote(index) for index in range(NUM_RANKS)]
        found = {tensor: asyncio.run(bytes_by_call(ranks, tensor)) for tensor in (1, 2, 4)}
    for call, whole in found[4].items():
        assert len(set(whole)) == 1, "all tensor-parallel ranks need the same rows"
        for tensor in (1, 2):
            each = found[tensor][call]
            assert sum(each[::tensor]) <= whole[0], "no row is sent to two data-parallel ranks"
            assert all(size <= 1.1 * whole[0] * tensor / 4 for size in each), (call, each, whole)
