"""The replicas of a run stop at the end marks of its model, whatever their own files say."""

import asyncio
import json
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from roll_async.config.api import load
from roll_async.launch import rollout
from tests.family_tokenizers import save_family


def started(config, monkeypatch):
    """The options that the manager of the replicas gets."""
    given = []

    async def nothing(*_):
        return []

    def build(clients, starter, options):
        given.append(options.manager)
        return SimpleNamespace(start=nothing)

    monkeypatch.setattr(rollout, "build_engines", build)

    async def start():
        async with AsyncExitStack() as stack:
            starter = SimpleNamespace(start_all=nothing)
            await rollout.start_engines(config, starter, nothing(), stack)

    asyncio.run(start())
    return given[0]


def test_an_agentic_run_stops_where_its_template_ends_a_turn_and_says_that_the_files_do_not(
    tmp_path, monkeypatch, caplog
):
    tokenizer = save_family("qwen-3", tmp_path, generation={"eos_token_id": 256}, config={"eos_token_id": 256})
    config = load("configs/agentic_frozen_lake_async_cpu.yaml", (f"pretrain={tmp_path}",), "agentic")
    options = started(config, monkeypatch)
    assert options.end_ids == (256, 258) and tokenizer.decode([258]) == "<|im_end|>"
    assert [record.getMessage() for record in caplog.records] == [
        "end marks: engines stop also at '<|im_end|>' (258; by the tokenizer, the chat template)"
    ]


@pytest.mark.parametrize(("trained", "held_out"), [("base", "base"), ("native", "base"), ("base", "native")])
def test_questions_stop_by_the_templates_of_their_data(trained, held_out, tmp_path, monkeypatch, caplog):
    tokenizer = save_family("glm-4", tmp_path, generation={"eos_token_id": 256}, config={"eos_token_id": 256})
    templates = (f"actor_train.data_args.template={trained}", f"validation.data_args.template={held_out}")
    config = load("configs/rlvr_config_async_cpu.yaml", (f"pretrain={tmp_path}", *templates), "rlvr")
    ends = started(config, monkeypatch).end_ids
    heads = ["<|user|>", "<|observation|>"] if "native" in (trained, held_out) else []
    assert [tokenizer.decode([i]) for i in ends] == ["<|endoftext|>", *heads]
    assert len(caplog.records) == bool(heads)


def test_sources_that_agree_are_not_spoken_of(tmp_path, monkeypatch, caplog):
    save_family("glm-4", tmp_path)
    config = load("configs/agentic_frozen_lake_async_cpu.yaml", (f"pretrain={tmp_path}",), "agentic")
    ends = started(config, monkeypatch).end_ids
    assert list(ends) == json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert not caplog.records
