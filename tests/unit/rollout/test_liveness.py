"""Silence heals in seconds, whatever the time-outs: a silent replica, a hung core, a lost reply."""

import asyncio
import traceback
from dataclasses import replace

import pytest

from roll_async.buffer.errors import Defect
from roll_async.inference.protocol import Progress
from roll_async.schema import FinishReason
from roll_async.weight_sync.errors import EngineDead
from tests.unit.conftest import piece

WHOLE = [1003 + i for i in range(10)]
PATIENT = {"generation_timeout_s": 3600.0, "silence_s": 30.0}


def now():
    return asyncio.get_running_loop().time()


@pytest.fixture
def telling(replica_class):
    """As an engine host: running requests are told of every 5 s, and the load names what is held."""

    class Telling(replica_class):
        lost_replies = 0

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.counts = {}

        async def collect(self):
            while not (self._done or self._failed or self.told or self._dead):
                try:
                    async with asyncio.timeout(5.0):
                        return await super().collect()
                except TimeoutError:
                    self.tell()
            self._news.set()
            return await super().collect()

        def tell(self):
            for request_id, (tokens, _) in self._texts.items():
                start, self.counts[request_id] = self.counts.get(request_id, 0), len(tokens)
                if len(tokens) > start and not self.silent:
                    part = piece(request_id, tokens[start:], [0] * (len(tokens) - start), FinishReason.ABORT)
                    self.told.append(Progress(start=start, piece=part))

        def reply(self, completion):
            if self.lost_replies:
                self.lost_replies -= 1
            elif not self.silent:
                super().reply(completion)

        def _load(self):
            ended = (c.request_id for c in self._done)
            return replace(super()._load(), held=frozenset((*self._tasks, *ended)))

    return Telling


@pytest.mark.parametrize("kind", ["silent", "hung"])
def test_requests_of_a_silent_replica_go_on_elsewhere_and_the_second_time_it_is_lost(
    run, telling, make, managed, start, kind
):
    async def go():
        bad, good = telling("bad"), telling("good")
        async with managed(bad, good, max_concurrent_per_server=4, **PATIENT) as manager:
            if kind == "hung":
                bad._serving.clear()  # its front end answers load and abort, its core computes nothing
            tasks = start(manager, [make(f"r{i}") for i in range(8)])
            await asyncio.sleep(1)
            if kind == "silent":
                bad.lost_replies = 10**6  # it works, and nothing of it arrives
                bad.tell = lambda: None
            assert all(list(c.token_ids) == WHOLE for c in await asyncio.gather(*tasks))
            assert now() < 60 and manager.stats().retried == 4
            assert len(bad.aborted) == (4 if kind == "hung" else 0), "nothing runs there that nobody waits for"
            if kind == "silent":
                return  # what failed there avoids it, and what comes later is missed again after two heartbeats
            more = start(manager, [make(f"s{i}", tokens=200) for i in range(8)])
            while manager.num_servers == 2:
                await asyncio.sleep(1)
                assert now() < 120
                running = [r for r in bad.submitted if r.request_id.startswith("s")]
                assert len(running) <= 1, "a suspect gets one request to show that it works"
            assert all(len(c.token_ids) == 200 for c in await asyncio.gather(*more))

    run(go())


def test_requests_of_a_hung_core_do_not_wait_for_it_to_end_them(run, telling, make, managed, start):
    """Its front end acknowledges the abort, and nothing ever comes of it."""

    class Hung(telling):
        async def abort(self, request_ids):
            self.aborted += request_ids

    async def go():
        hung = Hung("hung")
        async with managed(hung, telling("good"), max_concurrent_per_server=4, **PATIENT) as manager:
            hung._serving.clear()
            tasks = start(manager, [make(f"r{i}") for i in range(8)])
            assert all(list(c.token_ids) == WHOLE for c in await asyncio.gather(*tasks))
            assert now() < 1.6 * PATIENT["silence_s"], "not only when it is found to be lost"

    run(go())


def test_a_suspect_that_generates_again_is_one_no_more(run, telling, make, managed, start):
    async def go():
        slow, good = telling("slow"), telling("good")
        async with managed(slow, good, max_concurrent_per_server=2, **PATIENT) as manager:
            slow._serving.clear()
            tasks = start(manager, [make(f"r{i}") for i in range(4)])
            await asyncio.sleep(40)
            slow._serving.set()
            tasks += start(manager, [make(f"s{i}", tokens=30) for i in range(6)])
            assert all([c.token_ids for c in await asyncio.gather(*tasks)])
            assert manager.num_servers == 2 and slow.peak == 2 and len(slow.submitted) > 4

    run(go())


def test_long_answers_of_a_replica_that_tells_of_them_are_left_alone(run, telling, make, managed, start):
    async def go():
        async with managed(telling("a"), **PATIENT) as manager:
            (task,) = start(manager, [make(tokens=1000)])
            assert len((await task).token_ids) == 1000
            assert manager.stats().retried == 0 and now() == pytest.approx(1000, abs=1)

    run(go())


