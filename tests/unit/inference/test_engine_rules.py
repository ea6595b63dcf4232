"""The rules of the engine base, over a library of the test: what runs when, and which weights are served."""

import asyncio
from array import array
from dataclasses import replace

import pytest

from roll_async.config.engine_traits import ENGINE_TRAITS
from roll_async.inference.engine import Engine, Tokens
from roll_async.inference.protocol import EngineLoad, EngineMemory, PauseMode
from roll_async.inference.settings import EngineSettings
from roll_async.schema import FinishReason, GenerateRequest, Image, SamplingParams
from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.errors import EngineDead, UpdateFailed

STAGED, IN_PLACE = (UpdatePlan(version=1, transport=transport, verify="none") for transport in ("shm", "nccl"))
BUCKET = Bucket(index=0, blocks=())


class Library(Engine):
    """Requests end when they are aborted. `fails`: what a hook raises, by its name."""

    traits = ENGINE_TRAITS["hf_infer"]

    def __init__(self, **settings):
        super().__init__(
            EngineSettings(model_folder="m", dtype="fp32", device="cpu", max_model_len=64, sleep_level=2, **settings)
        )
        self.calls, self.fails = [], {}

    def _called(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    async def start(self):
        self._called("start")

    async def close(self):
        await self._end(self._tickets.values())

    async def _generate(self, ticket):
        self._called("generate")
        await ticket.aborted.wait()
        return self._completion(ticket, Tokens(array("i"), array("f"), ()), FinishReason.ABORT)

    async def _score(self, token_ids):
        return array("f", [0.0] * (len(token_ids) - 1))

    def _so_far(self, ticket, start):
        return None

    def decode(self, token_ids):
        return ""

    async def _abort(self, tickets):
        self._called("abort")

    async def _halt(self, mode, tickets):
        self._called("halt")
        for ticket in tickets:
            ticket.aborted.set()

    async def _begin(self, plan):
        self._called("begin")

    async def _take_in(self, bucket):
        self._called("take")

    async def _digest(self):
        self._called("digest")
        return "d"

    def _need_whole_update(self):
        self._called("need_whole")

    async def _swap(self, version):
        self._called("swap")

    async def _drop(self):
        self._called("drop")

    async def _release(self, level):
        self._called("release")

    async def _restore(self, tags):
        self._called("restore")

    def memory(self):
        return EngineMemory(weights_bytes=0, kv_cache_bytes=0)

    def load(self):
        return self._load_report(0, None, 64)


def request(name="r"):
    return GenerateRequest(
        request_id=name, prompt_token_ids=array("i", [1, 2]), sampling=SamplingParams(max_new_tokens=4)
    )


async def update(engine, version=1, plan=STAGED):
    await engine.begin_update(plan)
    await engine.load_bucket(BUCKET)
    await engine.finish_update()
    await engine.commit(version)


def test_a_request_that_waits_is_ended_by_its_abort_alone_and_never_reaches_the_library():
    async def go():
        engine = Library()
        await engine.pause(PauseMode.ABORT)
        task = asyncio.ensure_future(engine.generate(request()))
        await asyncio.sleep(0)
        assert engine.load() == EngineLoad(running=0, waiting=1, free_kv_fraction=1 - 6 / 64)
        await engine.abort(["r", "unknown"])
        assert task.done() and task.result().finish_reason is FinishReason.ABORT
        assert engine.calls == ["halt"] and engine.load().waiting == 0

    asyncio.run(go())


def test_a_request_with_images_is_refused_where_the_model_would_answer_without_them():
    async def go():
        engine = Library()
        with pytest.raises(ValueError, match="request r has images, which this model is not shown; use hf_infer"):
            await engine.generate(replace(request(), images=(Image(data=b"", grid=(1, 1)),)))
        assert engine.calls == [] and engine.load().waiting == 0

    asyncio.run(go())


def test_a_pause_that_follows_a_resume_at_once_holds_what_waited():
    async def go():
        engine = Library()
        await engine.pause(PauseMode.ABORT)
        task = asyncio.ensure_future(engine.generate(request()))
        await asyncio.sleep(0)
        await engine.resume()
        await engine.pause(PauseMode.ABORT)
        for _ in range(5):
            await asyncio.sleep(0)
        assert "generate" not in engine.calls and not task.done()
        await engine.resume()
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.calls[-1] == "generate"
        await engine.abort(["r"])
        assert (await task).finish_reason is FinishReason.ABORT

    asyncio.run(go())


def test_a_begin_that_fails_leaves_a_mixture_where_weights_are_loaded_in_place():
    async def go(plan):
        engine = Library()
        engine.fails["begin"] = ConnectionResetError("the trainer hung up")
        await engine.pause(PauseMode.ABORT)
        with pytest.raises(UpdateFailed, match="begin_update: ConnectionResetError: the trainer hung up"):
            await engine.begin_update(plan)
        with pytest.raises(RuntimeError, match="load_bucket without begin_update"):
            await engine.load_bucket(BUCKET)
        if plan is IN_PLACE:
            with pytest.raises(RuntimeError, match="resume without whole weights"):
                await engine.resume()
            engine.fails.clear()
            await update(engine, plan=plan)
        await engine.resume()

    for plan in (STAGED, IN_PLACE):
        asyncio.run(go(plan))


def test_a_commit_that_fails_before_its_first_tensor_changes_nothing_and_a_later_one_refuses_to_serve():
    async def go(hook):
        engine = Library()
        await engine.pause(PauseMode.ABORT)
        engine.fails[hook] = RuntimeError("incomplete")
        with pytest.raises(UpdateFailed, match="commit: incomplete"):
            await update(engine)
        assert engine.version == 0
        if hook == "swap":
            with pytest.raises(RuntimeError, match="resume without whole weights"):
                await engine.resume()
        engine.fails.clear()
        await update(engine, version=2)
        await engine.resume()
        assert engine.version == 2
        with pytest.raises(RuntimeError, match="commit without begin_update"):
            await engine.commit(3)

    for hook in ("need_whole", "swap"):
        asyncio.run(go(hook))


def test_weights_change_only_while_the_engine_is_paused():
    async def go():
        engine = Library()
        with pytest.raises(RuntimeError, match="over nccl changes the served weights; pause the engine first"):
            await engine.begin_update(IN_PLACE)
        await engine.begin_update(STAGED)
        with pytest.raises(RuntimeError, match="commit on a running engine; pause it first"):
            await engine.commit(1)
        assert "swap" not in engine.calls and engine.version == 0
        with pytest.raises(ValueError, match="interrupt.mode keep is not possible with hf_infer; use resume"):
            await engine.pause(PauseMode.KEEP)

    asyncio.run(go())


def test_an_engine_without_weights_serves_after_its_first_commit():
    async def go():
        engine = Library(random_weights=True)
        assert engine.version is None
        with pytest.raises(RuntimeError, match="resume without whole weights"):
            await engine.resume()
        await update(engine)
        await engine.resume()
        assert engine.version == 1

    asyncio.run(go())


def test_sleep_drops_an_update_first_and_weights_of_level_2_are_those_of_the_next_commit():
    async def go():
        engine = Library()
        await engine.pause(PauseMode.ABORT)
        await engine.begin_update(STAGED)
        await engine.sleep(2)
        assert engine.calls[-2:] == ["drop", "release"], "it would write into released memory"
        for refused in (engine.generate(request()), engine.resume(), engine.begin_update(STAGED), engine.commit(1)):
            with pytest.raises(RuntimeError, match="asleep"):
                await refused
        await engine.wake(["weights"])
        await engine.wake(["weights"])
        assert engine.calls.count("restore") == 1, "it is awake"
        with pytest.raises(RuntimeError, match="load_bucket without begin_update"):
            await engine.load_bucket(BUCKET)
        await engine.wake(["kv_cache"])
        with pytest.raises(RuntimeError, match="resume without whole weights"):
            await engine.resume()
        await update(engine)
        await engine.resume()

    asyncio.run(go())


def test_a_device_that_fails_is_the_death_of_an_engine_that_computes_in_its_own_process():
    torch = pytest.importorskip("torch")
    from roll_async.inference.hf.engine import HfEngine

    engine = HfEngine(EngineSettings(model_folder="m", dtype="fp32", device="cpu", max_model_len=64))
    with pytest.raises(EngineDead, match="an illegal memory access"), engine._library():
        raise torch.AcceleratorError("an illegal memory access")
    with pytest.raises(RuntimeError, match="a fault of ours"), engine._library():
        raise RuntimeError("a fault of ours")


def test_a_library_that_is_dead_is_no_failed_update():
    async def go():
        engine = Library()
        engine.fails["begin"] = EngineDead("gone")
        with pytest.raises(EngineDead, match="gone"):
            await engine.begin_update(STAGED)

    asyncio.run(go())


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_answer_whose_log_probs_are_no_numbers_is_a_failure_of_its_request(value):
    class Broken(Library):
        async def _generate(self, ticket):
            tokens = Tokens(array("i", [1, 2]), array("f", [-1.0, value]), ((0, 2),))
            self.told = self.progress(ticket.request.request_id, 0)
            return self._completion(ticket, tokens, FinishReason.STOP)

        def _so_far(self, ticket, start):
            return Tokens(array("i", [1]), array("f", [value]), ((0, 1),))

    async def go():
        engine = Broken()
        await engine.start()
        with pytest.raises(ArithmeticError, match="log-probs of version 0 that are no numbers"):
            await engine.generate(request())
        assert engine.told is None, "nothing of it is kept for another attempt"

    asyncio.run(go())
