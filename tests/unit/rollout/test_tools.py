"""Tool calls: the model's tokens stay as they were, results are masked, tools of one turn run side by side."""

import asyncio
import json
import re
import time
from array import array
from contextlib import asynccontextmanager

import pytest

from roll_async.prompts.tool_calls import HERMES, parse_call
from roll_async.rollout.answers import AnswerRunner
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, SchedulerOptions
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.group_source import GroupFate
from roll_async.rollout.groups import GroupScope, TrajectoryRequest
from roll_async.rollout.scoring import RewardScoring, ScoringOptions
from roll_async.rollout.tools import ToolCompletionCallback
from roll_async.schema import Completion, FinishReason, Image, SamplingParams
from tests.patience import patient

END = 7


class TextCodec:
    """Characters are tokens; a result stands between two brackets."""

    calls = HERMES

    def said(self, token_ids):
        return "".join(map(chr, token_ids))

    def between(self, last_token, results):
        return [ord(c) for c in "[" + "|".join(results) + "]"]


class Speaker:
    """A replica that says its lines in order, one per request of a conversation."""

    def __init__(self, replica, *lines):
        self.replica, self.lines, self.prompts = replica, list(lines), []
        replica.submit = self.submit

    async def submit(self, requests):
        for request in requests:
            self.prompts.append(request.prompt_token_ids.tolist())
            self.replica.submitted.append(request)
            line = self.lines.pop(0)
            tokens = array("i", [*map(ord, line), END])
            self.replica.reply(
                Completion(
                    request_id=request.request_id,
                    token_ids=tokens,
                    logprobs=array("f", [-0.25] * len(tokens)),
                    version_runs=((self.replica.version, len(tokens)),),
                    finish_reason=FinishReason.STOP,
                    generation_s=1.0,
                )
            )
            self.replica.version += 1  # every turn under newer weights


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def add(arguments):
    await asyncio.sleep(3)
    return str(arguments["a"] + arguments["b"])


async def broken(arguments):
    raise KeyError("disk")


async def slow(arguments):
    await asyncio.sleep(1e6)


TOOLS = {"add": add, "broken": broken, "slow": slow}


class Conversations:
    """Answers, one at a time, in one scope."""

    def __init__(self, runner):
        self.runner, self.tools, self.scope = runner, runner.tools, GroupScope()

    async def end(self, prompt, name, sampling, affinity=None):
        request = TrajectoryRequest(name=name, prompt=prompt, sampling=sampling, scope=self.scope, affinity=affinity)
        return await self.runner.run(request)

    async def sample(self, *given):
        (row,) = (await self.end(*given)).rows
        return row


@asynccontextmanager
async def talking(replicas, scorer, *, limit=128, tools=TOOLS, **options):
    manager = EnginePool(replicas, ManagerOptions(max_concurrent_per_server=limit))
    await manager.start()
    callback = ToolCompletionCallback(tools, TextCodec(), **options)
    try:
        yield Conversations(AnswerRunner(manager, RewardScoring(scorer, ScoringOptions()), tools=callback))
    finally:
        await manager.close()


SAMPLING = SamplingParams(max_new_tokens=500)


def test_the_conversation_is_the_very_tokens_of_both_sides_with_the_results_masked(
    run, build, replica_class, scorer_class
):
    async def go():
        replica = replica_class("a", version=4)
        first, second = call("add", a=1, b=2) + "!", "3"
        speaker = Speaker(replica, first, second)
        async with talking([replica], scorer_class()) as conversations:
            prompt = build.prompt(ids=(1, 2, 3), images=(Image(data=b"png", grid=(1, 1)),))
            sample = await conversations.sample(prompt, "s", SAMPLING)
        assert all(request.images is prompt.images for request in replica.submitted)
        turn_1, answer, turn_2 = [*map(ord, first), END], [ord(c) for c in "[3]"], [ord("3"), END]
        assert sample.response_token_ids.tolist() == turn_1 + answer + turn_2
        assert speaker.prompts == [[1, 2, 3], [1, 2, 3, *turn_1, *answer]]
        assert sample.loss_mask == b"\x01" * len(turn_1) + b"\x00" * 3 + b"\x01\x01"
        assert set(sample.behaviour_logprobs[len(turn_1) : len(turn_1) + 3]) == {0.0}
        assert sample.version_runs == ((4, len(turn_1) + 3), (5, 2)) and sample.oldest_version == 4
        assert (sample.num_turns, sample.finish_reason, sample.reward.score) == (2, FinishReason.STOP, 1.0)
        assert len({r.request_id for r in replica.submitted}) == 2

    run(go())


