"""The groups of a step in verl's form, against a loop over tokens, and against the row that verl's document shows."""

import json
from array import array
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from roll_async.trainer.dataproto import StepGroups

EXTRA = {
    "data_source": "openai/gsm8k",
    "ability": "math",
    "extra_info": json.dumps({"answer": "#### 35", "index": 1421, "question": "Xavier?", "split": "train"}),
}


def groups(build):
    prompt = replace(build.prompt(ids=(5, 6)), ground_truth="35", extra=EXTRA)
    tool = build.sample(
        prompt, (7, 8, 9, 10), ((3, 1), (4, 3)), 0.25, loss_mask=b"\x01\x00\x00\x01",
        behaviour_logprobs=array("f", [-0.1, -9.0, -9.0, -0.4]),
    )  # fmt: skip
    empty = build.sample(prompt, (), (), -1.0)
    other = replace(build.prompt(ids=(1, 2, 3, 4, 5), domain="code"), extra={"level": "3", "tools_kwargs": '{"a": 1}'})
    return StepGroups(
        [
            build.group(11, 3, prompt=prompt, samples=(tool, empty)),
            build.group(4, 2, prompt=other, samples=(build.sample(other, (9,), ((2, 1),), 1.0),)),
        ]
    )


def by_loop(group, sample, prompt_length, response_length, pad):
    """One row, token by token."""
    prompt, response = list(group.prompt.token_ids), list(sample.response_token_ids)
    row = {name: [] for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "token_level_scores")}
    row["attention_mask"], row["position_ids"] = [], []
    for place in range(prompt_length):
        own = place - (prompt_length - len(prompt))
        row["prompts"].append(prompt[own] if own >= 0 else pad)
        row["attention_mask"].append(int(own >= 0))
        row["position_ids"].append(max(own, 0))
    for place in range(response_length):
        there = place < len(response)
        row["responses"].append(response[place] if there else pad)
        row["attention_mask"].append(int(there))
        row["position_ids"].append(len(prompt) + min(place, len(response) - 1))
        sampled = there and sample.loss_mask[place] == 1
        row["response_mask"].append(int(sampled))
        row["rollout_log_probs"].append(sample.behaviour_logprobs[place] if sampled else 0.0)
        row["token_level_scores"].append(sample.reward.score if there and place == len(response) - 1 else 0.0)
    row["input_ids"] = row["prompts"] + row["responses"]
    return row


@pytest.mark.parametrize(
    ("lengths", "p", "r", "pad"),
    [({}, 5, 4, 0), ({"prompt_length": 8, "response_length": 6, "pad_token_id": 63}, 8, 6, 63)],
)
def test_every_value_is_that_of_a_loop_over_tokens(build, lengths, p, r, pad):
    batch = groups(build)
    data = batch.to_dataproto(**lengths)
    rows = [(group, sample) for group in batch for sample in group.samples]
    assert len(data) == len(rows) == 3
    for item, (group, sample) in zip(data, rows, strict=True):
        expected = by_loop(group, sample, p, r, pad)
        assert {name: values.tolist() for name, values in item.batch.items()} == expected
    real = {"rollout_log_probs", "token_level_scores"}
    assert {n: v.dtype for n, v in data.batch.items()} == {
        n: torch.float32 if n in real else torch.int64 for n in data.batch
    }
    assert data.meta_info == {"global_token_num": [6, 2, 6]}


def test_a_row_has_the_fields_and_shapes_of_the_documents_item(build):
    item = groups(build).to_dataproto(prompt_length=1024, response_length=2048)[0]
    shapes = {name: (tuple(values.shape), values.dtype) for name, values in item.batch.items()}
    document = {
        "attention_mask": 3072, "input_ids": 3072, "position_ids": 3072, "prompts": 1024, "response_mask": 2048,
        "responses": 2048,
    }  # fmt: skip
    assert shapes.items() >= {name: ((size,), torch.int64) for name, size in document.items()}.items()
    assert item.non_tensor_batch == {
        "data_source": "openai/gsm8k", "ability": "math", "reward_model": {"ground_truth": "35", "style": "rule"},
        "extra_info": {"answer": "#### 35", "index": 1421, "question": "Xavier?", "split": "train"}, "uid": "11",
        "tools_kwargs": {}, "interaction_kwargs": {}, "index": 1421, "level": None,
    }  # fmt: skip
    assert item.meta_info["global_token_num"][0] == 6


def test_rows_of_a_prompt_share_its_uid_and_columns_are_objects(build):
    batch = groups(build)
    columns = batch.to_dataproto().non_tensor_batch
    assert columns["uid"].tolist() == ["11", "11", "4"] and columns["level"].tolist() == [None, None, "3"]
    assert columns["tools_kwargs"].tolist() == [{}, {}, {"a": 1}] and columns["data_source"][2] == "code"
    assert columns["index"].tolist() == [1421, 1421, batch[1].prompt.row_id]
    assert all(values.dtype == object and values.shape == (3,) for values in columns.values())


def test_a_length_below_the_longest_row_is_refused_and_a_place_behind_the_last_row_ends_a_loop(build):
    batch = groups(build)
    with pytest.raises(ValueError, match="prompt_length=4 is less than the 5 tokens of the longest row; raise it"):
        batch.to_dataproto(prompt_length=4)
    with pytest.raises(ValueError, match="response_length=3 is less than the 4 tokens"):
        batch.to_dataproto(response_length=3)
    with pytest.raises(IndexError):
        batch.to_dataproto()[3]
    assert len(StepGroups().to_dataproto()) == 0


def test_a_text_of_the_users_own_under_the_name_of_a_map_is_no_error(build):
    prompt = replace(build.prompt(ids=(5,)), extra={"extra_info": "{not JSON", "interaction_kwargs": "[1]"})
    group = build.group(0, 0, prompt=prompt, samples=(build.sample(prompt, (7,), ((0, 1),), 1.0),))
    item = StepGroups([group]).to_dataproto()[0]
    assert item.non_tensor_batch["extra_info"] == {} and item.non_tensor_batch["interaction_kwargs"] == {}
