"""The record of an answer with tools is what a slow loop over its tokens gives."""

import random
from array import array

import pytest

from roll_async.rollout.trace_tree import TraceTree
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


def recorded_by(tree, prompt, turns, results):
    """Adds the conversation; positions whose experts were known before each turn."""
    recorded, node = [], tree.add_request(None, prompt, role="user", started_s=0.0)
    for turn, result in zip(turns, [*results, None], strict=True):
        recorded.append(tree.recorded_positions(node))
        node = tree.add_turn(node, turn, started_s=0.0)
        if result is not None:
            node = tree.add_request(node, result, role="tool", started_s=0.0)
    return recorded


def test_an_answer_is_what_a_loop_over_its_tokens_gives():
    for seed in range(300):
        prompt, turns, results = conversation(seed)
        tree = TraceTree()
        recorded = recorded_by(tree, prompt, turns, results)
        row = tree.answer("s")
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
        assert (row.finish_reason, row.replica) == (turns[-1].finish_reason, turns[-1].replica)
        assert row.generation_s == pytest.approx(sum(turn.generation_s for turn in turns))
        assert (row.trajectory, row.turns, row.outcome, row.num_turns) == ("", (), None, len(turns))
        (tree_row,) = tree.rows("s", reward=None, outcome=Outcome.SOLVED) or (None,)
        if tree_row is not None:  # a trajectory of one path holds the same tokens
            assert (tree_row.response_token_ids, tree_row.loss_mask) == (row.response_token_ids, row.loss_mask)


def test_the_samples_of_a_prompt_share_its_tokens():
    prompt, turns, _ = conversation(1)
    tree = TraceTree()
    node = tree.add_request(None, prompt, role="user", started_s=0.0)
    assert tree.token_ids(node) is prompt
    tree.add_turn(node, turns[0], started_s=0.0)
    assert tree.answer("s").prompt_token_ids is prompt


def test_an_answer_that_was_ended_says_why():
    prompt, turns, _ = conversation(1)
    tree = TraceTree()
    tree.add_turn(tree.add_request(None, prompt, role="user", started_s=0.0), turns[0], started_s=0.0)
    tree.end(FinishReason.ABORT)
    assert tree.answer("s").finish_reason is FinishReason.ABORT
