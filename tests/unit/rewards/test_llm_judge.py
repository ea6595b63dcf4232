"""The judge's client against a real HTTP server on this machine that behaves as told."""

import asyncio
import json
from collections import Counter

import pytest

from roll_async.config.schema_rollout import JudgeConfig
from roll_async.rewards.serving.llm_judge import LlmJudge
from roll_async.schema import RewardStatus

aiohttp = pytest.importorskip("aiohttp")


class Server:
    """An OpenAI-compatible endpoint. `script` holds what to answer next; when it is empty, a good verdict."""

    def __init__(self):
        self.bodies, self.headers, self.script = [], [], []
        self.running = self.most_at_once = 0
        self.delay_s = 0.0

    async def start(self):
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await self._site.start()
        self.url = f"http://127.0.0.1:{self._site._server.sockets[0].getsockname()[1]}/v1"

    async def _complete(self, request):
        from aiohttp import web

        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            reply = self.script.pop(0) if self.script else verdict(0.75, True)
            if reply == "hang":
                await asyncio.sleep(3600)
            if isinstance(reply, tuple):
                return web.Response(status=reply[0], text=reply[1], headers=reply[2] if len(reply) > 2 else {})
            return web.json_response({"choices": [{"message": {"content": reply}}]})
        finally:
            self.running -= 1

    async def close(self):
        await self._runner.cleanup()


def verdict(score, correct, reason="because"):
    return json.dumps({"reason": reason, "correct": correct, "score": score})


@pytest.fixture
def judging():
    """Run `work(judge, server)` with both alive."""

    def run(work, timeout_s=5.0, **options):
        async def go():
            server = Server()
            await server.start()
            judge = LlmJudge(JudgeConfig(api_url=server.url, model="judge-1", **options), timeout_s=timeout_s)
            await judge.start()
            try:
                async with asyncio.timeout(30):
                    return await work(judge, server)
            finally:
                await judge.close()
                await server.close()

        return asyncio.run(go())

    return run


@pytest.fixture
def question(build):
    return build.prompt(text="Capital of {reference}?", ground_truth="Paris {mark}")


def test_the_question_reaches_the_judge_and_its_verdict_comes_back(judging, question, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-1")

    async def work(judge, server):
        reward = await judge.score_response(question, "<think>secret</think>It is {response} Paris.")
        return reward, server.bodies[0], server.headers[0]

    reward, body, headers = judging(work, api_key_env="JUDGE_KEY")
    assert (reward.score, reward.status, reward.reason) == (0.75, RewardStatus.OK, "because")
    assert reward.metrics == {"acc": 1.0, "format": 1.0, "cached": 0.0} and reward.scoring_s > 0
    text = body["messages"][0]["content"]
    assert "Capital of {reference}?" in text and "Paris {mark}" in text and "It is {response} Paris." in text
    assert body["model"] == "judge-1" and headers["Authorization"] == "Bearer sk-1"
    assert "secret" not in text and text.count("Paris.") == 1
    assert (body["model"], body["temperature"], headers["Authorization"]) == ("judge-1", 0, "Bearer sk-1")
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["reason", "correct", "score"]


def test_text_of_the_policy_stands_between_marks_it_cannot_know(judging, question):
    async def work(judge, server):
        for text in ("a", "b"):
            await judge.score_response(question, text)
        return [body["messages"][0]["content"] for body in server.bodies]

    marks = [[line for line in text.splitlines() if line.startswith("=== ")] for text in judging(work)]
    assert all(len(m) == 6 and len(set(m)) == 1 for m in marks) and marks[0][0] != marks[1][0]


@pytest.mark.parametrize("first", ["hang", '{"score": 1' + "0" * 400 + "}"])
def test_a_failure_is_kept_for_nobody_whatever_became_of_who_asked_first(judging, question, first):
    async def work(judge, server):
        server.script = [first, first]
        asking = asyncio.create_task(judge.score_response(question, "x"))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait({asking})
        for _ in range(100):  # whoever comes until then shares its failure
            reward = await judge.score_response(question, "x")
            if reward.status is RewardStatus.OK:
                return reward
        return reward

    assert judging(work, timeout_s=0.3, max_retries=0).score == 0.75


def test_an_instruction_of_the_user_is_used_instead(judging, question):
    async def work(judge, server):
        await judge.score_response(question, "x")
        return server.bodies[0]["messages"][0]["content"]

    assert judging(work, prompt="Q {question} A {response}") == "Q Capital of {reference}? A x"


@pytest.mark.parametrize(
    ("content", "score", "acc"),
    [
        ('```json\n{"score": 0.5, "correct": false}\n```', 0.5, 0),
        ('<think>{"score": 0}</think> {"score": 1}', 1, 1),
        ('First {"score": 0, "correct": false}, no: {"reason": "{x}", "correct": true, "score": 1}', 1, 1),
        ('{"correct": true}', 1, 1),
        ('{"score": 0.2}', 0.2, 0),
    ],
)
def test_a_judge_that_talks_around_its_verdict_is_understood(judging, question, content, score, acc):
    async def work(judge, server):
        server.script = [content]
        return await judge.score_response(question, "x")

    reward = judging(work)
    assert (reward.score, reward.metrics["acc"], reward.status) == (score, acc, RewardStatus.OK)


def test_trouble_that_passes_is_retried(judging, question):
    async def work(judge, server):
        busy = [(503, "busy", {"Retry-After": "0.05"}), (429, "slow", {"Retry-After": "0"})]
        server.script = ["no json", *busy, verdict(1, True)]
        reward = await judge.score_response(question, "x")
        return reward, len(server.bodies)

    reward, requests = judging(work)
    assert (reward.score, reward.status, requests) == (1, RewardStatus.OK, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "status", "reason", "requests"),
    [
        ([(500, "x")] * 2, RewardStatus.OUTAGE, "status 500", 2),
        pytest.param(
            ["hang"] * 2, RewardStatus.OUTAGE, "no answer within 1 s", 2, marks=pytest.mark.slow, id="hanging"
        ),
        ([verdict(7, True), "none"], RewardStatus.ERROR, "no verdict", 2),
        ([(401, "bad key")], RewardStatus.ERROR, "status 401: bad key", 1),
        ([(400, "model not found")], RewardStatus.ERROR, "model not found", 1),
    ],
)
def test_what_does_not_pass_is_a_state_and_never_a_score(judging, question, script, status, reason, requests):
    async def work(judge, server):
        server.script = list(script)
        first = await judge.score_response(question, "x")
        count = len(server.bodies)
        server.script.clear()
        return first, count, await judge.score_response(question, "x")

    first, count, second = judging(work, max_retries=1, timeout_s=1.0)
    assert first.status is status and reason in first.reason and count == requests
    assert second.status is RewardStatus.OK and second.score == 0.75  # the failure is not remembered


