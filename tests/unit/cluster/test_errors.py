"""What a role raises, as another process reads it. No Ray: `told` is the border, the call around it is in
tests/cluster/test_role_errors.py.
"""

import ast
import asyncio
import pickle
import threading
from pathlib import Path

import pytest

pytest.importorskip("ray")
from roll_async.buffer.errors import EndOfData, Place, RoleFailed, place_of
from roll_async.cluster.errors import _of_role, told
from roll_async.weight_sync.errors import EngineDead, UpdateFailed

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


@told
class Role:
    def __init__(self, error):
        self.error = error

    def now(self):
        raise self.error

    async def later(self):
        raise self.error

    async def grouped(self):
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fail())

    async def _fail(self):
        raise self.error

    def fine(self, *, factor):
        return 2 * factor


def crossed(error, method="now"):
    """The error of a role as it comes out of a pickle."""

    async def ask():
        answer = getattr(Role(error), method)()
        return await answer if asyncio.iscoroutine(answer) else answer

    with pytest.raises(Exception) as raised:
        asyncio.run(ask())
    return pickle.loads(pickle.dumps(raised.value))


@pytest.mark.parametrize("method", ["now", "later", "grouped"])
def test_an_error_that_every_process_can_read_crosses_as_it_is_with_its_place(method):
    error = crossed(EndOfData("no more", leftovers=3), method)
    assert type(error) is EndOfData and error.leftovers == 3
    assert place_of(error).startswith(f"{__file__}:") and type(error.__notes__[0]) is Place
    assert type(crossed(KeyError("x"), method)) is KeyError


def test_an_error_of_any_other_class_crosses_as_text_of_the_nearest_kind():
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
        found = crossed(error)
        assert type(found) is kind and text in str(found) and "test_errors.py:" in place_of(found), repr(found)
    assert len(str(crossed(Local("x" * 5000)))) == 1500


@pytest.mark.parametrize("kind", [EngineDead, UpdateFailed])
def test_what_an_engine_says_of_itself_keeps_its_type_and_gets_the_name_of_the_replica(kind):
    found = _of_role("actor_infer-0", crossed(kind("commit: no room")))
    assert type(found) is kind and str(found) == "actor_infer-0: commit: no room"


def test_an_error_that_ends_several_calls_has_one_place():
    role = Role(ConnectionError("dead"))
    for _ in range(2):
        with pytest.raises(ConnectionError) as raised:
            role.now()
    assert len(raised.value.__notes__) == 1


def test_the_original_stays_the_cause_of_what_is_told_of_it():
    with pytest.raises(RoleFailed) as raised:
        Role(Needs(code=1)).now()
    assert type(raised.value.__cause__) is Needs and Role(None).fine(factor=2) == 4
    assert Role.__name__ == "Role" and Role.fine.__wrapped__


def test_the_place_of_an_error_is_never_a_helper():
    from roll_async.buffer.deadline import within
    from roll_async.buffer.errors import StallError
    from roll_async.cluster.network import listener

    async def late():
        await within(0.01, asyncio.sleep(1), "nothing")

    with pytest.raises(StallError) as raised:
        asyncio.run(late())
    assert place_of(raised.value) == "" and "test_errors.py" in place_of(raised.value, theirs=True)
    with pytest.raises(OSError) as raised:
        listener("203.0.113.1")
    assert place_of(raised.value).startswith("roll_async/cluster/network.py:")


def test_every_role_tells_its_errors():
    for path in (PACKAGE / "cluster").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
            if isinstance(node, ast.ClassDef) and any("ray.remote" in d for d in decorators):
                assert decorators[1:] == ["told"] or decorators[1].startswith("served("), node.name
