"""The page of `roll-async view`: served on loopback while a run goes on, or written as one file without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from roll_async.observe.reading.run_reader import RunReader, config_differences
from roll_async.observe.reading.sample_index import SampleFilter

T = TypeVar("T")
_PAGE = Path(__file__).parent / "page"
_FILES = ("uplot.css", "view.css", "uplot.js", "tokens.js", "view.js")
_HOSTS = ("127.0.0.1", "localhost")
_ROWS_IN_FILE, _BYTES_IN_FILE = 2000, 20 << 20
"""Newest samples that a page without a server has."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'"
)


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Metrics by key, one value a row; 5 digits are more than a chart shows; whole numbers stay whole."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [_short(row.get(key)) for row in rows] for key in keys}


def _short(value: float | None) -> float | None:
    return value if value is None or value % 1 == 0 else float(f"{value:.5g}")


class PageServer:
    """Answers the page's questions about some runs."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs = list(runs)
        self._one_at_a_time = asyncio.Lock()  # readers are of one thread

    async def start(self, port: int) -> tuple[web.AppRunner, int]:
        """Serve on loopback; the runner to clean up, and the port. Raises OSError for a port in use."""
        app = web.Application(middlewares=[_guarded])
        app.add_routes(
            [
                web.get("/", self._index),
                web.static("/page", _PAGE),
                web.get("/api/runs", self._about),
                web.get("/api/differences", self._differences),
                web.get("/api/runs/{run}/metrics", self._metrics),
                web.get("/api/runs/{run}/lanes", self._lanes),
                web.get("/api/runs/{run}/samples", self._samples),
                web.get("/api/runs/{run}/groups/{sample}", self._group),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner, int(runner.addresses[0][1])

    async def _read(self, work: Callable[[], T]) -> T:
        async with self._one_at_a_time:
            return await asyncio.to_thread(work)

    def _run(self, request: web.Request) -> RunReader:
        number = request.match_info["run"]
        if not number.isdecimal() or int(number) >= len(self._runs):
            raise web.HTTPNotFound
        return self._runs[int(number)]

    async def _index(self, request: web.Request) -> web.Response:
        return web.Response(text=(_PAGE / "index.html").read_text("utf-8"), content_type="text/html")

    async def _about(self, request: web.Request) -> web.Response:
        return web.json_response(await self._read(lambda: _about(self._runs)))

    async def _differences(self, request: web.Request) -> web.Response:
        return web.json_response(await self._read(lambda: _differences(self._runs)))

    async def _metrics(self, request: web.Request) -> web.Response:
        run, known = self._run(request), _number(request, "from") or 0
        rows = await self._read(lambda: run.metrics)
        begin = int(known) if (_number(request, "generation") or 0) == run.generation else 0
        return web.json_response({"generation": run.generation, "from": begin, "columns": columns(rows[begin:])})

    async def _lanes(self, request: web.Request) -> web.Response:
        run = self._run(request)
        return web.json_response(await self._read(lambda: run.lanes))

    async def _samples(self, request: web.Request) -> web.Response:
        run, query = self._run(request), request.query
        try:
            asked = SampleFilter(
                domain=query.get("domain"),
                outcome=query.get("outcome"),
                order=query.get("order", "newest"),
                lowest=_number(request, "lowest"),
                highest=_number(request, "highest"),
                first_step=_step(request, "first_step"),
                last_step=_step(request, "last_step"),
            )
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        offset = int(_number(request, "offset") or 0)

        def read() -> dict[str, object]:
            run.samples.refresh()
            count, rows = run.samples.page(asked, offset=offset)
            return {"count": count, "rows": rows, "choices": run.samples.choices()}

        return web.json_response(await self._read(read))

    async def _group(self, request: web.Request) -> web.Response:
        run, number = self._run(request), request.match_info["sample"]
        if not number.isdecimal():
            raise web.HTTPNotFound
        try:
            return web.json_response(await self._read(lambda: run.samples.group_of(int(number))))
        except (KeyError, OSError, ValueError) as error:  # the file was set aside since the list was made
            raise web.HTTPNotFound from error


@web.middleware
async def _guarded(request: web.Request, handler: Callable[..., object]) -> web.StreamResponse:
    """Pages of other sites cannot read the answers under a name of their own that leads here, nor run a script here."""
    if request.host.rpartition(":")[0] not in _HOSTS:
        raise web.HTTPForbidden(text="ask for 127.0.0.1")
    response = await handler(request)  # type: ignore[misc]
    response.headers.update({"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})
    return response


def _number(request: web.Request, name: str) -> float | None:
    text = request.query.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"{name}: expected a number, got {text!r}") from error


def _step(request: web.Request, name: str) -> int | None:
    number = _number(request, name)
    return None if number is None else round(number)


def _about(runs: Sequence[RunReader]) -> list[dict[str, object]]:
    """What is said of each run, under a name that tells it from the others: with as many parents as that takes."""

    def name(run: RunReader) -> str:
        tails = [run.path.parts[-n:] for n in range(1, len(run.path.parts))]
        own = (tail for tail in tails if sum(other.path.parts[-len(tail) :] == tail for other in runs) == 1)
        return "/".join(next(own, tails[-1]))

    return [run.about() | {"name": name(run)} for run in runs]


def _differences(runs: Sequence[RunReader]) -> list[tuple[str, str, str]]:
    return config_differences(runs[0], runs[1]) if len(runs) > 1 else []


def self_contained(runs: Sequence[RunReader]) -> tuple[str, str]:
    """(the page with its scripts, styles and data inside, of how many samples those are); the newest of each run."""
    samples, inside, there = zip(*map(_newest, runs), strict=True)
    data = {
        "runs": _about(runs),
        "differences": _differences(runs),
        "metrics": [columns(run.metrics) for run in runs],
        "lanes": [run.lanes for run in runs],
        "samples": samples,
    }
    # Inside of a script element nothing but `<` could end it.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = (_PAGE / "index.html").read_text("utf-8")
    for name in _FILES:
        text = (_PAGE / name).read_text("utf-8")
        if name.endswith(".css"):
            page = page.replace(f'<link rel="stylesheet" href="page/{name}">', f"<style>{text}</style>")
        else:
            page = page.replace(f'<script src="page/{name}"></script>', f"<script>{text}</script>")
    page = page.replace('<script id="data" type="application/json"></script>',
                        f'<script id="data" type="application/json">{embedded}</script>')  # fmt: skip
    return page, f"{sum(inside)} of {sum(there)} samples"


def _newest(run: RunReader) -> tuple[dict[str, object], int, int]:
    """(entries and whole groups until the limit of rows or bytes, one group at least, the number of them and of all)"""
    run.samples.refresh()
    count, entries = run.samples.page(SampleFilter(), limit=_ROWS_IN_FILE)
    groups: dict[str, list[dict[str, object]]] = {}
    kept, size = [], 0
    for entry in entries:
        name = f"{entry['step']}/{entry['group_id']}"
        if name not in groups:
            rows = run.samples.group_of(entry["id"])  # type: ignore[arg-type]
            size += len(json.dumps(rows))
            if size > _BYTES_IN_FILE and groups:
                break
            groups[name] = rows
        kept.append(entry)
    return {"rows": kept, "groups": groups, "choices": run.samples.choices()}, len(kept), count
