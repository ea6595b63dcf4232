"""The reward client against the real service: verdicts, and every way in which there is none."""

import asyncio
import json
import signal
import threading
import time
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from roll_async.config.schema import RewardConfig, ServiceConfig
from roll_async.rewards.serving.router import RewardRouter
from roll_async.rewards.serving.service_client import ServiceClient
from roll_async.schema import Prompt, RewardStatus

pytest.importorskip("aiohttp")
OK = b'{"status": "ok", "score": 1.0, "acc": 1.0, "format": 1.0, "reason": "", "scoring_s": 0.01}'


def prompt(gold):
    return Prompt(row_id="1", token_ids=array("i", [1]), domain="math", ground_truth=gold, text="?", extra={"a": "b"})


def ask(url, *texts, gold="18", timeout_s=10.0, **options):
    async def go():
        client = ServiceClient(ServiceConfig(api_url=url, **{"max_retries": 2, **options}), timeout_s=timeout_s)
        await client.start()
        try:
            return await asyncio.gather(*(client.score_response(prompt(gold), text) for text in texts)), client
        finally:
            await client.close()

    return asyncio.run(go())


@pytest.fixture
def scripted():
    """A server that answers the probe, then the given (status, headers, body) in turn, the last one for ever.
    `at_once`: gets the number of requests under way while each is answered.
    """
    servers = []

    def start(*replies, probe=OK, delay_s=0.0, at_once=None):
        asked, every, running = [], ((200, {}, probe), *replies), []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                running.append(1)
                time.sleep(delay_s)
                if at_once is not None:
                    at_once.append(len(running))
                running.pop()
                status, headers, body = every[min(len(asked), len(every)) - 1]
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_real_service_judges_through_the_router(service, monkeypatch):
    monkeypatch.setenv("TOKEN_OF_THE_RUN", "secret")
    config = RewardConfig(
        type="math_service", service=ServiceConfig(api_url=service.url + "/", token_env="TOKEN_OF_THE_RUN")
    )

    async def go():
        router = RewardRouter({"math": config})
        await router.start()
        texts = [r"\boxed{18}", "Answer: 17", r"\boxed{9^{9^{9^9}}}", "none"]
        try:
            return await asyncio.gather(*(router.score(prompt("18"), text) for text in texts))
        finally:
            await router.close()

    right, wrong, late, without = asyncio.run(go())
    assert (right.status, right.score) == (RewardStatus.OK, 1.0)
    assert right.metrics == {"acc": 1.0, "format": 1.0, "unfinished_thought": 0.0}
    assert (wrong.score, wrong.reason) == (0.0, "'17' is not '18'") and without.metrics["format"] == 0.0
    assert late.status is RewardStatus.TIMEOUT and late.metrics == {}


def test_a_run_does_not_start_without_the_service_or_with_the_wrong_token(service, own_port, monkeypatch):
    monkeypatch.setenv("TOKEN_OF_THE_RUN", "wrong")
    with pytest.raises(ValueError, match=r"no math verify service at .*: status 401 .*; start it with"):
        ask(service.url, token_env="TOKEN_OF_THE_RUN", max_retries=0)
    with pytest.raises(ValueError, match="no math verify service at .*: ClientConnectorError"):
        ask(f"http://127.0.0.1:{own_port()}", max_retries=1)
    with pytest.raises(ValueError, match="the environment variable NOT_SET_ANYWHERE is not set"):
        ask(service.url, token_env="NOT_SET_ANYWHERE")


def test_a_service_that_judges_wrongly_is_refused(scripted):
    url, _ = scripted(probe=OK.replace(b'"score": 1.0', b'"score": 0.0'))
    with pytest.raises(ValueError, match="it gives 1/2 = 0.5 0"):
        ask(url, "text")


@pytest.mark.parametrize(
    "trouble",
    [
        (429, {"Retry-After": "0"}, b"{}"),
        (503, {}, b'{"detail": "no worker"}'),
        (500, {}, b""),
        (401, {}, b""),
        (404, {}, b"<html>"),
        (200, {}, b"<html>a proxy's page</html>"),
        (200, {}, b'{"status": "ok", "score": null, "acc": 1, "format": 1, "reason": "", "scoring_s": 0}'),
        (200, {}, b'{"status": "ok", "score": NaN, "acc": 1, "format": 1, "reason": "", "scoring_s": 0}'),
        (200, {}, b'{"status": "ok", "score": true, "acc": 1, "format": 1, "reason": "", "scoring_s": 0}'),
        (200, {}, b'{"status": "fine", "score": 0, "acc": 1, "format": 1, "reason": "", "scoring_s": 0}'),
    ],
)
def test_trouble_is_tried_again_and_then_an_outage_never_a_score(scripted, trouble):
    url, asked = scripted(trouble, (200, {}, OK))
    (reward,), client = ask(url, "text")
    assert reward.status is RewardStatus.OK and reward.score == 1.0
    assert len(asked) == 3 and client.outages == 0
    assert asked[1] == asked[2] == {"text": "text", "ground_truth": "18", "extra": {"a": "b"}}
    url, asked = scripted(trouble)
    (reward,), client = ask(url, "text", max_retries=1)
    assert reward.status is RewardStatus.OUTAGE and reward.metrics == {} and url in reward.reason
    assert len(asked) == 3 and client.outages == 1


def test_no_more_samples_are_at_the_service_at_once_than_allowed(scripted):
    at_once = []
    url, _ = scripted((200, {}, OK), delay_s=0.03, at_once=at_once)
    rewards, _ = ask(url, *map(str, range(12)), max_concurrent=3)
    assert max(at_once) == 3 and {reward.status for reward in rewards} == {RewardStatus.OK}


@pytest.mark.parametrize("status", [413, 422])
def test_a_sample_the_service_cannot_take_is_an_error_of_its_own_at_once(scripted, status):
    url, asked = scripted((status, {}, b'{"detail": "too large"}'))
    (reward,), _ = ask(url, "text")
    assert reward.status is RewardStatus.ERROR and "too large" in reward.reason and len(asked) == 2


def test_a_service_killed_in_the_middle_is_an_outage_and_judges_again_when_it_is_back(start_service, own_port):
    """No sample of the time without a service gets a score: each is asked again until it is judged."""
    port = own_port()
    first = start_service("--timeout", "5", port=port)
    config = RewardConfig(
        type="math_service", service=ServiceConfig(api_url=first.url, max_retries=0, max_concurrent=16)
    )
    outages = []

    async def judged(router, number):
        while True:
            try:
                return await router.score(prompt("18"), rf"\boxed{{{number % 2 + 17}}}")
            except ConnectionError as error:
                outages.append(str(error))
                await asyncio.sleep(0.2)

    async def go():
        router = RewardRouter({"math": config})
        await router.start()
        try:
            running = [asyncio.create_task(judged(router, number)) for number in range(400)]
            while sum(task.done() for task in running) < 20:
                await asyncio.sleep(0.01)
            first.stop(signal.SIGKILL)
            before = sum(task.done() for task in running)
            await asyncio.sleep(0.5)
            await asyncio.to_thread(start_service, port=port)
            return before, await asyncio.gather(*running)
        finally:
            await router.close()

    before, rewards = asyncio.run(go())
    assert before < 400 and outages and all("reward math: http://127.0.0.1" in outage for outage in outages)
    assert [r.score for r in rewards] == [float(n % 2) for n in range(400)]
    assert all(r.status is RewardStatus.OK for r in rewards)
