"""What stands before the math verify service: the token, the size and the time of a request's body."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BODY_TIMEOUT_S = 30.0
"""A body that does not arrive in this time gives its place to another."""
_BUFFERED_REQUESTS = 16
"""Bodies of the largest allowed size held at once, by all connections together."""
_RETRY_AFTER = {"Retry-After": "1"}
_CLOSE = {"Connection": "close"}
"""What is left of the body is not read."""


class Gate:
    """Middleware: a request comes through with the token, and with a body that is small enough and arrives in time."""

    def __init__(
        self, app: ASGIApp, *, token: str | None, max_bytes: int, observed: Callable[[str, int, float], None]
    ) -> None:
        """`token`: what must be presented, None = nothing. `observed(path, status, seconds)` is told of every reply."""
        self._app, self._token, self._max_bytes, self._observed = app, token, max_bytes, observed
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Its body is read whole here, within the limits, and handed on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, code = time.perf_counter(), 0

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            if not self._allowed(scope):
                headers = {"WWW-Authenticate": "Bearer"}
                await problem(401, "a token is needed: Authorization: Bearer TOKEN", headers)(scope, receive, counted)
                return
            await self._with_body(scope, receive, counted)
        finally:
            self._observed(scope["path"], code, time.perf_counter() - started)

    def _allowed(self, scope: Scope) -> bool:
        if self._token is None or scope["path"] == "/health":
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + self._token.encode())

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(_BODY_TIMEOUT_S):
                    refusal = await self._read(scope, receive, body)
            except TimeoutError:
                refusal = problem(408, f"no whole body within {_BODY_TIMEOUT_S:g} s", _CLOSE)
            except ConnectionResetError:
                return  # nobody is there to be told
            if refusal is None:
                await self._app(scope, _replay(bytes(body), receive), send)
            else:
                await refusal(scope, receive, send)
        finally:
            self._buffered -= len(body)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> JSONResponse | None:
        """The request's body into `body`; why not, when it is too much. Raises ConnectionResetError when the client
        goes away.
        """
        too_large = problem(413, f"the body is larger than {self._max_bytes} bytes", _CLOSE)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            return too_large
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            piece, more = message.get("body", b""), message.get("more_body", False)
            self._buffered += len(piece)
            body += piece
            if len(body) > self._max_bytes:
                return too_large
            if self._buffered > _BUFFERED_REQUESTS * self._max_bytes:
                return problem(429, "too many large requests at once", {**_RETRY_AFTER, **_CLOSE})
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body at once, then whatever the connection says (that it is gone)."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


def problem(code: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Why there is no verdict."""
    return JSONResponse({"detail": detail}, code, headers)
