"""A run follows `roll-async scale`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

from roll_async.buffer.message_queue import MessageQueue
from roll_async.launch.engines import ReplicaStarter
from roll_async.observe.replica_requests import ReplicaRequest, ReplicaRequests
from roll_async.pipelines.wire import Engines

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5


async def follow_requests(
    folder: Path, engines: Engines, starter: ReplicaStarter, queue: MessageQueue, stack: AsyncExitStack
) -> None:
    """Answer what is asked in this run folder until the stack closes."""
    requests = ReplicaRequests(folder)
    requests.open()
    stack.callback(requests.close)
    following = asyncio.create_task(_follow(requests, engines, starter, queue), name="replica requests")
    stack.callback(following.cancel)


async def _follow(requests: ReplicaRequests, engines: Engines, starter: ReplicaStarter, queue: MessageQueue) -> None:
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        try:
            if (request := requests.take()) is not None:
                text, refused = obey(request, engines, starter, queue)
                requests.answer(request, text, refused=refused)
        except (OSError, ValueError, KeyError) as error:  # a broken request must not end the run
            logger.warning("a request for replicas can not be read or answered: %s: %s", type(error).__name__, error)


def obey(request: ReplicaRequest, engines: Engines, starter: ReplicaStarter, queue: MessageQueue) -> tuple[str, bool]:
    """The answer in words, and whether it is a refusal: then nothing has changed."""
    found: list[str] = []
    try:
        if request.replicas is not None:
            starter.refuse(request.replicas)  # first, so that a refusal has changed nothing
        if request.max_queue_size is not None:
            queue.resize(request.max_queue_size)
            found.append(f"max_queue_size {request.max_queue_size}")
    except ValueError as error:
        return str(error), True
    if request.replicas is not None:
        before = len(engines.supervisor.names)
        join, leave = engines.supervisor.scale(request.replicas)
        found.append(f"{before} -> {request.replicas} replicas")
        if join:
            found.append(f"{', '.join(join)} join{'s' if len(join) == 1 else ''} when devices and weights are there")
        if leave:
            found.append(f"{', '.join(leave)} leave{'s' if len(leave) == 1 else ''}")
    text = "; ".join(found)
    logger.info("scale: %s", text)
    return text, False
