"""The service as a process: verdicts, refusals, limits, counters, its end."""

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patience import patient

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "async_dapo" / "math_verify_service.py"
TOKEN = {"Authorization": "Bearer secret"}
HANGING = r"\boxed{9^{9^{9^9}}}"


def verdict(service, text, gold):
    status, _, body = service.ask("/score", {"text": text, "ground_truth": gold}, **TOKEN)
    assert status == 200, body
    return json.loads(body)


def test_a_verdict_has_a_score_only_when_the_answer_could_be_judged(service):
    right, wrong = verdict(service, r"so \boxed{\frac{36}{2}}", "18"), verdict(service, "Answer: 17", "18")
    assert (right["status"], right["score"], right["acc"], right["format"]) == ("ok", 1.0, 1.0, 1.0)
    assert (wrong["status"], wrong["score"], wrong["reason"]) == ("ok", 0.0, "'17' is not '18'")
    late = verdict(service, HANGING, "18")
    assert (late["status"], late["score"], late["acc"]) == ("timeout", None, None)
    assert "no verdict within " in late["reason"]


def test_a_batch_keeps_its_order_and_a_hanging_item_costs_only_itself(service):
    texts = [r"\boxed{1}", HANGING, r"\boxed{2}", "nothing"]
    items = [{"text": text, "ground_truth": "2"} for text in texts]
    status, _, body = service.ask("/score/batch", {"items": items}, **TOKEN)
    assert status == 200
    assert [v["score"] for v in json.loads(body)["verdicts"]] == [0.0, None, 1.0, 0.0]
    assert service.ask("/score/batch", {"items": []}, **TOKEN)[2] == '{"verdicts":[]}'


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}])
@pytest.mark.parametrize("path", ["/score", "/score/batch", "/metrics", "/openapi.json"])
def test_without_the_token_only_health_answers(service, path, headers):
    status, found, _ = service.ask(path, {"text": "", "ground_truth": ""}, **headers)
    assert status == 401 and found["WWW-Authenticate"] == "Bearer"
    assert service.ask("/health")[0] == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        ({"text": "x"}, "body.ground_truth: Field required"),
        ({"text": 1, "ground_truth": "1"}, "body.text"),
        ({"text": "x", "ground_truth": "1", "secret": 1}, "body.secret"),
        ({"text": "x", "ground_truth": "1", "extra": {"a": 1}}, "body.extra.a"),
    ],
)
def test_what_the_schema_does_not_allow_is_named_and_not_echoed(service, body, says):
    status, _, text = service.ask("/score", body, **TOKEN)
    detail = json.loads(text)["detail"]
    assert status == 422 and says in detail and "input" not in json.loads(text)


def test_too_much_is_refused_before_it_is_read_whole(service):
    assert b" 413 " in raw(service, b"Content-Length: 2000000\r\n", b"x" * 1000)
    chunked = b"".join(b"%x\r\n%s\r\n" % (100_000, b"x" * 100_000) for _ in range(11)) + b"0\r\n\r\n"
    assert b" 413 " in raw(service, b"Transfer-Encoding: chunked\r\n", chunked)
    items = [{"text": "", "ground_truth": ""}] * 1025
    status, _, body = service.ask("/score/batch", {"items": items}, **TOKEN)
    assert status == 422 and "at most 1024" in body


def raw(service, headers, body):
    """The first line of the reply to a request written by hand."""
    import socket

    host, port = service.url.removeprefix("http://").split(":")
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=patient(10)) as connection:
        connection.sendall(head + headers + b"\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reply may come before the end
            connection.sendall(body)
        return connection.recv(1000).split(b"\r\n")[0]


def test_more_samples_than_the_limit_get_429_and_none_of_the_others_is_lost(service):
    items = [{"text": "", "ground_truth": "1"}] * 300  # 1,024 are allowed

    def ask(_):
        return service.ask("/score/batch", {"items": items}, **TOKEN)

    # One goes on aside, the other keeps the one worker busy: for a second the rest piles up.
    hanging = [threading.Thread(target=verdict, args=(service, HANGING, "1")) for _ in range(2)]
    for thread in hanging:
        thread.start()
    time.sleep(0.3)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(8)))
    for thread in hanging:
        thread.join()
    accepted = [json.loads(body) for status, _, body in replies if status == 200]
    refused = [headers["Retry-After"] for status, headers, _ in replies if status == 429]
    assert len(accepted) + len(refused) == 8 and len(accepted) >= 3 and refused and set(refused) == {"1"}
    assert all(len(reply["verdicts"]) == 300 and reply["verdicts"][0]["score"] == 0.0 for reply in accepted)
    assert service.wait_until_healthy()["in_flight"] == 0


