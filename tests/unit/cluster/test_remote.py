"""Typed calls over a channel that pickles, as Ray's does: what comes back, and what an error still is when it does."""

import ast
import asyncio
import inspect
import pickle
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import pytest

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import Defect, EndOfData, Place, RoleFailed, RoleGone, StallError, place_of
from roll_async.buffer.message_queue import MessageQueue
from roll_async.cluster.remote import CallRules, Crossed, Proxy, calls_of, remote, served
from roll_async.inference.engine import Engine
from roll_async.inference.engine_host import EngineHost
from roll_async.rollout.protocol import RequestTraffic
from roll_async.rollout.remote_side import RolloutCalls, RolloutServer
from roll_async.rollout.rollouter import Rollouter
from roll_async.weight_sync.errors import EngineDead
from roll_async.weight_sync.protocol import TakesWeights
from roll_async.weight_sync.push import ParameterSynchronizer

PACKAGE = Path(__file__).resolve().parents[3] / "roll_async"


class Needs(Exception):
    """Cannot be unpickled: its constructor has a required keyword."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")


class Mute(ValueError):
    def __str__(self):
        raise KeyError("no text")


class Reducer(ConnectionError):
    def __reduce__(self):
        raise OSError("no reduction")


class Calls(Protocol):
    async def double(self, number: int, again: bool = False) -> int: ...

    async def fail(self) -> None: ...

    async def read(self) -> None: ...

    async def wait(self) -> None: ...


class Inside:
    """What the process holds."""

    def __init__(self, error):
        self.error = error

    async def double(self, number, again=False):
        return 2 * number * (1 + again)

    async def fail(self):
        raise self.error

    async def wait(self):
        await asyncio.sleep(100)


@served({"_inside": Calls})
class Host:
    def __init__(self, error=None):
        self._inside = Inside(error)

    async def read(self):
        """A call of its own."""
        try:
            int("x")
        except ValueError as error:
            raise KeyError("outer") from error


class Pickles:
    """A channel to an object of this process."""

    def __init__(self, served, gone=False):
        self.served, self.gone = served, gone

    async def invoke(self, method, *args):
        if self.gone:
            raise RoleGone("killed")
        try:
            return pickle.loads(pickle.dumps(await getattr(self.served, method)(*pickle.loads(pickle.dumps(args)))))
        except Crossed as crossed:
            raise pickle.loads(pickle.dumps(crossed)) from None


def calls(error=None, *, served=None, gone=False, **rules):
    rules = CallRules(**{"role": "rank 3", "deadline_s": 5.0, "own": (EndOfData,), **rules})
    return remote(Calls, Pickles(served or Host(error), gone), rules)


def raised(run, work):
    async def ask():
        with pytest.raises(Exception) as found:
            await work
        return found.value

    return run(ask())


def test_a_call_has_the_parameters_of_its_protocol_by_position_and_by_name(run):
    async def go():
        assert await calls().double(2) == 4 and await calls().double(number=2, again=True) == 8

    run(go())
    assert "unexpected" in str(raised(run, calls().double(2, twice=True))), "here, not in the other process"


def test_an_error_is_the_cause_with_its_type_its_own_cause_and_the_frames_of_the_far_side(run):
    error = raised(run, calls().read())
    assert type(error) is RoleFailed and str(error) == "rank 3: KeyError: 'outer'"
    assert type(error.__cause__) is KeyError and type(error.__cause__.__cause__) is ValueError
    assert place_of(error).endswith("in read") and "test_remote.py:" in place_of(error)
    whole = "".join(traceback.format_exception(error))
    assert 'raise KeyError("outer") from error' in whole and 'int("x")' in whole
    assert "answer of rank 3 to read" in whole and "remote.Crossed" not in whole


@pytest.mark.parametrize("error", [EndOfData("no more", leftovers=3), Defect("ValueError: x"), EngineDead("CUDA")])
def test_errors_that_callers_handle_are_raised_as_they_are(run, error):
    found = raised(run, calls(error, own=(EndOfData, Defect, EngineDead)).fail())
    assert type(found) is type(error) and str(found) == str(error) and vars(found).get("leftovers") in (3, None)


def test_over_two_processes_an_error_keeps_type_causes_place_and_frames(run):
    @served({"_calls": Calls})
    class Between:
        def __init__(self, inner):
            self._calls = inner

    inner = calls(role="actor_infer-0", own=(Exception,))
    error = raised(run, calls(served=Between(inner), own=(Exception,)).read())
    assert type(error) is KeyError and type(error.__cause__) is ValueError and place_of(error).endswith("in read")
    whole = "".join(traceback.format_exception(error))
    assert 'raise KeyError("outer") from error' in whole and "answer of actor_infer-0 to read" in whole


def test_an_error_of_a_class_that_may_not_be_there_crosses_as_text_of_the_nearest_kind(run):
    class Local(Exception):
        pass

    for error, kind, text in (
        (Needs(code=7), RoleFailed, "Needs: code 7"),
        (Local("two\n  lines"), RoleFailed, "two lines"),
        (Mute(), ValueError, "Mute: <exception str() failed>"),
        (Reducer("gone"), ConnectionError, "Reducer: gone"),
        (RuntimeError("holds a lock", threading.Lock()), RoleFailed, "holds a lock"),
        (ValueError("x" * 5000), ValueError, "x" * 5000),
    ):
        found = raised(run, calls(error, own=(Exception,)).fail())
        assert type(found) is kind and text in str(found) and "test_remote.py:" in place_of(found), repr(found)
    assert len(str(raised(run, calls(Local("x" * 5000), own=(Exception,)).fail()))) == 1500


def test_an_error_that_ends_several_calls_collects_no_notes(run):
    error = EngineDead("dead")
    asked = calls(error, own=(EngineDead,))
    notes = [len(raised(run, asked.fail()).__notes__) for _ in range(3)]
    assert notes == [3, 3, 3] and not hasattr(error, "__notes__")
    places = [n for n in raised(run, asked.fail()).__notes__ if type(n) is Place]
    assert len(places) == 1


def test_the_error_that_ends_several_tasks_of_a_call_is_the_first(run):
    class Several(Inside):
        async def fail(self):
            async with asyncio.TaskGroup() as group:
                group.create_task(super().fail())

    host = Host()
    host._inside = Several(TimeoutError("late"))
    assert type(raised(run, calls(served=host, own=(Exception,)).fail())) is TimeoutError


@pytest.mark.parametrize(("starts", "kind"), [((), RoleFailed), ((Calls.fail,), ValueError)])
def test_a_value_error_is_the_users_to_fix_only_where_his_input_is_read(run, starts, kind):
    found = raised(run, calls(ValueError("no such model"), starts=starts).fail())
    assert type(found) is kind and str(found).startswith("rank 3: ") and "no such model" in str(found)
    assert type(found.__cause__) is ValueError


def test_a_dead_process_and_a_late_answer_name_the_role(run):
    assert str(raised(run, calls(gone=True).double(1))) == "rank 3: process is gone (killed)"
    late = raised(run, calls().wait())
    assert type(late) is StallError and str(late) == "rank 3: wait did not return (fault.rpc_timeout) within 5 s"
    assert type(raised(run, calls(late=ConnectionError).wait())) is ConnectionError

    async def patient():
        await calls(waits={Calls.wait}).wait()
        return asyncio.get_running_loop().time()

    assert run(patient()) >= 100


def test_a_proxy_travels_to_another_process(run):
    assert run(pickle.loads(pickle.dumps(calls(waits={Calls.wait}))).double(3)) == 6


def test_a_sub_class_answers_itself_what_it_defines(run):
    class Client(Proxy, Calls):
        async def double(self, number, again=False):
            return await self._call("double", number + 1)

    client = Client(Pickles(Host()), CallRules(role="engine", deadline_s=None))
    assert run(client.double(1)) == 4 and type(raised(run, client.read())) is RoleFailed


def roles_inside():
    queue, rollouter = object.__new__(MessageQueue), object.__new__(Rollouter)
    synchronizer = object.__new__(ParameterSynchronizer)
    side = SimpleNamespace(queue=queue, rollouter=rollouter, synchronizer=synchronizer, validate=None)
    return RolloutServer(side)


TARGETS = [(RequestTraffic, EngineHost), (TakesWeights, Engine), (RolloutCalls, roles_inside())]
"""Protocol, and the class or the object that answers its calls in the process."""


def test_what_answers_a_call_of_a_reward_host_has_its_parameters():
    pytest.importorskip("ray")
    pytest.importorskip("transformers")
    from roll_async.cluster.roles.reward_group import RewardCalls, RewardHost

    inside = RewardHost.__ray_metadata__.modified_class
    test_what_answers_a_call_has_its_parameters(RewardCalls, inside)


def test_what_answers_a_call_of_a_rank_has_its_parameters():
    pytest.importorskip("ray")
    pytest.importorskip("megatron.core")
    from roll_async.cluster.roles.trainer_group import WorkerCalls
    from roll_async.trainer.megatron.worker import MegatronWorker

    test_what_answers_a_call_has_its_parameters(WorkerCalls, MegatronWorker)


@pytest.mark.parametrize(("protocol", "target"), TARGETS)
def test_what_answers_a_call_has_its_parameters(protocol, target):
    for name in calls_of(protocol):
        given = [p for p in inspect.signature(getattr(protocol, name)).parameters if p != "self"]
        answers = [p for p in inspect.signature(getattr(target, name)).parameters.values() if p.name != "self"]
        assert [p.name for p in answers][: len(given)] == given, f"{target}.{name}"
        further = answers[len(given) :]
        assert all(p.default is not p.empty for p in further), f"{target}.{name} wants more than is sent"


def test_the_place_of_an_error_is_never_a_helper():
    from roll_async.cluster.network import listener

    async def late():
        await within(0.01, asyncio.sleep(1), "nothing")

    with pytest.raises(StallError) as raised:
        asyncio.run(late())
    assert place_of(raised.value) == "" and "test_remote.py" in place_of(raised.value, theirs=True)
    with pytest.raises(OSError) as raised:
        listener("203.0.113.1")
    assert place_of(raised.value).startswith("roll_async/cluster/network.py:")


def test_every_role_tells_its_errors():
    for path in (PACKAGE / "cluster").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
            if isinstance(node, ast.ClassDef) and any("ray.remote" in d for d in decorators):
                assert decorators[1].startswith("served("), node.name
