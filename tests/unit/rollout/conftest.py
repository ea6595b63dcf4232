"""A manager over replicas, and requests under way."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.manager_options import ManagerOptions


@pytest.fixture
def managed():
    """`async with managed(*replicas, **options) as manager`."""

    @asynccontextmanager
    async def manage(*replicas, **options):
        patient = {"silence_s": 1e6}  # these replicas tell of their progress only when a test says so
        manager = EnginePool(replicas, ManagerOptions(**{**patient, **options}))
        await manager.start()
        try:
            yield manager
        finally:
            await manager.close()

    return manage


@pytest.fixture
def start():
    """`start(manager, requests)`: their tasks."""
    return lambda manager, requests, **options: [asyncio.create_task(manager.generate(r, **options)) for r in requests]