def test_a_lost_reply_is_missed_after_two_heartbeats_though_its_replica_works(run, telling, make, managed, start):
    async def go():
        flaky, other = telling("flaky"), telling("other")
        async with managed(flaky, other, **PATIENT) as manager:
            long = start(manager, [make(f"long{i}", tokens=100) for i in range(2)])
            flaky.lost_replies = 1
            tasks = start(manager, [make(f"r{i}") for i in range(2)])
            assert all(list(c.token_ids) == WHOLE for c in await asyncio.gather(*tasks))
            assert now() < 40 and manager.stats().retried == 1
            assert all(len(c.token_ids) == 100 for c in await asyncio.gather(*long))

    run(go())


def test_a_load_says_nothing_of_requests_that_came_after_it_was_asked_for(run, telling, make, managed, start):
    class Slow(telling):
        """What it holds is looked up at once, the answer takes 3 s; a reply is on its way for 4 s."""

        async def load(self):
            held = await super().load()
            await asyncio.sleep(3)
            return held

        def reply(self, completion):
            asyncio.get_running_loop().call_later(4, super().reply, completion)

    async def go():
        async with managed(Slow("slow"), **PATIENT) as manager:
            await asyncio.sleep(6)
            (task,) = start(manager, [make(tokens=6)])
            assert len((await task).token_ids) == 6
            assert now() == pytest.approx(6 + 6 + 4) and manager.stats().retried == 0

    run(go())


def test_a_load_says_nothing_of_requests_that_have_not_arrived(run, telling, make, managed, start):
    class Far(telling):
        async def submit(self, requests):
            await asyncio.sleep(17)
            await super().submit(requests)

    async def go():
        async with managed(Far("far"), **PATIENT) as manager:
            (task,) = start(manager, [make()])
            assert list((await task).token_ids) == WHOLE
            assert now() == pytest.approx(17 + 10) and manager.stats().retried == 0

    run(go())


def test_an_abort_that_nobody_asked_for_is_a_failure_of_its_replica(run, replica_class, make, managed, start):
    async def go():
        spoiled, good = replica_class("spoiled"), replica_class("good")
        async with managed(spoiled, good, max_concurrent_per_server=8) as manager:
            (task,) = start(manager, [make("r")])
            await asyncio.sleep(0.5)
            await spoiled.abort(["r#1"])
            assert list((await task).token_ids) == WHOLE
            assert [r.request_id for r in good.submitted] == ["r#2"], "the least busy one is the one that failed it"

    run(go())


@pytest.mark.parametrize("call", ["submit", "collect", "abort"])
def test_the_death_of_one_replica_is_its_own_end_and_not_the_runs(
    run, replica_class, make, managed, start, call, caplog
):
    class Broken(replica_class):
        async def fail(self, *args):
            raise EngineDead("CUDA error: an illegal memory access")

    async def go():
        broken, good = Broken("broken"), replica_class("good")
        async with managed(broken, good) as manager:
            watch = asyncio.create_task(manager.wait_failed())
            tasks = start(manager, [make(f"r{i}") for i in range(4)])
            await asyncio.sleep(1.5 if call != "submit" else 0)
            if call == "collect":
                broken.collect = broken.fail
                broken.tell()  # the call under way returns, the next one raises
            else:
                setattr(broken, call, broken.fail)
            await asyncio.sleep(1)
            if call == "abort":
                await manager.abort(["r0"])
            done = await asyncio.gather(*tasks)
            assert [len(c.token_ids) for c in done].count(10) >= 3 and not watch.done()
            assert "engine broken is lost: CUDA error" in caplog.text

    run(go())


@pytest.mark.parametrize("call", ["submit", "collect", "abort", "load", "pause"])
def test_a_bug_in_a_client_ends_the_run_with_its_line_and_loses_no_replica(
    run, replica_class, make, managed, start, call
):
    class Faulty(replica_class):
        async def fail(self, *args):
            return int("x")

    async def go():
        faulty = Faulty("faulty")
        async with managed(faulty, replica_class("good"), interrupt_timeout_s=20.0) as manager:
            if call != "collect":
                setattr(faulty, call, faulty.fail)
            watch = asyncio.create_task(manager.wait_failed())
            tasks = start(manager, [make(f"r{i}", tokens=100) for i in range(4)])
            await asyncio.sleep(1.5)
            if call == "collect":
                faulty.collect = faulty.fail
                faulty.tell()
            asked = {"abort": lambda: manager.abort(["r0"]), "pause": lambda: manager.interrupt("resume", 10.0)}
            if call in asked:  # whoever asked gets it: an abort of a group, a weight push
                with pytest.raises(ValueError) as raised:
                    await asked[call]()
                error = raised.value
            else:
                ended = await asyncio.gather(watch, *tasks, return_exceptions=True)
                assert all(type(one) is Defect for one in ended), "nobody waits for ever for an answer"
                error = ended[0].__cause__
            assert type(error) is ValueError and "invalid literal" in str(error)
            assert traceback.extract_tb(error.__traceback__)[-1].line == 'return int("x")'
            assert manager.stats().lost_servers == 0 and manager.num_servers == 2 and now() < 8
            watch.cancel()
            for task in tasks:
                task.cancel()

    run(go())
