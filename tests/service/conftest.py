"""Services that the tests of this folder share."""

import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from service_process import ServiceProcess

from tests.patience import patient


@pytest.fixture(scope="session")
def own_port():
    """Ports that nobody else gets until the session ends, for services to listen on, again and again."""
    pytest.importorskip("ray")
    from roll_async.cluster.network import held_port

    with ExitStack() as held:
        yield lambda: held.enter_context(held_port("127.0.0.1"))


@pytest.fixture(scope="session")
def start_service(own_port):
    """Start a service; everything started is ended with the session."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("math_verify")
    started = []

    def start(*arguments, port=None, env=None):
        started.append(ServiceProcess(*arguments, port=port or own_port(), env=env))
        started[-1].wait_until_healthy()
        return started[-1]

    yield start
    for service in started:
        service.stop(signal.SIGKILL)


@pytest.fixture(scope="session")
def service(start_service):
    """One that asks for a token, is small and gives up soon."""
    return start_service(
        "--timeout", f"{patient(3):.1f}", "--max-request-bytes", "1000000", "--max-in-flight", "1024",
        env={"MATH_VERIFY_TOKEN": "secret"},
    )  # fmt: skip
