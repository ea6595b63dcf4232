"""Pieces of an interrupted request become one completion again."""

import asyncio
import pickle
from array import array
from dataclasses import replace

import pytest

from roll_async.rollout.dispatch.requests import PendingRequest
from roll_async.schema import Completion, ExpertRecord, FinishReason, Image


def piece(tokens, version, reason=FinishReason.ABORT):
    return Completion(
        request_id="r#1",
        token_ids=array("i", tokens),
        logprobs=array("f", [-t for t in tokens]),
        version_runs=((version, len(tokens)),) if tokens else (),
        finish_reason=reason,
        generation_s=2.0,
    )


@pytest.fixture
def pending(run, make):
    async def go():
        return PendingRequest(
            make("r", tokens=10, temperature=0.7), asyncio.get_running_loop().create_future(), None, False
        )

    return run(go())


def test_each_attempt_continues_from_the_tokens_so_far_with_what_is_left_of_the_budget(pending):
    first = pending.message(pending.attempt.wire_id)
    assert (first.request_id, list(first.prompt_token_ids), first.sampling.max_new_tokens) == ("r#1", [1, 2, 3], 10)
    pending.keep(piece([4, 5], 0))
    pending.keep(piece([], 0))
    pending.keep(piece([6], 1))
    pending.begin_attempt()
    second = pending.message(pending.attempt.wire_id)
    assert (second.request_id, list(second.prompt_token_ids)) == ("r#2", [1, 2, 3, 4, 5, 6])
    assert second.sampling.max_new_tokens == 7 and second.sampling.temperature == 0.7
    assert list(pending.request.prompt_token_ids) == [1, 2, 3]


def test_every_attempt_carries_the_images_of_the_request_and_none_of_their_bytes_twice(pending):
    pending.request = replace(pending.request, images=(Image(data=b"png" * 1000, grid=(1, 2)),))
    first = pending.message("r#1")
    pending.keep(piece([4, 5], 0))
    second = pending.message("r#2")
    assert first.images is second.images is pending.request.images
    assert len(pickle.dumps([first, second])) < len(pickle.dumps(first)) + 500 < 4500


def test_the_pieces_join_into_one_completion_with_runs_of_equal_versions_merged(pending):
    pending.keep(piece([4, 5], 3))
    pending.keep(piece([6], 3))
    merged = pending.merged(piece([7, 8], 4, FinishReason.STOP))
    assert list(merged.token_ids) == [4, 5, 6, 7, 8] and merged.logprobs.tolist() == [-4, -5, -6, -7, -8]
    assert merged.version_runs == ((3, 3), (4, 2)) and merged.finish_reason is FinishReason.STOP
    assert merged.request_id == "r" and merged.generation_s == 6.0


def test_the_next_piece_records_from_the_token_that_the_last_one_did_not_read(pending):
    """The experts of a position are those of the piece that first read it."""

    def recorded(tokens, first, last):
        ids = array("B", [e for position in range(first, last) for e in (position, 100 + position)])
        return replace(piece(tokens, 0), experts=ExpertRecord(ids=ids, num_layers=2, top_k=1))

    assert pending.message(pending.attempt.wire_id).recorded_positions == 0
    pending.keep(recorded([4, 5], 0, 4))  # 3 tokens of the prompt, and token 4
    pending.keep(piece([], 0))
    pending.begin_attempt()
    second = pending.message(pending.attempt.wire_id)
    assert second.recorded_positions == 4
    merged = pending.merged(recorded([6], second.recorded_positions, 5))
    assert merged.experts.ids.tolist() == [0, 100, 1, 101, 2, 102, 3, 103, 4, 104]
    assert (merged.experts.num_positions, merged.experts.num_layers) == (5, 2)
    assert pending.merged(Completion.empty("r#2", FinishReason.LENGTH)).experts.num_positions == 4


def test_a_request_that_ends_without_a_new_token_keeps_the_old_ones(pending):
    pending.keep(piece([4], 3))
    merged = pending.merged(Completion.empty("r#2", FinishReason.LENGTH))
    assert list(merged.token_ids) == [4] and merged.finish_reason is FinishReason.LENGTH
