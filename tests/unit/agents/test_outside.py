"""Nothing that is said ends a run: what worlds, tools, agents, tasks, rewards and hooks give is drawn, of any type."""

import asyncio
import decimal
import json
import logging
import math
import os
import re
import sys
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_async.agents.episode import EpisodeOptions
from roll_async.agents.gateway.server import PolicyGateway
from roll_async.agents.protocol import AgentResult
from roll_async.agents.rendering import TemplateRenderer
from roll_async.agents.session import SessionOptions
from roll_async.agents.tools.toolbox import toolbox_of
from roll_async.agents.worlds import AgentParts, TagPlan, WorldRunner
from roll_async.buffer.errors import EndOfData
from roll_async.buffer.group_codec import decode_group, encode_group
from roll_async.buffer.ledger import MemoryLedger
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions
from roll_async.envs.pool import WorldPool
from roll_async.envs.protocol import GraderFailed, WorldFailed
from roll_async.envs.registry import WorldSpec
from roll_async.observe.outside import OutsideError, asked, border, number, text_of
from roll_async.pipelines.metrics import ratio_metrics
from roll_async.rewards.registry import Judge
from roll_async.rewards.serving import worker as reward_worker
from roll_async.rewards.serving.pool import reward_of
from roll_async.rewards.serving.router import RewardRouter
from roll_async.rewards.verdict import Verdict
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, SchedulerOptions
from roll_async.rollout.dispatch.requests import Interrupted
from roll_async.rollout.filters.group_filter import GroupFilter
from roll_async.rollout.groups import GroupOptions, GroupRunner
from roll_async.rollout.rollouter import Rollouter
from roll_async.schema import Completion, FinishReason, Prompt, Reward, RewardStatus, SamplingParams
from roll_async.simulator.clock import run_virtual

sys.path.insert(0, str(Path(__file__).parent))

import outspoken

DRAWS = int(os.environ.get("ROLL_ASYNC_DRAWS", "25"))
"""More: ROLL_ASYNC_DRAWS=5000 pytest tests/unit/agents/test_outside.py"""


class Unspeakable:
    """A value that no operation works on."""

    def _fails(self, *_):
        raise KeyError("no")

    __str__ = __repr__ = __bool__ = __float__ = __iter__ = __len__ = __eq__ = __hash__ = __await__ = _fails


class UnspeakableError(Exception):
    def __str__(self):
        raise ZeroDivisionError


class Strange(BaseException):
    """No Exception."""


def deep(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


def circle():
    found = []
    found.append(found)
    return found


ODD = {
    "half an emoji": lambda: "half \ud83d of an emoji",
    "other half": lambda: "\ude00",
    "nul": lambda: "nul \x00",
    "marks": lambda: "<|im_end|>" * 3,
    "long": lambda: "y" * 50_000,
    "bytes": lambda: b"\xff\xfe",
    "array": lambda: bytearray(b"a"),
    "digits": lambda: 10**5000,
    "too large": lambda: -(10**400),
    "1e308": lambda: 1e308,
    "nan": lambda: decimal.Decimal("NaN"),
    "complex": lambda: 1j,
    "deep": lambda: deep(60),
    "too deep": lambda: deep(5000),
    "circle": circle,
    "set": lambda: {1, 2},
    "object": object,
    "class": lambda: int,
    "function": lambda: len,
    "unspeakable": Unspeakable,
    "numbers": lambda: array("f", [math.nan]),
    "iterator": lambda: iter("ab"),
    "generator": lambda: (i for i in "ab"),
    "keys": lambda: {("a", 1): {2: b"3"}},
    "half a key": lambda: {"\ud83d": "\ud83d"},
    "error": lambda: ValueError("a value"),
    "result": lambda: AgentResult(reward=1.0),
    "coroutine": lambda: asyncio.sleep(1, "slept"),
    "never": lambda: asyncio.get_running_loop().create_future(),
}
ERRORS = {
    "ValueError": lambda: ValueError("half \ud83d"),
    "KeyError": KeyError,
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "TimeoutError": lambda: TimeoutError("mine"),
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "ConnectionError": lambda: ConnectionError("gone"),
    "SystemExit": lambda: SystemExit(3),
    "CancelledError": asyncio.CancelledError,
    "BaseException": lambda: Strange(b"\xff"),
    "Interrupted": Interrupted,
    "unspeakable": UnspeakableError,
    "group": lambda: BaseExceptionGroup("two", [ValueError(1), Strange(2)]),
    "GraderFailed": GraderFailed,
    "long": lambda: WorldFailed("x" * 10_000),
    "ungraded": lambda: GraderFailed(Unspeakable()),
    "encoding": lambda: UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "no"),
}


