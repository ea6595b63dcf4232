"""The math verify service as its own process, as its users start it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "async_dapo" / "math_verify_service.py"


class ServiceProcess:
    """One service on a port of its own."""

    def __init__(self, *arguments, port, env=None):
        command = [sys.executable, str(SCRIPT), "--port", str(port), "--workers", "1", *arguments]
        self.url = f"http://127.0.0.1:{port}"
        # The bare script: neither an installed package nor PYTHONPATH helps it to find its modules.
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.process = subprocess.Popen(command, env={**inherited, **(env or {})}, cwd="/", stderr=subprocess.DEVNULL)

    def wait_until_healthy(self):
        deadline = time.monotonic() + patient(60)
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                    return json.loads(reply.read())
            except OSError:
                assert self.process.poll() is None, f"the service ended with {self.process.returncode}"
                assert time.monotonic() < deadline, "the service does not start"
                time.sleep(0.1)

    def ask(self, path, body=None, **headers):
        """(status, headers, body as text) of one request; a body that is no bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=patient(30)) as reply:
                return reply.status, reply.headers, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    def stop(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(patient(30))
