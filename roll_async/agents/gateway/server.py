"""The model endpoint of every trajectory: an agent that only changes `base_url` and key is recorded, and trained.

    agent --Authorization: Bearer SECRET--> /v1/chat/completions | /v1/responses | /v1/messages --> Session.turn

One secret per trajectory; what is done with it lands in that trajectory's tree. A request that comes again with the
same id (`Idempotency-Key`, `X-Request-Id`, or a client's own count of retries) gets the reply of the first. A
trajectory that has ended answers 400, which no client tries again, and 401 when its secret is revoked. The server may
be closed and started again: sessions outlive it. Long bodies are read in another process.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from aiohttp import web

from roll_async.agents.gateway.body import DIALECTS, Asked, read
from roll_async.agents.gateway.bounds import MAX_BODY_BYTES
from roll_async.agents.messages import TurnReply
from roll_async.agents.processes.beside import Beside
from roll_async.agents.turn_handler import BadRequest, TrajectoryEnded, TurnHandler

logger = logging.getLogger(__name__)

_INLINE_BYTES, _INLINE_VALUES = 64 << 10, 2000
"""A body of so many bytes and values takes a few milliseconds; to hand it to another process takes as long."""
_REMEMBERED_SECRETS = 4096  # a late request is told that its trajectory has ended
_KEEP_ALIVE_S = 5.0  # between comments in a stream that has no token yet
_RETRY_COUNTS = ("x-stainless-retry-count",)  # of the openai and anthropic clients
_ANSWERED = (BadRequest, TrajectoryEnded, web.HTTPRequestEntityTooLarge, RuntimeError, OSError)
"""Errors of a client, of a limit, and of the engines."""
_IDS = ("idempotency-key", "x-request-id", "x-client-request-id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address and key of the endpoint that an agent gets."""

    base_url: str
    """With /v1, as the openai client expects it; the Anthropic client expects it without."""
    api_key: str
    model: str


