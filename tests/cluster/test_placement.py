"""Device mappings against clusters with pretended GPUs: what each process sees, what is refused, what is waited for."""

import asyncio
import contextlib
import logging
import os

import pytest

ray = pytest.importorskip("ray")
from own_cluster import OwnCluster

from roll_async.buffer.errors import StallError
from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import place
from roll_async.cluster.runtime import ray_runtime
from tests.patience import patient

ALLOCATIONS = ("6,7", "4,5,6,7", "0,1,2,3")
"""What a scheduler left in the shell of each node."""


@pytest.fixture(scope="module")
def cluster(short_folder):
    """Three nodes, with 2, 4 and 4 of their GPUs."""
    with OwnCluster(short_folder) as own:
        for allocation in ALLOCATIONS:
            start = own.head if allocation == ALLOCATIONS[0] else own.node
            start(cpus=10, gpus=len(allocation.split(",")), env={"CUDA_VISIBLE_DEVICES": allocation})
        yield own


@pytest.fixture(scope="module")
def joined(cluster):
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_ADDRESS", cluster.address)
    with ray_runtime(num_processes=1, env={}):
        yield cluster
    patch.undo()


def placed(devices, processes, per_node=8):
    return place(devices, num_processes=processes, num_gpus_per_node=per_node, num_threads=1)


@ray.remote
class Role:
    def seen(self):
        return os.environ["CUDA_VISIBLE_DEVICES"], ray.get_runtime_context().get_node_id()

    def pid(self):
        return os.getpid()


async def until_dead(role):
    """Until Ray knows."""
    while True:
        try:
            await role.seen.remote()
        except ray.exceptions.ActorUnavailableError:
            await asyncio.sleep(0.2)
        except ray.exceptions.ActorDiedError:
            return


async def seen_by(pool, placements):
    """What each process sees, as (visible devices, node)."""
    roles = [Role.options(**pool.options(p, {})).remote() for p in placements]
    try:
        return await asyncio.gather(*(role.seen.remote() for role in roles))
    finally:
        for role in roles:
            ray.kill(role)


@contextlib.asynccontextmanager
async def reserved(placements, timeout_s=60):
    pool = NodePool(placements)
    await pool.reserve(timeout_s)
    try:
        yield pool
    finally:
        pool.release()


