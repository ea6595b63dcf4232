"""What trajectories get from the config."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from roll_async.agents.messages import Message
from roll_async.config.api import load
from roll_async.config.schema_rollout import ToolConfig
from roll_async.launch import agents
from roll_async.launch.rollout import prompts_of
from roll_async.prompts.tokenizer import load_tokenizer


def test_an_agent_hangs_after_the_time_out_of_the_config(monkeypatch, tmp_path):
    monkeypatch.setattr(agents, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(agents, "TemplateRenderer", lambda tokenizer: None)
    overrides = ("fault.env_timeout=7", f"output_dir={tmp_path}")
    config = load("configs/agentic_frozen_lake_async_cpu.yaml", overrides, "agentic")

    async def silence_s():
        async with AsyncExitStack() as stack:
            return (await agents.agent_parts(config, stack)).silence_s

    assert asyncio.run(silence_s()) == 7


def test_variables_of_the_template_reach_prompts_validation_and_agents_from_one_key(tmp_path):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    fast.chat_template = "{{ messages[-1].content }}{{ ' ' + mood | default('any') }}"
    fast.save_pretrained(tmp_path)
    row = {"id": "1", "messages": [{"role": "user", "content": "1+1?"}], "ground_truth": "2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    variables = (f"pretrain={tmp_path}", f"output_dir={tmp_path}", "actor_train.data_args.template_kwargs={mood: calm}")

    config = load("configs/agentic_frozen_lake_async_cpu.yaml", variables, "agentic")

    async def said():
        async with AsyncExitStack() as stack:
            renderer = (await agents.agent_parts(config, stack)).renderer
            return renderer.render([Message(role="user", content="1+1?")], [], []).text

    assert asyncio.run(said()) == "1+1? calm"
    files = [f"{part}.data_args.file_name={tmp_path}/rows.jsonl" for part in ("actor_train", "validation")]
    more = f"validation.sets={{own: {{data_args: {{file_name: {tmp_path}/rows.jsonl, template_kwargs: {{}}}}}}}}"
    stream, _, held_out = prompts_of(load("configs/rlvr_config_async_cpu.yaml", [*variables, *files, more], "rlvr"))
    prompts = {"train": stream.at(0), **{name: found[0] for name, found in held_out.items()}}
    decoded = {name: load_tokenizer(str(tmp_path)).decode(prompt.token_ids) for name, prompt in prompts.items()}
    assert decoded == {"train": "1+1? calm", "": "1+1? calm", "own": "1+1? any"}


def test_tools_with_a_template_that_shows_no_results_are_refused_at_the_start(monkeypatch, tmp_path):
    class Deaf:
        def __init__(self, tokenizer):
            pass

        def between(self, last_token, results):
            raise ValueError("the chat template does not render turns of role user")

    monkeypatch.setattr(agents, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(agents, "told", lambda tokenizer, *given: tokenizer)
    monkeypatch.setattr(agents, "TemplateRenderer", Deaf)
    config = load("configs/agentic_frozen_lake_async_cpu.yaml", (f"output_dir={tmp_path}",), "agentic")

    async def parts():
        async with AsyncExitStack() as stack:
            await agents.agent_parts(config, stack)

    asyncio.run(parts())  # without tools it does not matter
    for tag, env in config.custom_envs.items():
        config.custom_envs[tag] = replace(env, tools=(ToolConfig(tool_id="calculator"),))
    with pytest.raises(ValueError, match="does not render turns of role user"):
        asyncio.run(parts())