class PolicyGateway:
    """The server and the secrets of its sessions."""

    def __init__(
        self,
        *,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        adopt: Callable[[str], TurnHandler | None] | None = None,
    ) -> None:
        """`adopt`: a session for a secret that `open` did not give out (serve-policy)."""
        self._model, self._host, self._port, self._adopt = model, host, port, adopt
        self._sessions: dict[str, TurnHandler] = {}
        self._runner: web.AppRunner | None = None
        self._revoked: dict[str, None] = {}
        """The newest of them."""
        self._reader, self._reading = Beside(), asyncio.Lock()
        self.ignored: Counter[str] = Counter()
        """Number of requests with a field that had no effect, by its name."""

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._handler("chat"))
        app.router.add_post("/v1/responses", self._handler("responses"))
        app.router.add_post("/v1/messages", self._handler("anthropic"))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        # aiohttp's own 60 s for open connections would hold the end of the run.
        self._runner = runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, self._host, self._port).start()
        # With port 0 the system chose one; kept, so that `start` listens there again.
        self._port = runner.addresses[0][1]

    @property
    def base_url(self) -> str:
        """The address with the port on which the server listens."""
        host = f"[{self._host}]" if ":" in self._host else self._host  # IPv6
        return f"http://{host}:{self._port}/v1"

    def open(self, session: TurnHandler) -> Endpoint:
        """Create an endpoint for the session, with a new secret."""
        secret = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[secret] = session
        return Endpoint(base_url=self.base_url, api_key=secret, model=self._model)

    def shut(self, endpoint: Endpoint) -> None:
        """Revoke the secret."""
        if self._sessions.pop(endpoint.api_key, None) is not None:
            self._revoked[endpoint.api_key] = None
            while len(self._revoked) > _REMEMBERED_SECRETS:
                del self._revoked[next(iter(self._revoked))]

    def metrics(self) -> dict[str, float]:
        """`agent/ignored_fields/NAME`: number of requests whose field had no effect."""
        return {f"agent/ignored_fields/{name}": float(count) for name, count in sorted(self.ignored.items())}

    async def close(self) -> None:
        """Stop listening; sessions stay. `start` listens again, on the same port."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
        await asyncio.to_thread(self._reader.close)  # it waits for a process to end

    def _session(self, request: web.Request) -> TurnHandler | None:
        secret = _secret(request)
        found = self._sessions.get(secret)
        if found is None and secret and self._adopt is not None:
            found = self._adopt(secret)
            if found is not None:
                self._sessions[secret] = found
        return found

    async def _models(self, request: web.Request) -> web.Response:
        if self._session(request) is None:
            return self._stranger(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "roll_async"}
        return web.json_response({"object": "list", "data": [model]})

    def _handler(self, dialect: str) -> Callable:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            if session is None:
                return self._stranger(request)
            try:
                asked = await self._asked(dialect, request, session)
                # A task, so that a stream can wait for it in pieces.
                turn = asyncio.ensure_future(session.turn(asked.turn, *_key(request, asked.digest)))
                if asked.stream:
                    return await self._streamed(request, DIALECTS[dialect], turn, asked.include_usage)
                reply = await turn
            except _ANSWERED as error:
                return self._failed(error)
            return web.json_response(DIALECTS[dialect].write(reply, self._model, int(time.time())))

        return handle

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        if session is None:
            return self._stranger(request)
        try:
            asked = await self._asked("anthropic", request, session)
            count = await session.count_tokens(asked.turn)
        except _ANSWERED as error:
            return self._failed(error)
        return web.json_response({"input_tokens": count})

    async def _asked(self, dialect: str, request: web.Request, session: TurnHandler) -> Asked:
        raw = await request.read()
        if _is_short(raw):
            asked = read(dialect, raw, session.takes_sampling)
        else:
            # One at a time in the loop: calls that wait for the one process would each hold a thread.
            async with self._reading:
                asked = await asyncio.to_thread(self._reader.call, read, dialect, raw, session.takes_sampling)
        for name in (*asked.ignored, *(() if session.takes_sampling else asked.sampling)):
            if not self.ignored[name]:
                logger.warning("a request has %s, which has no effect here (docs_roll/gateway_fields.md)", name)
            self.ignored[name] += 1
        return asked

    async def _streamed(
        self, request: web.Request, dialect: ModuleType, turn: asyncio.Future[TurnReply], include_usage: bool
    ) -> web.StreamResponse:
        """Comments while the turn is sampled, then all of it: a turn is sent when its tokens are final. Raises what the
        turn raises before anything is sent.
        """
        await asyncio.wait({turn}, timeout=_KEEP_ALIVE_S)
        # After `prepare` the status is sent, and an error could only be an event.
        if turn.done():
            turn.result()  # for what it raises
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await response.prepare(request)
        try:
            while not turn.done():
                await response.write(b": sampling\n\n")
                await asyncio.wait({turn}, timeout=_KEEP_ALIVE_S)
            for event in self._events(dialect, turn, include_usage):
                await response.write(event.encode())
        except ConnectionError:
            logger.info("a client left its stream; the turn is recorded")
        return response

    def _events(self, dialect: ModuleType, turn: asyncio.Future[TurnReply], include_usage: bool) -> Iterator[str]:
        # The status 200 is sent already: an error can only be an event.
        error = turn.exception()
        if error is None:
            yield from dialect.stream(turn.result(), self._model, int(time.time()), include_usage)
            return
        yield f"event: error\ndata: {json.dumps(_error(str(error), 'trajectory_ended'))}\n\n"

    def _failed(self, error: BaseException) -> web.Response:
        match error:
            case TrajectoryEnded():
                return self._refused(400, f"the trajectory has ended: {error}", "trajectory_ended")
            case web.HTTPRequestEntityTooLarge():
                return self._refused(413, f"the body has more than {MAX_BODY_BYTES} bytes", "request_too_large")
            case BadRequest():
                return self._refused(400, str(error), "invalid_request_error")
            case _:  # of the engines: the client may try again
                return self._refused(503, str(error), "engine_error")

    def _stranger(self, request: web.Request) -> web.Response:
        if _secret(request) in self._revoked:
            return self._refused(401, "the trajectory of this API key has ended", "trajectory_ended")
        return self._refused(401, "unknown API key", "invalid_api_key")

    def _refused(self, status: int, message: str, code: str) -> web.Response:
        return web.json_response(_error(message, code), status=status)


def _error(message: str, code: str) -> dict:
    return {"type": "error", "error": {"message": message, "type": code, "code": code, "param": None}}


def _is_short(raw: bytes) -> bool:
    # These marks are about as many as the values, and counting bytes is quick.
    return len(raw) <= _INLINE_BYTES and sum(map(raw.count, (b"{", b"[", b","))) <= _INLINE_VALUES


def _secret(request: web.Request) -> str:
    given = request.headers.get("authorization", "")
    # The Anthropic client sends x-api-key.
    return given[7:].strip() if given[:7].lower() == "bearer " else request.headers.get("x-api-key", "")


def _key(request: web.Request, digest: str) -> tuple[str, bool]:
    """(what a request that is sent again has in common with the first: its id and its body; whether this one may be
    such). Clients that send no id count their retries; the same body without that is asked anew.
    """
    for name in _IDS:
        if value := request.headers.get(name):
            return f"{name} {value} {digest}", True
    return f"body {digest}", any(request.headers.get(name, "0") != "0" for name in _RETRY_COUNTS)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
