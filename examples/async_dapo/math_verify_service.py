"""Math verify service: answers judged over HTTP by isolated worker processes.

    python examples/async_dapo/math_verify_service.py [--host 127.0.0.1] [--port 8300] [--workers 2]

    POST /score        {"text": "... \\\\boxed{18}", "ground_truth": "18"} -> one verdict
    POST /score/batch  {"items": [...]} -> {"verdicts": [...]}, in order
    GET  /health       200 while it serves
    GET  /metrics      Prometheus

A verdict has a `score` only with `status` ok; `timeout` and `error` are states of their own. Busy is 429 and broken is
503, both with Retry-After: neither is ever a verdict. Another address than loopback needs a token, taken from an
environment variable (`--token-env`) and sent as `Authorization: Bearer TOKEN`. SIGTERM and SIGINT stop it after the
replies under way. Text of a model is parsed in the worker processes only (`roll_async/rewards/serving/pool.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from roll_async.rewards.registry import create_reward
from roll_async.rewards.serving.pool import RewardPool, RewardPoolOptions
from roll_async.schema import Reward, RewardStatus

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response, Security
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from fastapi.security import HTTPBearer
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from pydantic import BaseModel, ConfigDict, Field
    from service_gate import Gate, problem
except ImportError as error:
    sys.exit(f"math_verify_service: {error}; pip install 'roll_async[service]'")

MAX_BATCH = 1024
_RETRY_AFTER = {"Retry-After": "1"}
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Limits of one service."""

    workers: int = 2
    """Processes that judge."""
    timeout_s: float = 5.0
    """One sample, from the moment a worker takes it."""
    memory_mb: int = 4096
    """Address space of a worker."""
    max_request_bytes: int = 8 << 20
    max_in_flight: int = 2048
    """Samples accepted and not answered; more are refused with 429."""
    token: str | None = None
    """What clients must present; None = nobody asks."""
    reward: str = "math_rule"
    """What judges: math_rule, or the dotted path of another reward."""

    def __post_init__(self) -> None:
        if self.max_in_flight < MAX_BATCH:
            raise ValueError(f"--max-in-flight {self.max_in_flight} is below the largest batch, {MAX_BATCH}")


class Sample(BaseModel):
    """One response to judge."""

    model_config = ConfigDict(extra="forbid")
    text: str
    """The whole response of the model."""
    ground_truth: str
    extra: dict[str, str] = Field(default_factory=dict)
    """Further columns of the row."""


class Batch(BaseModel):
    """Samples judged side by side."""

    model_config = ConfigDict(extra="forbid")
    items: Annotated[list[Sample], Field(max_length=MAX_BATCH)]


class Verdict(BaseModel):
    """score, acc and format are numbers with status ok, else null."""

    status: Literal["ok", "timeout", "error"]
    score: float | None
    acc: float | None
    format: float | None
    reason: str
    scoring_s: float


class Verdicts(BaseModel):
    """In the order of the items."""

    verdicts: list[Verdict]


class Health(BaseModel):
    """What is going on."""

    status: Literal["ok"]
    workers: int
    in_flight: int
    timeouts: int
    crashes: int


class Problem(BaseModel):
    """Why there is no verdict."""

    detail: str


class Meters:
    """The service's own registry: two services in one process do not share counters."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        place = {"registry": self.registry}
        self.requests = Counter("math_verify_requests", "Replies by path and status", ["path", "code"], **place)
        self.verdicts = Counter("math_verify_verdicts", "Verdicts by state", ["status"], **place)
        self.scoring = Histogram("math_verify_scoring_seconds", "Of one sample in a worker", buckets=_SECONDS, **place)
        self.latency = Histogram("math_verify_request_seconds", "Of one request", buckets=_SECONDS, **place)
        # Read when somebody asks.
        for name, text, read in (
            ("in_flight", "Samples accepted and not answered", lambda: service.in_flight),
            ("workers", "Worker processes", lambda: service.options.workers),
            ("worker_timeouts", "Workers replaced because a sample took too long", lambda: service.pool.timeouts),
            ("worker_crashes", "Workers replaced because a sample ended them", lambda: service.pool.crashes),
        ):
            Gauge(f"math_verify_{name}", text, **place).set_function(read)

    def observe_request(self, path: str, code: int, seconds: float) -> None:
        """Count one reply; code 0 = the client went away before there was one."""
        known = path if path in ("/score", "/score/batch", "/health", "/metrics") else "other"
        self.requests.labels(known, code or "disconnected").inc()
        self.latency.observe(seconds)


class Service:
    """The pool behind its limit of samples in flight."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.in_flight = 0
        self.pool = RewardPool(
            RewardPoolOptions(
                reward=options.reward,
                num_workers=options.workers,
                timeout_s=options.timeout_s,
                memory_mb=options.memory_mb,
            )
        )
        self.meters = Meters(self)

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Room for `count` samples; 429 when there is none."""
        if self.in_flight + count > self.options.max_in_flight:
            raise HTTPException(429, f"{self.in_flight} samples are waiting; come back later", _RETRY_AFTER)
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count

    async def score(self, sample: Sample) -> Verdict:
        """Raises 503 when no worker can judge: an outage is no verdict."""
        reward = await self.pool.score(sample.text, sample.ground_truth, sample.extra)
        self.meters.verdicts.labels(reward.status.value).inc()
        if reward.status is RewardStatus.OUTAGE:
            raise HTTPException(503, f"no worker can judge: {reward.reason}", _RETRY_AFTER)
        self.meters.scoring.observe(reward.scoring_s)
        return _verdict(reward)


def _verdict(reward: Reward) -> Verdict:
    judged = reward.status is RewardStatus.OK
    return Verdict(
        status=reward.status.value,  # type: ignore[arg-type]  # outage has left before
        score=reward.score if judged else None,
        acc=reward.metrics["acc"] if judged else None,
        format=reward.metrics["format"] if judged else None,
        reason=reward.reason.encode(errors="replace").decode(),  # half a surrogate pair has no place in a reply
        scoring_s=reward.scoring_s,
    )


async def while_connected(request: Request, work: Coroutine[None, None, Answer]) -> Answer:
    """The answer; when the client goes away first, the work is cancelled and its places are free again."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise HTTPException(499, "the client is gone")
        return doing.result()
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