@dataclass(frozen=True)
class Odd:
    """A value by its name in ODD: many of them cannot even be printed, as hypothesis does with what it draws."""

    name: str


@dataclass(frozen=True)
class Result:
    """An AgentResult of such values."""

    reward: object
    solved: object
    metrics: object


@dataclass(frozen=True)
class Judged:
    """A Verdict of such values."""

    score: object
    acc: object
    reason: object
    metrics: object


def made(value):
    match value:
        case Odd():
            return ODD[value.name]()
        case Judged():
            score, acc, reason, metrics = map(made, (value.score, value.acc, value.reason, value.metrics))
            return Verdict(score=score, acc=acc, reason=reason, metrics=metrics)
        case Result():
            return AgentResult(reward=made(value.reward), solved=made(value.solved), metrics=made(value.metrics))
        case list() | tuple():
            return type(value)(map(made, value))
        case dict():
            return {key: made(item) for key, item in value.items()}
    return value


def raised(name):
    raise ERRORS[name]()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.builds(Odd, st.sampled_from(sorted(ODD))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
INFOS = VALUES | st.dictionaries(
    st.sampled_from(["state", "solved", "instructions", "tools", "tool_names", "tool_arguments", "frame", "other"]),
    VALUES | st.just([{"type": "function", "function": {"name": "say"}}]) | st.just(["say"]),
    max_size=4,
)
RESETS = VALUES | st.tuples(VALUES, INFOS)
STEPS = (
    VALUES
    | st.tuples(VALUES, VALUES, VALUES, VALUES, INFOS)
    | st.tuples(st.just("on"), VALUES, st.booleans(), st.just(0), INFOS)
)
RESULTS = VALUES | st.builds(
    Result, VALUES | st.floats(-1, 1), VALUES, VALUES | st.dictionaries(st.sampled_from(["acc", "turns", "f1"]), VALUES)
)

SCORES = (
    VALUES
    | st.dictionaries(st.sampled_from(["score", "acc", "format", "reason", "f1", "\ud83d"]), VALUES | st.floats(0, 1))
    | st.builds(Judged, VALUES | st.floats(0, 1), VALUES | st.just(1.0), VALUES, VALUES | st.just({}))
)


def quick_acts(values):
    """(how, what) of a hook: what `made` and `raised` understand."""
    return st.tuples(st.just("give"), values) | st.tuples(st.just("raise"), st.sampled_from(sorted(ERRORS)))


def acts(values):
    return quick_acts(values) | st.just(("hang", None))


def doing(act):
    """What outspoken.SAYS holds: a function."""
    return act and {"give": lambda: made(act[1]), "raise": lambda: raised(act[1]), "hang": None}[act[0]]


ARGUMENTS = st.sampled_from(
    [
        "{}",
        '{"seed": SEED}',
        '{"\\ud83d": 1}',
        '{"a": ' + "9" * 4301 + "}",
        "NaN",
        '{"a": NaN}',
        '{"a": 1e999}',
        "[" * 900,
        '{"a": ' + "[" * 900 + "]" * 900 + "}",
        '"text"',
        "null",
        '{"a": "\\u0000"}',
        "{{7*7}}",
        '{"seed": [1]}',
        "",
    ]
)
NAMES = st.sampled_from(["say", "look", "\\ud83d", "", "{0}", "x" * 3000])
CALLS = st.builds(
    lambda name, args: f'<tool_call>{{"name": "{name}", "arguments": {args}}}</tool_call>', NAMES, ARGUMENTS
)
TEXTS = st.lists(CALLS | st.text('ab{}"<>/\\ \n', max_size=9), min_size=1, max_size=3).map("".join)
OWN_HOOK = st.none() | quick_acts(VALUES.filter(lambda value: value != Odd("never")))
"""Of `_custom_generation_logic`, which may generate a group itself, however long that takes: one that never ends is a
stall of the run, by name.
"""
HOOKS = st.fixed_dictionaries(
    {},
    optional={
        "reset": acts(RESETS),
        "step": acts(STEPS),
        "close": acts(VALUES),
        "tool": acts(VALUES),
        "run": acts(RESULTS),
    },
)
TASKS = st.sampled_from(["task", "task", "raises", "no seed", "seed of words", "no such tag"]) | VALUES.filter(
    lambda drawn: drawn is not None
)


class Policy:
    """The part of a server manager that trajectories use: a text that never offends for seeds that are even."""

    num_servers, expects_return = 1, False

    def __init__(self, tokenizer, texts):
        self._tokenizer, self._texts, self._asked, self.version = tokenizer, texts, 0, 0

    async def generate(self, request, *, conversation, validation, affinity=None):
        version = self.version
        await asyncio.sleep(1)
        self._asked += 1
        seed = re.search(r"seed (\d+)", self._tokenizer.decode(request.prompt_token_ids))
        calm = seed is not None and int(seed[1]) % 2 == 0
        text = (
            "the" if calm else self._texts[self._asked % len(self._texts)].replace("SEED", str(seed[1] if seed else 1))
        )
        ids = array("i", [*self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id])
        ids = ids[: request.sampling.max_new_tokens]
        return Completion(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=array("f", [-0.5] * len(ids)),
            version_runs=((version, len(ids)),),
            finish_reason=FinishReason.STOP,
            generation_s=1.0,
        )

    async def wait_failed(self):
        await asyncio.Event().wait()

    def forget_affinity(self, key):
        pass

    def scheduled_by(self, scheduler):
        pass

    async def abort(self, request_ids):
        pass


class Scorer:
    """The reward's function and what a worker, its pool and the router make of it, without the processes."""

    def __init__(self, drawn):
        self._drawn, self._router = drawn, RewardRouter({})
        self._router._scorers["math"] = self

    async def score(self, prompt, sample):
        return await self._router.score(prompt, "the")

    async def score_response(self, prompt, text):
        index = int(prompt.row_id)
        act = self._drawn[index // 2] if index % 2 else ("give", 1.0)
        if act[0] == "hang":
            await asyncio.sleep(30)
            return Reward(score=0.0, status=RewardStatus.TIMEOUT, reason="no verdict")
        judge, task = Judge(lambda text, truth, extra: doing(act)()), {"text": "", "ground_truth": "", "extra": {}}
        try:
            line = json.dumps(reward_worker._judge(judge, task), allow_nan=False)
        except Exception as error:
            raise Strange("its worker would have died") from error
        return reward_of(json.loads(line))


class Rows:
    """Prompts by number, so many."""

    def __init__(self, count):
        self._count = count

    def at(self, index):
        if index >= self._count:
            return None
        return Prompt(row_id=str(index), token_ids=array("i", [5]), domain="math", ground_truth="42")


class Source:
    """Tasks: even ones are as they should be, odd ones as drawn."""

    def __init__(self, drawn):
        self._drawn = drawn

    def at(self, index):
        if index >= 2 * len(self._drawn):
            return None
        kind = self._drawn[index // 2][0] if index % 2 else "task"
        if kind == "raises":
            raise OSError("the file is gone")
        if kind not in ("task", "no seed", "seed of words", "no such tag"):
            return made(kind)
        extra = {"seed": "many" if kind == "seed of words" else str(index), "validation": ""}
        domain = ("quick", "slow", "agent")[index // 2 % 3] if kind != "no such tag" else "nowhere"
        return Prompt(
            row_id=str(index),
            token_ids=array("i"),
            domain=domain,
            ground_truth="",
            extra={} if kind == "no seed" else extra,
        )


class Recorded(Rollouter):
    """Remembers what each prompt came to; its hook does for odd prompts what is drawn."""

    drawn, fates = (), None

    def _custom_generation_logic(self, batch):
        index = batch.slot.prompt_index
        hook = self.drawn[index // 2][2] if index % 2 else None
        return None if hook is None else doing(hook)()

    async def _deliver(self, slot, outcome):
        self.fates.append((slot.prompt_index, outcome.fate.value, outcome.reason))
        if outcome.group is not None:
            assert decode_group(*encode_group(outcome.group)) == replace(outcome.group, generated_s=None)
        await super()._deliver(slot, outcome)


def played(tokenizer, drawn, texts, tell):
    """(fates by prompt, counts of the queue, metrics) of a run over tasks, of which every other one offends."""
    outspoken.SAYS.clear()
    for i, (_, hooks, _) in enumerate(drawn):
        outspoken.SAYS[2 * i + 1] = {hook: doing(act) for hook, act in hooks.items()}

    def told(name, task, ending, rows):
        json.dumps(dict(ending.metrics), allow_nan=False)
        if task.seed % 2 and tell is not None:
            raised(tell)

    async def main():
        pool, queue = WorldPool(step_timeout_s=20), MessageQueue(QueueOptions(groups_per_batch=1), MemoryLedger())
        gateway, limits = PolicyGateway(), {"max_turns": 4, "max_context": 8000}
        sampling = SamplingParams(max_new_tokens=4000)
        tags = {
            tag: TagPlan(
                spec=WorldSpec(env_type=f"outspoken.{kind}", values={}),
                session=SessionOptions(sampling=sampling, max_seconds=300, **limits),
                play=EpisodeOptions(max_turns=4),
                toolbox=toolbox_of([outspoken.Tool()], timeout_s=30),
                agent=outspoken.Agent(gateway, AgentResult(reward=0.5)) if tag == "agent" else None,
            )
            for tag, kind in (("quick", "Quick"), ("slow", "Slow"), ("agent", "Slow"))
        }
        parts = AgentParts(
            tags=tags, renderer=TemplateRenderer(tokenizer), worlds=pool, gateway=gateway, silence_s=60, tell=told
        )
        manager = Policy(tokenizer, texts)
        options = GroupOptions(samples_per_group=2, sampling=None, retries=1, filter=GroupFilter())
        groups = GroupRunner(WorldRunner(manager, parts), manager, options)
        rollouter = Recorded(queue, groups, manager, Source(drawn))
        rollouter.drawn, rollouter.fates = drawn, []
        await trained(queue, rollouter, manager)
        stats, counts = queue.stats(), groups.counts()
        metrics = {**counts.metrics, **ratio_metrics(counts.ratios, {})}
        await pool.close()
        return rollouter.fates, stats, metrics

    return run_virtual(main())


async def trained(queue, rollouter, manager):
    """All groups, one a step."""
    queue.weights_held(0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rollouter.run())
        with suppress(EndOfData):
            for step in range(1, 10**6):
                await queue.take_batch(step, 1)
                await queue.step_trained(step)
                manager.version = step
                queue.weights_held(step)


def scored(tokenizer, drawn):
    """(fates by prompt, counts of the queue) of a run whose reward says of every other prompt what is drawn."""

    async def main():
        queue = MessageQueue(QueueOptions(groups_per_batch=1), MemoryLedger())
        manager = Policy(tokenizer, ["the"])
        options = SchedulerOptions(samples_per_group=2, sampling=SamplingParams(max_new_tokens=9), filter=GroupFilter())
        rollouter = Recorded(
            queue, ChatCompletionScheduler(manager, Scorer(drawn), options), manager, Rows(2 * len(drawn))
        )
        rollouter.drawn, rollouter.fates = [(None, None, None)] * len(drawn), []
        await trained(queue, rollouter, manager)
        return rollouter.fates, queue.stats()

    return run_virtual(main())


def check_ends(fates, stats, count):
    """Every prompt came to one end, and those that did not offend to that of their scores."""
    assert Counter(index for index, _, _ in fates) == Counter(range(count)), "exactly once"
    for index, fate, reason in fates:
        assert reason.encode() is not None and len(reason) < 2000
        if index % 2 == 0:
            assert fate in ("kept", "filtered"), (index, reason)
    ended = stats.trained + stats.filtered + stats.failed + stats.dropped
    assert (stats.in_flight, stats.buffered, stats.training) == (0, 0, 0) and stats.admitted == ended, stats


@pytest.fixture
def tokenizer(sessions):
    return sessions([])[2]


@pytest.fixture
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@settings(
    max_examples=DRAWS,
    derandomize="ROLL_ASYNC_DRAWS" not in os.environ,  # a suite must not differ from day to day; more draws search
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    drawn=st.lists(st.tuples(TASKS, HOOKS, OWN_HOOK), min_size=1, max_size=6),
    texts=st.lists(TEXTS, min_size=1, max_size=4),
    tell=st.none() | st.sampled_from(sorted(ERRORS)),
)
def test_the_run_goes_on_whatever_is_said_and_every_prompt_comes_to_one_end(tokenizer, quiet, drawn, texts, tell):
    fates, stats, metrics = played(tokenizer, drawn, texts, tell)
    check_ends(fates, stats, 2 * len(drawn))
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.slow
@settings(max_examples=DRAWS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(acts(SCORES), min_size=1, max_size=6))
def test_the_run_goes_on_whatever_a_reward_says_and_every_prompt_comes_to_one_end(tokenizer, quiet, drawn):
    fates, stats = scored(tokenizer, drawn)
    check_ends(fates, stats, 2 * len(drawn))


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (("raise", "ValueError"), "error"),
        (("raise", "unspeakable"), "error"),
        (("raise", "ungraded"), "error"),
        (("give", {"score": 1.0, "reason": "\ud83d", "\ud83d": 2.0}), "ok"),
        (("give", Judged(score=1.0, acc=1.0, reason=Odd("bytes"), metrics={("a", 1): 2.0})), "ok"),
        (("give", Judged(score=1.0, acc=1.0, reason=Odd("unspeakable"), metrics={})), "error"),
    ],
)
def test_what_a_reward_says_can_be_written_everywhere(act, status):
    reward = run_virtual(Scorer([act]).score(Rows(2).at(1), None))
    assert reward.status.value == status and json.dumps(asdict(reward), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\ud83db", "a\ufffdb"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\U0001f600\x00\ufeff", "\U0001f600\x00\ufeff"),
        (b"\xff", "\ufffd"),
        ({"a": [1, None, math.inf]}, '{"a": [1, null, "inf"]}'),
        ((1, "\ud83d"), '[1, "\ufffd"]'),
        (3.5, "3.5"),
        ("y" * 99, "y" * 50),
    ],
)
def test_text_from_outside_can_be_encoded_and_is_bounded(value, text):
    assert text_of(value, 50) == text and text.encode()


@pytest.mark.parametrize("value", [None, deep(5000), circle(), [10**1300], Unspeakable()])
def test_what_cannot_be_a_text_is_an_error(value):
    with pytest.raises(OutsideError), border():
        text_of(value)


@pytest.mark.parametrize("value", [None, "1.0", math.nan, -math.inf, 10**400, 1e16, 1j, [1.0], Unspeakable()])
def test_what_is_no_finite_number_of_use_is_refused(value):
    with pytest.raises(OutsideError, match="ValueError: the reward is|KeyError"), border():
        number(value, "the reward")
    assert number(True, "it") == 1.0


def test_an_error_of_others_is_told_with_type_message_and_place_and_a_cancellation_from_here_goes_through():
    with pytest.raises(
        OutsideError, match=r"^JSONDecodeError: Expecting value: .* \[agents/test_outside.py:\d+, in test_an_e"
    ):
        with border():
            json.loads("")
    with pytest.raises(OutsideError, match="^UnspeakableError"), border():
        raise UnspeakableError
    with pytest.raises(OutsideError, match="^StopIteration"), border():
        raise StopIteration
    with pytest.raises(KeyboardInterrupt), border():
        raise KeyboardInterrupt

    async def cancelled():
        task = asyncio.ensure_future(asked(lambda: asyncio.sleep(9), str, math.inf))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(OutsideError, match="CancelledError"):
            await asked(lambda: raised("CancelledError"), str, 1)
        with pytest.raises(TimeoutError):
            await asked(lambda: asyncio.sleep(9), str, 1)

    run_virtual(cancelled())


@pytest.mark.parametrize("asked_to_end", [1, 2], ids=["once", "again while its code was to clean up"])
def test_code_that_ignores_its_cancellation_is_closed_when_who_asked_for_it_is_cancelled(asked_to_end):
    closed = []

    async def stubborn():
        try:
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1e9)
        finally:
            closed.append(asyncio.get_running_loop().time())

    async def main():
        task = asyncio.ensure_future(asked(stubborn, str, math.inf))
        for _ in range(asked_to_end):
            await asyncio.sleep(1)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [11 if asked_to_end == 1 else 2]

    run_virtual(main())