def test_tools_of_one_turn_run_side_by_side_and_answer_in_the_order_of_the_calls(
    run, build, replica_class, scorer_class
):
    async def go():
        replica = replica_class("a")
        lines = "".join(call("add", a=i, b=10) for i in range(5))
        speaker = Speaker(replica, lines, "done")
        async with talking([replica], scorer_class(score_s=0)) as conversations:
            await conversations.sample(build.prompt(), "s", SAMPLING)
            assert asyncio.get_running_loop().time() == pytest.approx(3.0)
            assert conversations.tools.toolbox.num_calls == 5
        assert bytes(speaker.prompts[1][-16:]).decode() == "[10|11|12|13|14]"

    run(go())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (call("broken"), "error: KeyError: 'disk'"),
        (call("slow"), "error: no result within 30 s"),
        (call("fly", to="moon"), "error: there is no tool 'fly'"),
        ("<tool_call>{1: 2</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": 3}</tool_call>', "a call is"),
    ],
)
def test_whatever_goes_wrong_in_a_tool_is_what_the_model_reads(run, build, replica_class, scorer_class, line, told):
    async def go():
        replica = replica_class("a")
        speaker = Speaker(replica, line, "so be it")
        async with talking([replica], scorer_class()) as conversations:
            sample = await conversations.sample(build.prompt(), "s", SAMPLING)
            assert conversations.tools.toolbox.num_failures == 1
        assert told in "".join(map(chr, speaker.prompts[1])) and sample.finish_reason is FinishReason.STOP

    run(go())


def raising(error):
    raise error


@pytest.mark.parametrize(
    ("gives", "told"),
    [
        (lambda: None, "error: TypeError: expected text, got None"),
        (lambda: {"a": "\ud83d"}, '[{"a": "\ufffd"}]'),
        (lambda: "half \ud83d", "[half \ufffd]"),
        (lambda: b"\xffab", "[\ufffdab]"),
        (lambda: 10**5000, "error: ValueError"),
        (lambda: raising(SystemExit(3)), "error: SystemExit: 3"),
        (lambda: raising(asyncio.CancelledError()), "error: CancelledError"),
        (lambda: raising(ValueError("\ud83d")), "error: ValueError: \ufffd"),
    ],
)
def test_a_result_of_any_type_is_a_text_that_the_model_reads(run, build, replica_class, scorer_class, gives, told):
    async def odd(arguments):
        return gives()

    async def go():
        replica = replica_class("a")
        speaker = Speaker(replica, call("odd"), "so be it")
        async with talking([replica], scorer_class(), tools={"odd": odd}) as conversations:
            sample = await conversations.sample(build.prompt(), "s", SAMPLING)
        said = "".join(map(chr, speaker.prompts[1]))
        assert told in said and said.encode() and sample.finish_reason is FinishReason.STOP

    run(go())


def test_results_are_bounded_one_by_one_and_in_number(run, build, replica_class, scorer_class):
    async def long(arguments):
        return "y" * 10**6

    async def go():
        replica = replica_class("a")
        speaker = Speaker(replica, call("long") + call("n" * 50_000) + call("long") * 70, "so be it")
        async with talking([replica], scorer_class(), tools={"long": long}) as conversations:
            await conversations.sample(build.prompt(), "s", SamplingParams(max_new_tokens=10**7))
            assert (conversations.tools.toolbox.num_calls, conversations.tools.toolbox.num_failures) == (72, 9)
        results = "".join(map(chr, speaker.prompts[1])).rpartition("[")[2].split("|")
        assert len(results) == 72 and [len(r) for r in results[:3]] == [20_000] * 3
        assert results[-1].startswith("error: not run: one turn may hold 64 calls")

    run(go())


CALLS = {
    "digits": '{"name": "add", "arguments": {"a": ' + "9" * 4301 + "}}",
    "more bits": '{"name": "add", "arguments": {"a": ' + "9" * 4000 + "}}",
    "nan": '{"name": "add", "arguments": {"a": NaN}}',
    "deep": '{"name": "add", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}",
    "deeper": "[" * 100_000,
}


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS)
def test_a_call_that_no_json_may_hold_is_malformed(text):
    assert parse_call(text).problem.startswith("the call is not valid JSON (")