def test_a_client_that_goes_away_frees_its_places(service):
    import socket

    host, port = service.url.removeprefix("http://").split(":")
    body = json.dumps({"items": [{"text": HANGING, "ground_truth": "1"}] * 50}).encode()
    head = b"POST /score/batch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((host, int(port)), timeout=patient(10)) as connection:
        connection.sendall(head + body)
        wait_for(lambda: service.wait_until_healthy()["in_flight"] == 50)
    wait_for(lambda: service.wait_until_healthy()["in_flight"] == 0)  # 50 time-outs would take 50 s
    assert verdict(service, r"\boxed{3}", "3")["score"] == 1.0


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + patient(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_metrics_count_requests_verdicts_and_replaced_workers(service):
    def counter(name):
        _, headers, text = service.ask("/metrics", **TOKEN)
        assert headers["Content-Type"].startswith("text/plain")
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    names = ('math_verify_verdicts_total{status="ok"}', 'math_verify_requests_total{code="200",path="/score"}')
    before = [counter(name) for name in names]
    for number in range(3):
        verdict(service, f"Answer: {number}", "1")
    assert [counter(name) for name in names] == [value + 3 for value in before]
    crashes_before = counter("math_verify_worker_timeouts")
    verdict(service, HANGING, "1")
    assert counter("math_verify_worker_timeouts") >= crashes_before + 1  # and what an earlier test left behind
    assert counter("math_verify_in_flight") == 0 and counter("math_verify_workers") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is not loopback: put a token into the environment variable NOT_SET"),
        (["--host", "::"], "is not loopback"),
        (["--host", "192.0.2.1"], "is not loopback"),
        (["--host", "example.org"], "is not loopback"),
        (["--port", "99999"], "--port 99999 is not between 0 and 65535"),
        (["--workers", "0"], "--workers >= 1"),
        (["--reward", "math_rul"], "reward type 'math_rul' is not one of math_rule |"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_status_2(command_line, capsys, arguments, says):
    with pytest.raises(SystemExit) as ended:
        command_line(["--token-env", "NOT_SET", *arguments])
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.fixture(scope="module")
def command_line():
    """The script's reading of its arguments, in this process."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("math_verify_service", SCRIPT)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module.parse
    finally:
        sys.path.remove(str(SCRIPT.parent))


def test_another_address_without_a_token_ends_the_program(own_port):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--host", "0.0.0.0", "--port", str(own_port()), "--token-env", "NOT_SET"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "not loopback" in done.stderr


def test_a_stop_signal_lets_the_replies_under_way_finish(start_service):
    service = start_service("--timeout", "1.5")
    replies = []
    asking = threading.Thread(
        target=lambda: replies.append(service.ask("/score", {"text": HANGING, "ground_truth": "1"}))
    )
    asking.start()
    wait_for(lambda: service.wait_until_healthy()["in_flight"] == 1)
    assert service.stop(signal.SIGTERM) == 0
    asking.join()
    assert replies[0][0] == 200 and json.loads(replies[0][2])["status"] == "timeout"


def test_the_schema_holds_under_fuzzing(service):
    """Every reply to generated requests, valid and not, is one the OpenAPI document allows; none is a 500."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json", headers=TOKEN)
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert {o.path for o in operations} == {"/score", "/score/batch", "/health", "/metrics"}
    seen = []

    def check(case):
        response = case.call_and_validate(headers=TOKEN, timeout=20)
        seen.append((case.path, response.status_code))

    for operation in operations:
        for mode in schemathesis.GenerationMode:
            if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                continue  # nothing of the request can be wrong
            fuzzed = given(case=operation.as_strategy(generation_mode=mode))(check)
            settings(
                max_examples=13,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )(fuzzed)()
    for path in ("/score", "/score/batch"):
        assert {(path, 200), (path, 422)} <= set(seen)
    assert len(seen) >= 60 and max(code for _, code in seen) < 500