def test_a_server_that_is_gone_is_an_outage(judging, question):
    async def work(judge, server):
        await server.close()
        return await judge.score_response(question, "x")

    reward = judging(work, max_retries=0)
    assert reward.status is RewardStatus.OUTAGE and "Cannot connect" in reward.reason


def test_a_server_without_response_format_is_asked_in_words(judging, question):
    async def work(judge, server):
        server.script = [(400, "unknown field response_format")]
        rewards = [await judge.score_response(question, text) for text in "ab"]
        return rewards, ["response_format" in body for body in server.bodies]

    rewards, structured = judging(work)
    assert structured == [True, False, False] and all(r.status is RewardStatus.OK for r in rewards)


def test_equal_questions_are_asked_once_also_at_the_same_time(judging, question):
    async def work(judge, server):
        server.delay_s = 0.05
        rewards = await asyncio.gather(*(judge.score_response(question, t) for t in ["same"] * 5 + ["other"]))
        rewards.append(await judge.score_response(question, "same"))
        return Counter(r.metrics["cached"] for r in rewards), len(server.bodies), judge.cached

    assert judging(work) == ({1.0: 5, 0.0: 2}, 2, 5)


def test_no_more_requests_run_at_once_than_allowed(judging, question):
    async def work(judge, server):
        server.delay_s = 0.02
        rewards = await asyncio.gather(*(judge.score_response(question, str(i)) for i in range(20)))
        return server.most_at_once, {r.status for r in rewards}

    assert judging(work, max_concurrent=3) == (3, {RewardStatus.OK})


def test_one_who_gives_up_does_not_take_the_answer_from_the_others(judging, question):
    async def work(judge, server):
        server.delay_s = 0.1
        first = asyncio.ensure_future(judge.score_response(question, "x"))
        second = asyncio.ensure_future(judge.score_response(question, "x"))
        await asyncio.sleep(0.02)
        first.cancel()
        return (await second).status, len(server.bodies)

    assert judging(work) == (RewardStatus.OK, 1)


def test_an_empty_answer_is_wrong_without_asking(judging, question):
    async def work(judge, server):
        reward = await judge.score_response(question, "<think>endless")
        return reward, len(server.bodies)

    reward, requests = judging(work)
    assert (reward.score, reward.metrics["acc"], reward.metrics["format"], requests) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"), ({"prompt": "grade it"}, "{response}")],
)
def test_a_judge_that_cannot_work_is_refused_at_the_start(options, message):
    judge = LlmJudge(JudgeConfig(api_url="http://127.0.0.1:9/v1", model="m", **options))
    with pytest.raises(ValueError, match=message):
        asyncio.run(judge.start())