def visible(pool, placements):
    return [pool.options(p, {})["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for p in placements]


def test_trainer_two_by_four_and_rollout_one_by_two_get_three_nodes_and_the_devices_of_their_allocations(joined):
    trainer, engines = placed((0, 1, 2, 3, 8, 9, 10, 11), 8), placed((16, 17), 1)

    async def scenario():
        async with reserved((*trainer, *engines)) as pool:
            some = (trainer[3], trainer[4], engines[0])
            return visible(pool, trainer), visible(pool, some), await seen_by(pool, some)

    ranks, some, seen = asyncio.run(scenario())
    assert ranks in (["0", "1", "2", "3", "4", "5", "6", "7"], ["4", "5", "6", "7", "0", "1", "2", "3"])
    assert [devices for devices, _ in seen] == some and some[2] == "6,7"
    assert len({node for _, node in seen}) == 3


def test_colocated_roles_see_the_same_device(joined):
    trainer, engines = placed((0, 1, 2, 3), 4), placed((0, 1, 2, 3), 2)

    async def scenario():
        async with reserved((*trainer, *engines)) as pool:
            return visible(pool, trainer), visible(pool, engines)

    one, two = asyncio.run(scenario())
    assert two == [",".join(one[:2]), ",".join(one[2:])] and len(set(one)) == 4


def test_devices_of_another_job_are_left_alone(joined):
    """The other jobs took whatever Ray gave them; what is left of a node is not its first devices."""

    @ray.remote(num_gpus=2)
    class Other:
        def seen(self):
            return os.environ["CUDA_VISIBLE_DEVICES"].split(","), ray.get_runtime_context().get_node_id()

    @ray.remote(num_cpus=0)
    def node_of_bundle():
        return ray.get_runtime_context().get_node_id()

    async def scenario():
        others = [Other.remote() for _ in range(3)]
        taken = [await other.seen.remote() for other in others]
        placements = placed((0, 1), 2)
        async with reserved(placements) as pool:
            options = pool.options(placements[0], {})
            where = await node_of_bundle.options(scheduling_strategy=options["scheduling_strategy"]).remote()
            ours = visible(pool, placements)
        for other in others:
            ray.kill(other)
        return [device for devices, node in taken if node == where for device in devices], ours

    theirs, ours = asyncio.run(scenario())
    assert len(set(ours)) == 2 and not set(ours) & set(theirs)


def test_too_few_devices_are_refused_at_once_with_what_is_there(joined):
    async def scenario(placements):
        async with asyncio.timeout(10):
            await NodePool(placements).reserve(1800)

    with pytest.raises(ValueError) as error:
        asyncio.run(scenario(placed(tuple(range(8)), 8)))
    assert str(error.value).startswith(
        "device_mapping needs 1 node with 8 GPUs, and Ray has 3 nodes with 4 + 4 + 2 GPUs"
    )
    assert "change device_mapping" in str(error.value)
    with pytest.raises(ValueError, match="needs 4 nodes with 1 \\+ 1 \\+ 1 \\+ 1 GPUs, and Ray has 3 nodes"):
        asyncio.run(scenario(placed((0, 8, 16, 24), 4)))
    with pytest.raises(ValueError, match="the roles on CPU are 40 processes, and Ray has 30 CPUs"):
        asyncio.run(scenario(placed(None, 40)))
    with pytest.raises(ValueError, match="the run has 4 GPUs, 3 replicas more need 12, and Ray has 10 GPUs"):
        NodePool(placed((0, 1, 2, 3), 1)).refuse_more(3, *placed((0, 1, 2, 3), 1))
    with pytest.raises(ValueError, match="the run has 2 CPUs, 999 replicas more need 999, and Ray has 30 CPUs"):
        NodePool(placed(None, 2)).refuse_more(999, placed(None, 1)[0])


def test_devices_in_use_are_waited_for_with_a_line_and_a_deadline_and_the_loop_goes_on(joined, caplog, monkeypatch):
    from roll_async.cluster import node_pool

    monkeypatch.setattr(node_pool, "_SAY_EVERY_S", 0.5)
    caplog.set_level(logging.WARNING)

    async def scenario():
        async with reserved(placed((0, 1, 8, 9), 4)):
            late = NodePool(placed((0, 1, 2, 3, 8, 9, 10, 11), 8))
            ticks = 0
            waiting = asyncio.create_task(late.reserve(2))
            while not waiting.done():
                await asyncio.sleep(0.05)
                ticks += 1
            with pytest.raises(StallError, match="nodes with 4 \\+ 4 GPUs are not free yet: 6 GPUs are, after 2 s"):
                await waiting
            assert ticks > 5, "the loop was held up"
            cancelled = asyncio.create_task(late.reserve(600))
            await asyncio.sleep(0.5)
            cancelled.cancel()  # Ctrl-C while starting
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        async with reserved(placed((0, 1, 2, 3, 8, 9, 10, 11), 8), timeout_s=patient(30)):
            pass  # what was given up holds nothing

    asyncio.run(scenario())
    assert "waiting for 1 s of 2 s (fault.stall_timeout)" in caplog.text


def test_a_cluster_that_can_grow_is_waited_for(joined, caplog):
    """A node of 8 is what its autoscaler may start, and starts when it sees the demand."""
    from ray._private.state import state
    from ray.core.generated import autoscaler_pb2

    group = autoscaler_pb2.NodeGroupConfig(resources={"GPU": 8, "CPU": 100}, min_count=0, max_count=1, name="big")
    config = autoscaler_pb2.ClusterConfig(node_group_configs=[group])
    state._connect_and_get_accessor()
    client = ray._private.worker.global_worker.gcs_client
    caplog.set_level(logging.WARNING)

    def say(text):
        client.internal_kv_put(
            ray._raylet.GCS_AUTOSCALER_CLUSTER_CONFIG_KEY.encode(),
            text,
            True,
            ray._raylet.GCS_AUTOSCALER_STATE_NAMESPACE.encode(),
        )

    async def scenario():
        with pytest.raises(ValueError, match="the roles on CPU are 101 processes, and Ray has 30 CPUs; lower"):
            await NodePool(placed(None, 101)).reserve(1)
        await NodePool(placed(None, 100)).reserve(1)  # nothing to reserve: its processes wait one by one
        pool = NodePool(placed(tuple(range(8)), 8))
        waiting = asyncio.create_task(pool.reserve(patient(120)))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await asyncio.to_thread(joined.node, cpus=8, gpus=8, env={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
        await waiting
        pool.release()

    say(config.SerializeToString())
    try:
        asyncio.run(scenario())
    finally:
        client.internal_kv_del(
            ray._raylet.GCS_AUTOSCALER_CLUSTER_CONFIG_KEY.encode(),
            False,
            ray._raylet.GCS_AUTOSCALER_STATE_NAMESPACE.encode(),
        )
    assert "100 processes, and Ray has 30 CPUs: waiting for the autoscaler (at most 100 CPUs)" in caplog.text
    assert "waiting for the autoscaler (at most 8 GPUs)" in caplog.text


def test_the_node_of_a_machine_that_dies_is_given_another_machine_and_the_devices_of_its_allocation(joined):
    placements = placed((0, 1, 2, 3), 2)

    async def scenario():
        async with reserved(placements) as pool:
            role = Role.options(**pool.options(placements[0], {})).remote()
            _, machine = await role.seen.remote()
            joined.end(joined.of(await role.pid.remote()))
            await until_dead(role)
            again = asyncio.gather(*(pool.settle(placement) for placement in placements))
            await asyncio.wait_for(again, patient(60))
            return machine, visible(pool, placements), await seen_by(pool, placements)

    machine, given, seen = asyncio.run(scenario())
    assert [devices for devices, _ in seen] == given
    assert len({node for _, node in seen}) == 1 and machine not in {node for _, node in seen}
