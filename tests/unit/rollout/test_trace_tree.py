"""The record of an answer with tools is what a slow loop over its tokens gives."""

import random
from array import array

import pytest

from roll_async.agents.trace_tree import TraceTree
from roll_async.rollout.tools import Transcript
from roll_async.schema import Completion, ExpertRecord, FinishReason, Outcome

LAYERS, TOP_K = 2, 2


def completion(rng, position, recorded, *, length, records):
    """A turn after `position` tokens, of whose experts `recorded` are known."""
    runs, left = [], length
    while left:
        runs.append((rng.randrange(3), rng.randint(1, left)))
        left -= runs[-1][1]
    experts = None
    if records and length:
        size = (position + length - 1 - recorded) * LAYERS * TOP_K  # the last token is not read by the model
        experts = ExpertRecord(ids=array("B", rng.choices(range(8), k=size)), num_layers=LAYERS, top_k=TOP_K)
    return Completion(
        request_id="s",
        token_ids=array("i", rng.choices(range(100), k=length)),
        logprobs=array("f", [-rng.random() for _ in range(length)]),
        version_runs=tuple(runs),
        finish_reason=rng.choice([FinishReason.STOP, FinishReason.LENGTH]),
        generation_s=rng.random(),
        experts=experts,
        replica=f"engine-{rng.randrange(2)}",
    )


def conversation(seed):
    """(prompt ids, turns, results between them). The last turn may be empty: an abort or a full context."""
    rng = random.Random(seed)
    prompt = array("i", rng.choices(range(100), k=rng.randint(1, 5)))
    num_turns, records = rng.randint(1, 4), rng.random() < 0.5
    turns, results, position, recorded = [], [], len(prompt), 0
    for number in range(num_turns):
        length = rng.randint(number == 0 and num_turns > 1 or number < num_turns - 1, 6)
        turns.append(completion(rng, position, recorded, length=length, records=records))
        recorded += turns[-1].experts.num_positions if turns[-1].experts is not None else 0
        position += length
        if number < num_turns - 1:
            results.append(array("i", rng.choices(range(100), k=rng.randint(1, 4))))
            position += len(results[-1])
    return prompt, turns, results


def through_transcript(build, prompt, turns, results):
    transcript = Transcript(build.prompt(ids=prompt))
    recorded = []
    for turn, result in zip(turns, [*results, None], strict=True):
        recorded.append(transcript.recorded_positions)
        transcript.add_completion(turn)
        if result is not None:
            transcript.add_masked(result)
    return transcript.sample("s"), recorded


def through_tree(build, prompt, turns, results):
    tree, recorded = TraceTree(), []
    node = tree.add_request(None, prompt, role="user", started_s=0.0)
    for turn, result in zip(turns, [*results, None], strict=True):
        recorded.append(tree.recorded_positions(node))
        node = tree.add_turn(node, turn, started_s=0.0)
        if result is not None:
            node = tree.add_request(node, result, role="tool", started_s=0.0)
    rows = tree.rows("s", reward=None, outcome=Outcome.SOLVED)
    return (rows[0] if rows else None), recorded


@pytest.mark.parametrize("record", [through_transcript, through_tree])
def test_an_answer_is_what_a_loop_over_its_tokens_gives(build, record):
    for seed in range(300):
        prompt, turns, results = conversation(seed)
        row, recorded = record(build, prompt, turns, results)
        if row is None:
            assert not any(turn.token_ids for turn in turns)
            continue
        ids, logprobs, mask, versions, experts, known = [], [], [], [], [], []
        for turn, result in zip(turns, [*results, []], strict=True):
            known.append(len(experts) // (LAYERS * TOP_K))
            ids += [*turn.token_ids, *result]
            logprobs += [*turn.logprobs, *(0.0 for _ in result)]
            mask += [1] * len(turn.token_ids) + [0] * len(result)
            versions += [version for version, count in turn.version_runs for _ in range(count)]
            versions += versions[-1:] * len(result)  # results have the version of the turn before them
            experts += turn.experts.ids if turn.experts is not None else []
        assert row.sample_id == "s" and row.prompt_token_ids == prompt and recorded == known
        assert row.response_token_ids.tolist() == ids and list(row.loss_mask) == mask
        assert row.behaviour_logprobs.tolist() == logprobs
        assert [version for version, count in row.version_runs for _ in range(count)] == versions
        assert (row.experts.ids.tolist() if row.experts is not None else []) == experts
        assert row.finish_reason is turns[-1].finish_reason
