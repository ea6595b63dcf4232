"""A replica that was started again and holds the weights."""

import asyncio

from roll_async.pipelines.wire import build_engines
from roll_async.rollout.dispatch.manager_options import ManagerOptions


def test_one_that_hangs_in_resume_holds_a_push_no_longer_than_one_that_serves(run, replica_class):
    async def go():
        serving, replica = replica_class("a"), replica_class("b")

        async def hang():
            await asyncio.sleep(1e6)

        replica.resume = hang
        options = ManagerOptions(interrupt_timeout_s=5.0)
        engines = build_engines([serving], None, options, max_restarts=0, start_timeout_s=3600.0)
        engines.manager.returning.attach(asyncio.Event())
        engines.manager.returning.hold(replica)
        began = asyncio.get_running_loop().time()
        await engines.manager.returning.rejoin(replica)
        assert asyncio.get_running_loop().time() - began == 5.0 and not engines.manager.returning.holding

    run(go())