@pytest.mark.parametrize("start", ["wait_for", "gather", "task"])
def test_an_exit_in_a_task_of_their_own_ends_what_they_were_asked_for_and_no_more(start):
    async def program():
        sys.exit("as in a script")

    async def tool():
        match start:
            case "wait_for":
                await asyncio.wait_for(program(), 5)
            case "gather":
                await asyncio.gather(program(), asyncio.sleep(0))
            case "task":
                await asyncio.create_task(program(), name="theirs")

    async def go():
        with pytest.raises(OutsideError, match="SystemExit: as in a script"):
            await asked(tool, text_of, 5)
        await asyncio.ensure_future(program())  # what is ours and asks for its end is heard

    with pytest.raises(SystemExit):
        asyncio.run(go())


def test_an_error_that_nobody_foresaw_ends_its_trajectory_is_counted_and_leaves_its_traceback(tokenizer, caplog):
    fates, _, metrics = played(tokenizer, [("task", {}, None)], ["the"], "ConnectionError")
    assert [fate for _, fate, _ in fates] == ["filtered", "failed"] and "ConnectionError: gone" in fates[1][2]
    assert metrics["agent/unforeseen_errors"] == metrics["agent/outcomes/infra_error"] * metrics["agent/attempts"] == 4
    assert "it may be a fault of roll_async" in caplog.text and "Traceback" in caplog.text
