"""A Prometheus endpoint: `http://HOST:PORT/metrics`, one gauge per key, with its newest value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from roll_async.observe.sample_dump import Row

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


def exposition(metrics: Mapping[str, float], *, run: str) -> str:
    """Prometheus text format. `reward/mean` becomes `roll_async_reward_mean{run="..."}`."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = []
    for key, value in sorted(metrics.items()):
        name = "roll_async_" + _NOT_IN_NAMES.sub("_", key)
        # Python writes inf and nan, Prometheus +Inf and NaN.
        shown = repr(float(value)) if math.isfinite(value) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
        lines += [f"# TYPE {name} gauge", f'{name}{{run="{label}"}} {shown}']
    return "\n".join(lines) + "\n"


class PrometheusTracker:
    """`observe/trackers.py: Tracker` that answers GET /metrics from a separate thread. Port 0 = any free one.

    Raises ValueError when the port is taken.
    """

    name = "prometheus"
    keeps_history = False

    def __init__(self, run: str, port: int, host: str = "127.0.0.1") -> None:
        self._run, self._text = run, b""
        self._newest: dict[str, float] = {}
        tracker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.split("?")[0] in ("/metrics", "/")
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.end_headers()
                self.wfile.write(tracker._text if known else b"only /metrics is here\n")

            def log_message(self, format: str, *args: object) -> None:  # else http.server writes each request to stderr
                pass

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ValueError(f"tracking.prometheus_port {port}: {error.strerror}; choose another port") from error
        self.port: int = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._newest |= metrics  # a validation between two logged steps is told without the rest
        # Replaced as a whole: the thread reads it without a lock.
        self._text = exposition(self._newest, run=self._run).encode()

    def samples(self, step: int, picked: Sequence[Row]) -> None:
        pass  # it has numbers alone

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
