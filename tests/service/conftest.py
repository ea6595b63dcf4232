"""Services that the tests of this folder share."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from service_process import ServiceProcess


@pytest.fixture(scope="session")
def free_port():
    import socket

    def find():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find


@pytest.fixture(scope="session")
def start_service(free_port):
    """Start a service; everything started is ended with the session."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("math_verify")
    started = []

    def start(*arguments, port=None, env=None):
        started.append(ServiceProcess(*arguments, port=port or free_port(), env=env))
        started[-1].wait_until_healthy()
        return started[-1]

    yield start
    for service in started:
        service.stop(signal.SIGKILL)


@pytest.fixture(scope="session")
def service(start_service):
    """One that asks for a token, is small and gives up after three seconds: a worker that does not hang may need
    one on a machine that does four things at once.
    """
    return start_service(
        "--timeout", "3", "--max-request-bytes", "1000000", "--max-in-flight", "1024",
        env={"MATH_VERIFY_TOKEN": "secret"},
    )  # fmt: skip
