"""An SGLang replica whose second rank is on another node: pushes reach both, and when a rank ends, the requests fail
and the process around them does not.
"""

import asyncio
import multiprocessing as mp
import os
import signal
from dataclasses import replace

import pytest

pytest.importorskip("transformers")
psutil = pytest.importorskip("psutil")

from test_engine_protocol import Replica, save_tokenizer, tiny_model
from test_sglang_ranks import begun, load, serve

from roll_async.cluster.network import held_port
from roll_async.inference.backends import create_follower
from roll_async.inference.settings import EngineSettings, NodeSpan
from roll_async.weight_sync.digest import of_trainer
from roll_async.weight_sync.errors import EngineDead
from roll_async.weight_sync.layout import EngineLayout
from tests.patience import patient

HOST = "127.0.0.1"


def _follow(settings, told):
    follower = create_follower("sglang", settings)
    follower.start()
    told.put([child.pid for child in psutil.Process().children() if child.name().startswith("sglang")])
    follower.wait()
    told.put("a rank has ended")


@pytest.fixture
def port():
    with held_port(HOST) as port:
        yield port


def test_pushes_reach_the_rank_on_the_other_node_and_its_end_fails_the_requests(
    sglang_on_cpu, tmp_path, port, monkeypatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    tiny_model(1, tied=False).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    span = NodeSpan(num_nodes=2, node_rank=0, master_addr=HOST, master_port=port)
    changes = {"tensor_parallel_size": 2}
    spawn = mp.get_context("spawn")
    told = spawn.Queue()
    settings = EngineSettings(
        model_folder=str(tmp_path), dtype="fp32", device="cpu", max_model_len=512, max_running=64, seed=7,
        span=replace(span, node_rank=1), **changes,
    )  # fmt: skip
    follower = spawn.Process(target=_follow, args=(settings, told))
    follower.start()
    try:
        replica = Replica("sglang", tmp_path, tied=False, span=span, **changes)

        async def go():
            for version, model in enumerate(("new", "old"), 1):
                await replica.push(model, version)
                request = replica.request(temperature=1.0)
                completion = await replica.engine.generate(request)
                assert len(completion.token_ids) > 1
                assert [run[0] for run in completion.version_runs] == [version]
                replica.assert_sampled_from(model, request, completion)

        replica.runner.run(go())

        async def both_ranks_receive_themselves():
            replica.layout, replica.engine.loads_in_place = EngineLayout(tensor=2, num_kv_heads=2), lambda plan: True
            sender = await begun(replica, "new", 3)
            await load(replica, sender)
            assert await replica.engine.finish_update() == of_trainer([sender.sent])
            await serve(replica, "new", 3)

        replica.runner.run(both_ranks_receive_themselves())
        (rank,) = told.get(timeout=patient(10))

        async def lose_the_rank():
            (task,) = replica.start(replica.request(max_new_tokens=480))
            await asyncio.sleep(0.3)
            os.kill(rank, signal.SIGKILL)
            with pytest.raises(EngineDead, match="process of SGLang has failed"):
                await asyncio.wait_for(task, patient(30))
            with pytest.raises(EngineDead):
                await replica.engine.generate(replica.request())

        replica.runner.run(lose_the_rank())
        assert told.get(timeout=patient(30)) == "a rank has ended"
        replica.close()
    finally:
        if follower.is_alive():
            follower.kill()
        follower.join()
