"""The replicas of a run stop at the end marks of its model, whatever their own files say; no reward reads one."""

import asyncio
import json
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from roll_async.config.api import load
from roll_async.inference.settings import unshown_stops
from roll_async.launch import rollout
from roll_async.launch.evaluation import Report
from roll_async.pipelines.validation import HeldOut
from roll_async.schema import SamplingParams
from tests.family_tokenizers import save_family


def started(config, monkeypatch):
    """The options that the manager of the replicas gets."""
    given = []

    async def nothing(*_):
        return []

    def build(clients, starter, options, **limits):
        given.append(options)
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


@pytest.fixture
def ends_in_a_word(tmp_path):
    """(folder, tokenizer) of a model that also stops at a token which is not special."""
    tokenizer = save_family("qwen-3", tmp_path)
    word = tokenizer.convert_tokens_to_ids("</tool_call>")
    save_family("qwen-3", tmp_path, generation={"eos_token_id": [258, word]})
    return str(tmp_path), tokenizer


def answers_of(tokenizer):
    """Token ids, and what they say."""
    plain = tokenizer.encode("so 4", add_special_tokens=False)
    return [[*plain, tokenizer.convert_tokens_to_ids(end)] for end in ("<|im_end|>", "</tool_call>")], ["so 4"] * 2


def test_rewards_read_an_answer_without_its_end_mark(ends_in_a_word, monkeypatch):
    pytest.importorskip("ray")
    from roll_async.cluster.roles import reward_group

    folder, tokenizer = ends_in_a_word
    given = []

    class Calls:
        async def start(self, decode, thoughts):
            given.append(decode)

    monkeypatch.setattr(reward_group, "ActorHandle", object)
    started = SimpleNamespace(remote=lambda rewards: object())
    monkeypatch.setattr(reward_group, "RewardHost", SimpleNamespace(options=lambda **_: started))
    monkeypatch.setattr(reward_group.HostPlan, "calls", lambda *_: Calls())

    async def of_the_plan(plan):
        await plan.start(0)
        return SimpleNamespace(close=None)

    monkeypatch.setattr(rollout.RayScorer, "start", of_the_plan)
    keys = f"pretrain={folder}", "actor_infer.generating_args.stop_strings=[' 4']"
    config = load("configs/rlvr_config_async_cpu.yaml", keys, "rlvr")
    asyncio.run(rollout.start_scorer(config, AsyncExitStack()))
    ids, texts = answers_of(tokenizer)
    assert list(given[0](ids)) == texts
    assert list(given[0]([tokenizer.encode("so 4")])) == ["so"]


def test_the_samples_of_an_evaluation_are_shown_without_their_end_marks(ends_in_a_word, build):
    folder, tokenizer = ends_in_a_word
    keys = f"pretrain={folder}", "validation.generating_args.stop_strings=[' 4']"
    prompt, report = build.prompt(), Report(load("configs/rlvr_config_async_cpu.yaml", keys, "rlvr"))
    ids, texts = answers_of(tokenizer)
    ids, texts = [*ids, tokenizer.encode("so 4")], [*texts, "so"]
    samples = [build.sample(prompt, ids=tuple(one)) for one in ids]
    report.add(HeldOut("", [prompt], SamplingParams(max_new_tokens=9)), [(prompt, samples)])
    assert [record["response"] for record in report.evaluation({}).samples] == texts


def test_an_answer_keeps_its_stop_string_where_the_config_says_so():
    keys = "actor_infer.generating_args.stop_strings=[a]", "validation.generating_args.stop_strings=[b,a]"
    shown = "actor_infer.generating_args.include_stop_str_in_output=true"
    for given, expected in ((keys, ("a", "b")), ((*keys, shown), ("b",)), ((keys[0], shown), ())):
        assert unshown_stops(load("configs/rlvr_config_async_cpu.yaml", given, "rlvr")) == expected
