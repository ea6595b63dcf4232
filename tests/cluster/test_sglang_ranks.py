"""SGLang's ranks receive a weight update themselves, each its part, as they do on devices: here two ranks over gloo."""

import asyncio

import pytest

pytest.importorskip("transformers")
pytest.importorskip("psutil")

from test_engine_protocol import Replica, tensors_of

from roll_async.inference.protocol import PauseMode
from roll_async.weight_sync.bucket import Bucket
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.digest import of_replica, of_trainer
from roll_async.weight_sync.errors import UpdateFailed
from roll_async.weight_sync.layout import EngineLayout
from roll_async.weight_sync.transfer import open_receiver


@pytest.fixture(scope="module")
def replica(sglang_on_cpu, tmp_path_factory):
    """Two tensor ranks, served weights `old` of version 0. On a CPU the transport is gloo; on devices NCCL or IPC would
    bring the same blocks to the same receivers.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = Replica("sglang", tmp_path_factory.mktemp("model"), tied=False, tensor_parallel_size=2, sleep_level=2)
    made.layout = EngineLayout(tensor=2, num_kv_heads=2)
    made.engine.loads_in_place = lambda plan: True
    yield made
    made.close()
    patch.undo()


def begun(replica, model, version):
    """The sender of a version that a paused engine expects."""

    async def go():
        await replica.engine.pause(PauseMode.ABORT)
        sender = replica.send(tensors_of(replica.models[model]), version, "gloo")
        await replica.engine.begin_update(sender.plan)
        return sender

    return go()


async def load(replica, sender, count=None):
    """Buckets taken in."""
    taken = 0
    while taken != count and (block := await asyncio.to_thread(sender.next_block)) is not None:
        await replica.engine.load_bucket(Bucket(index=taken, blocks=(block,)))
        taken += 1
    return taken


async def serve(replica, model, version):
    """After the update: the engine samples from the model, and says so."""
    await replica.engine.commit(version)
    await replica.engine.resume()
    assert replica.engine.version == version
    request = replica.request(temperature=1.0)
    completion = await replica.engine.generate(request)
    replica.assert_sampled_from(model, request, completion)
    assert completion.version_runs == ((version, len(completion.token_ids)),)


def test_each_rank_takes_its_part_in_and_proves_it_and_both_serve_the_new_weights(replica):
    async def go():
        for version, model in enumerate(("new", "old", "new"), 1):
            sender = await begun(replica, model, version)
            assert await load(replica, sender) > 3
            digest = await replica.engine.finish_update()
            assert digest == of_trainer([sender.sent]) and len(set(digest.split("."))) == 2
            await serve(replica, model, version)

    replica.runner.run(go())


def test_an_update_given_up_halfway_is_never_served_and_the_next_one_is_whole(replica):
    async def go():
        await load(replica, await begun(replica, "old", 11), count=3)
        with pytest.raises(RuntimeError, match="rank 0: RuntimeError: weight update is incomplete"):
            await replica.engine.finish_update()
        with pytest.raises(RuntimeError, match="incomplete"):
            await replica.engine.commit(11)
        with pytest.raises(RuntimeError, match="resume without whole weights"):
            await replica.engine.resume()
        sender = await begun(replica, "new", 12)
        await load(replica, sender)
        assert await replica.engine.finish_update() == of_trainer([sender.sent])
        await serve(replica, "new", 12)

    replica.runner.run(go())


def test_a_rank_whose_sender_is_gone_says_so_and_lives(replica):
    async def go():
        sender = await begun(replica, "old", 21)
        block = sender.next_block()
        sender.close()
        del replica.senders["gloo"]
        with pytest.raises(UpdateFailed, match="SGLang's rank [01]: Connection"):
            await replica.engine.load_bucket(Bucket(index=0, blocks=(block,)))
        sender = await begun(replica, "old", 22)
        await load(replica, sender)
        assert await replica.engine.finish_update() == of_trainer([sender.sent])
        await serve(replica, "old", 22)

    replica.runner.run(go())


def test_its_ranks_relay_what_they_receive_to_those_of_the_next_replica(replica):
    async def go():
        await replica.engine.pause(PauseMode.ABORT)
        sender = replica.send(tensors_of(replica.models["new"]), 25, "gloo")
        plans = sender.plan.chained(["engine", "below"], attempt=1)
        await replica.engine.begin_update(plans["engine"])
        below = [open_receiver(plans["below"], LastExport(), rank=rank) for rank in range(2)]
        taken = 0
        while (block := await asyncio.to_thread(sender.next_block)) is not None:
            bucket = Bucket(index=taken, blocks=(block,))
            reading = (asyncio.to_thread(receiver.take, bucket) for receiver in below)
            await asyncio.gather(replica.engine.load_bucket(bucket), *reading)
            taken += 1
        digest = await replica.engine.finish_update()
        assert digest == of_trainer([sender.sent]) == of_replica(receiver.digest for receiver in below)
        for receiver in below:
            assert receiver._reader._upstream is not None, "it pulled from the trainer"
            receiver.close()
        await serve(replica, "new", 25)

    replica.runner.run(go())


def test_a_replica_that_shares_its_devices_wakes_its_weights_takes_new_ones_in_and_then_wakes_its_cache(replica):
    """The order of a colocated run: the trainer's weights and the cache are never on a device together."""

    async def go():
        engine = replica.engine
        await engine.pause(PauseMode.ABORT)
        await engine.sleep(2)
        with pytest.raises(RuntimeError, match="wake its weights first"):
            await begun(replica, "old", 28)
        await engine.wake(["weights"])
        sender = await begun(replica, "old", 28)
        await load(replica, sender)
        assert await engine.finish_update() == of_trainer([sender.sent])
        await engine.commit(28)
        await engine.wake(["kv_cache"])
        await engine.resume()
        request = replica.request(temperature=1.0)
        replica.assert_sampled_from("old", request, await engine.generate(request))

    replica.runner.run(go())


def test_nobody_takes_weights_into_an_engine_that_runs(replica):
    async def go():
        await replica.engine.resume()
        sender = replica.send(tensors_of(replica.models["new"]), 31, "gloo")
        with pytest.raises(RuntimeError, match="changes the served weights; pause the engine first"):
            await replica.engine.begin_update(sender.plan)

    replica.runner.run(go())
