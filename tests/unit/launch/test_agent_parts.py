"""What trajectories get from the config."""

import asyncio
from contextlib import AsyncExitStack

from roll_async.config.api import load
from roll_async.launch import agents


def test_an_agent_hangs_after_the_time_out_of_the_config(monkeypatch, tmp_path):
    monkeypatch.setattr(agents, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(agents, "TemplateRenderer", lambda tokenizer: None)
    overrides = ("fault.env_timeout=7", f"output_dir={tmp_path}")
    config = load("configs/agentic_frozen_lake_async_cpu.yaml", overrides, "agentic")

    async def silence_s():
        async with AsyncExitStack() as stack:
            return (await agents.agent_parts(config, stack)).silence_s

    assert asyncio.run(silence_s()) == 7