def test_half_an_emoji_in_a_call_is_replaced_where_it_comes_in():
    found = parse_call(r'{"name": "\ud83d", "arguments": {"\ude00": ["\ud83d\ude00", "\ud83d"]}}')
    assert (found.name, found.arguments) == ("\ufffd", {"\ufffd": ["\U0001f600", "\ufffd"]})


class Broken(ToolCompletionCallback):
    """A user's callback."""

    hook, does = "", None

    def find_calls(self, text):
        return self.does() if self.hook == "find_calls" else super().find_calls(text)

    def postprocess(self, tree, name):
        return self.does() if self.hook == "postprocess" else super().postprocess(tree, name)


@pytest.mark.parametrize("hook", ["find_calls", "postprocess", "row"])
@pytest.mark.parametrize(
    "does", [lambda: raising(KeyError("x")), lambda: raising(SystemExit()), lambda: 5, lambda: ["\ud83d"]]
)
def test_a_callback_that_fails_fails_its_group_with_its_place(run, build, replica_class, scorer_class, hook, does):
    async def go():
        replica = replica_class("a")
        Speaker(replica, *[call("add", a=1, b=1), "so be it"] * 2)
        manager = EnginePool([replica], ManagerOptions())
        await manager.start()
        callback = Broken(TOOLS, TextCodec())
        callback.hook, callback.does = hook, does
        scheduler = ChatCompletionScheduler(
            manager, scorer_class(), SchedulerOptions(samples_per_group=1, sampling=SAMPLING), tools=callback
        )
        extra = {"extra_info": "tools" + "[" * 100_000} if hook == "row" else {}
        outcome = await scheduler.run_group(build.prompt(extra=extra), group_id=0)
        await manager.close()
        assert outcome.fate is GroupFate.FAILED and re.search(
            r"\w+: .*\[\w+/\w+.py:\d+, in \w+\]|SystemExit \[", outcome.reason
        )

    run(go())


def test_a_prompt_says_which_tools_it_may_call_and_what_they_are_given(run, build, replica_class, scorer_class):
    """verl's row: `extra_info.tools_kwargs`; the row's arguments stand over what the model asks for."""

    async def go():
        info = {"tools_kwargs": {"add": {"create_kwargs": {"b": 40}, "execute_kwargs": None}}, "tools": ["add"]}
        prompt = build.prompt(extra={"extra_info": json.dumps(info)})
        replica = replica_class("a")
        speaker = Speaker(replica, call("add", a=2, b=1) + call("slow"), "ok")
        async with talking([replica], scorer_class()) as conversations:
            await conversations.sample(prompt, "s", SAMPLING)
            told = "".join(map(chr, speaker.prompts[1]))
            assert "[42|error: there is no tool 'slow']" in told
            assert (conversations.tools.toolbox.num_calls, conversations.tools.toolbox.num_failures) == (2, 1)

    run(go())


def test_turns_stick_to_their_replica_and_move_on_only_when_it_dies(run, build, replica_class, scorer_class):
    async def go():
        replicas = [replica_class(name) for name in "ab"]
        speakers = [Speaker(r, *[call("add", a=1, b=1)] * 3, "end") for r in replicas]
        async with talking(replicas, scorer_class()) as conversations:
            await conversations.sample(build.prompt(), "s", SAMPLING)
            assert [len(s.prompts) for s in speakers] == [4, 0]
            speakers[1].lines = [call("add", a=1, b=1), "x", "end"]
            talk = asyncio.ensure_future(conversations.sample(build.prompt(), "t", SAMPLING))
            await asyncio.sleep(1)  # its tool runs
            assert len(speakers[1].prompts) == 1
            replicas[1].die()
            speakers[0].lines = ["end"]
            assert (await talk).num_turns == 2 and len(speakers[0].prompts) == 5

    run(go())