def create_app(options: Options) -> FastAPI:
    """The ASGI application; its lifespan starts and ends the workers."""
    service = Service(options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.pool.start()
        yield
        await service.pool.close()

    app = FastAPI(title="math verify service", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(
        Gate, token=options.token, max_bytes=options.max_request_bytes, observed=service.meters.observe_request
    )
    app.add_exception_handler(RequestValidationError, _not_valid)
    secured = [] if options.token is None else [_bearer()]
    problems = {code: {"model": Problem} for code in (400, 408, 413, 422, 429, 503)}
    denied = {} if options.token is None else {401: {"model": Problem}}

    @app.post("/score", responses={**problems, **denied}, dependencies=secured)
    async def score(sample: Sample, request: Request) -> Verdict:
        """Judge one response."""
        with service.places(1):
            return await while_connected(request, service.score(sample))

    @app.post("/score/batch", responses={**problems, **denied}, dependencies=secured)
    async def score_batch(batch: Batch, request: Request) -> Verdicts:
        """Judge several responses side by side; the reply comes with the last one."""

        async def all_of_them() -> list[Verdict]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(service.score(sample)) for sample in batch.items]
            return [task.result() for task in tasks]

        with service.places(len(batch.items)):
            try:
                return Verdicts(verdicts=await while_connected(request, all_of_them()))
            except* HTTPException as group:
                raise _first(group) from None

    @app.get("/health")
    async def health() -> Health:
        """Whether it serves, and what it is doing. Needs no token."""
        pool = service.pool
        return Health(
            status="ok",
            workers=options.workers,
            in_flight=service.in_flight,
            timeouts=pool.timeouts,
            crashes=pool.crashes,
        )

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, **denied},
        dependencies=secured,
    )
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(service.meters.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _bearer() -> object:
    """Names the scheme in the OpenAPI document; `Gate` is what checks it, before the body is read."""
    return Security(HTTPBearer(auto_error=False))


def _first(group: BaseExceptionGroup) -> BaseException:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


async def _not_valid(request: Request, error: Exception) -> JSONResponse:
    """What is wrong and where; the text itself is not sent back."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])).encode(errors="replace").decode()[:200]
    return problem(422, f"{place}: {first['msg']}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse(argv: list[str]) -> tuple[argparse.Namespace, Options]:
    """The command line. Exits with 2 for what a user can mend."""
    defaults = Options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="any other than loopback needs a token")
    parser.add_argument("--port", type=int, default=8300, help="0 = a free one, named in the first line of output")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that judge")
    parser.add_argument("--reward", default=defaults.reward, help="what judges; a dotted path for code of your own")
    parser.add_argument("--timeout", type=float, default=defaults.timeout_s, help="seconds of one sample in a worker")
    parser.add_argument("--memory-mb", type=int, default=defaults.memory_mb, help="address space of a worker, MiB")
    parser.add_argument("--max-request-bytes", type=int, default=defaults.max_request_bytes)
    parser.add_argument("--max-in-flight", type=int, default=defaults.max_in_flight, help="samples; beyond them 429")
    parser.add_argument("--max-connections", type=int, default=1024, help="beyond them 503")
    parser.add_argument(
        "--stop-timeout", type=int, default=60, help="seconds the replies under way may take at the end"
    )
    parser.add_argument("--token-env", default="MATH_VERIFY_TOKEN", help="environment variable with the token")
    args = parser.parse_args(argv)
    token = os.environ.get(args.token_env) or None
    if token is None and not is_loopback(args.host):
        parser.error(f"--host {args.host} is not loopback: put a token into the environment variable {args.token_env}")
    if args.workers < 1 or args.timeout <= 0 or args.memory_mb < 512 or args.max_request_bytes < 1:
        parser.error("--workers >= 1, --timeout > 0, --memory-mb >= 512 and --max-request-bytes >= 1 are expected")
    if not 0 <= args.port <= 65535:
        parser.error(f"--port {args.port} is not between 0 and 65535")
    try:
        create_reward(args.reward)
        options = Options(
            workers=args.workers,
            timeout_s=args.timeout,
            memory_mb=args.memory_mb,
            max_request_bytes=args.max_request_bytes,
            max_in_flight=args.max_in_flight,
            token=token,
            reward=args.reward,
        )
    except ValueError as error:
        parser.error(str(error))
    return args, options


def main() -> int:
    """Serve until a signal comes. Exit 0: stopped as asked; 3: it could not start."""
    args, options = parse(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = uvicorn.Config(
        create_app(options),
        host=args.host,
        port=args.port,
        log_config=None,
        access_log=False,
        limit_concurrency=args.max_connections,
        timeout_graceful_shutdown=args.stop_timeout,
        server_header=False,
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal once more when it has stopped; by then everything is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.run()
    return 0 if server.started else 3


if __name__ == "__main__":
    sys.exit(main())
