"""An OpenAI-compatible server that gives log-probs of prompts, as distillation teachers behind an address do."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class EchoServer(ThreadingHTTPServer):
    """The log-prob of token t is -t / 64, exact in float32."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.decode, self.url = decode, f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[dict] = []
        self.says: list[tuple[int, object]] = []
        """Answers in place of log-probs, first come first."""


class _Handler(BaseHTTPRequestHandler):
    server: EchoServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "big"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.says:
            return self._answer(*self.server.says.pop(0))
        ids = body["prompt"]
        # One token more than was asked about, as `max_tokens: 1` wants it.
        found = {"token_logprobs": [None, *(-i / 64 for i in ids[1:]), -9.0]}
        return self._answer(200, {"choices": [{"text": self.server.decode(ids) + "!", "logprobs": found}]})

    def _answer(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def echo_server(decode: Callable[[Sequence[int]], str] = str) -> Iterator[EchoServer]:
    """Serves within the block."""
    server = EchoServer(decode)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