class SlowTalker(Speaker):
    """Answers after `turn_s`: a first turn with a call, a later one with the end."""

    turn_s = 5

    async def submit(self, requests):
        for request in requests:
            self.prompts.append(request.prompt_token_ids.tolist())
            asyncio.get_running_loop().call_later(self.turn_s, self._answer, request)

    def _answer(self, request):
        first = len(request.prompt_token_ids) == 1
        self.lines.append(call("add", a=1, b=1) if first else "end")
        tokens = array("i", [*map(ord, self.lines[-1]), END])
        self.replica.reply(
            Completion(
                request_id=request.request_id,
                token_ids=tokens,
                logprobs=array("f", [-0.25] * len(tokens)),
                version_runs=((0, len(tokens)),),
                finish_reason=FinishReason.STOP,
                generation_s=5.0,
            )
        )


@pytest.mark.parametrize("affinity", [None, "group"])
def test_later_turns_go_home_at_once_also_when_every_replica_is_full_and_before_what_has_not_begun(
    run, build, replica_class, scorer_class, affinity
):
    async def go():
        replicas = [replica_class(name) for name in "ab"]
        speakers = [SlowTalker(r) for r in replicas]
        ended = {}

        async def talk(conversations, key):
            await conversations.sample(build.prompt(ids=(key,)), f"s{key}", SAMPLING, affinity)
            ended[key] = asyncio.get_running_loop().time()

        async with talking(replicas, scorer_class(score_s=0), limit=1) as conversations:
            await asyncio.gather(*(talk(conversations, key) for key in range(100, 108)))
        homes = {s.replica.name: [prompt[0] for prompt in s.prompts] for s in speakers}
        assert all(homes[name].count(key) in (0, 2) for name in homes for key in range(100, 108)), homes
        assert [ended[key] for key in (100, 101)] == [13, 13], "two turns and the tool: no wait between them"
        assert max(map(len, homes.values())) == 8, "first turns still go by load and keep to the limit"

    run(go())


def test_a_conversation_ends_with_its_turns_or_its_tokens_and_never_appends_a_result_that_leaves_no_room(
    run, build, replica_class, scorer_class
):
    async def go(max_turns, max_new_tokens):
        replica = replica_class("a")
        Speaker(replica, *[call("add", a=1, b=1)] * 9)
        async with talking([replica], scorer_class(), max_turns=max_turns) as conversations:
            return await conversations.sample(build.prompt(), "s", SamplingParams(max_new_tokens=max_new_tokens))

    turn = len(call("add", a=1, b=1)) + 1
    by_turns, by_tokens = run(go(3, 1000)), run(go(8, 2 * turn + 6))
    assert (by_turns.num_turns, len(by_turns.response_token_ids)) == (3, 3 * turn + 2 * 3)
    assert (by_tokens.num_turns, by_tokens.finish_reason) == (2, FinishReason.LENGTH)
    assert len(by_tokens.response_token_ids) == 2 * turn + 3 and by_tokens.loss_mask[-1] == 1


def test_an_abort_reaches_a_conversation_whose_tools_run(run, build, replica_class, scorer_class):
    async def go():
        replica = replica_class("a")
        speaker = Speaker(replica, call("add", a=1, b=1), "never said")
        scorer = scorer_class()
        manager = EnginePool([replica], ManagerOptions())
        await manager.start()
        options = SchedulerOptions(samples_per_group=1, sampling=SAMPLING)
        scheduler = ChatCompletionScheduler(manager, scorer, options, tools=ToolCompletionCallback(TOOLS, TextCodec()))
        group = asyncio.ensure_future(scheduler.run_group(build.prompt(), group_id=3))
        await asyncio.sleep(1)
        await scheduler.abort_groups([3, 99])
        outcome = await group
        assert outcome.fate is GroupFate.REQUEUED
        assert outcome.remains.samples[0].finish_reason is FinishReason.ABORT
        await manager.close()
        assert len(speaker.prompts) == 1 and scorer.calls == 0

    run(go())


def test_call_marks_nested_a_hundred_thousand_deep_are_read_in_linear_time():
    opens, spaces = "<tool_call>" * 100_000, " " * 100_000
    started = time.process_time()
    assert [bool(call.problem) for call in HERMES.read(opens)[1]] == [True]
    assert [bool(call.problem) for call in HERMES.read(f"<tool_call>{spaces}x")[1]] == [True]
    assert len(HERMES.read("<tool_call></tool_call>" * 20_000)[1]) == 20_000
    assert time.process_time() - started < patient(1.0)
