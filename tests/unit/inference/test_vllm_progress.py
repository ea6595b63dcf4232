"""Running tokens as vLLM's front end holds them, and releases that hold them elsewhere."""

import logging
from types import SimpleNamespace

import pytest

from roll_async.inference.vllm.progress import ProgressReader


def front_end(tokens, logprobs, versions):
    """An AsyncLLM that runs one request, r-1."""
    state = SimpleNamespace(
        detokenizer=SimpleNamespace(output_token_ids=tokens),
        logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=logprobs)),
        weight_version_starts=versions,
    )
    return SimpleNamespace(output_processor=SimpleNamespace(request_states={"r-1": state}))


@pytest.fixture
def llm():
    return front_end([10, 11, 12, 13, 14], [-0.5, -1.0, -1.5, -2.0, -2.5], [("3", 0), ("4", 2)])


@pytest.mark.parametrize(
    ("start", "held_back", "tokens", "runs"),
    [
        (0, 0, [10, 11, 12, 13], ((3, 2), (4, 2))),
        (1, 2, [11, 12], ((3, 1), (4, 1))),
        (3, 1, [13], ((4, 1),)),
    ],
)
def test_the_tokens_since_a_start_come_with_their_logprobs_and_versions_without_the_last(
    llm, start, held_back, tokens, runs
):
    part = ProgressReader(llm, labelled=True).read("r-1", start, held_back, 9)
    assert list(part.token_ids) == tokens and part.version_runs == runs
    assert list(part.logprobs) == [-0.5 * (token - 9) for token in tokens]


def test_without_labels_every_token_has_the_version_the_request_began_with(llm):
    del llm.output_processor.request_states["r-1"].weight_version_starts
    assert ProgressReader(llm, labelled=False).read("r-1", 1, 0, 9).version_runs == ((9, 3),)


def test_what_vllm_does_not_run_or_what_is_not_there_yet_is_nothing(llm):
    reader = ProgressReader(llm, labelled=True)
    assert reader.read("r-2", 0, 0, 9) is None and reader.read("r-1", 4, 0, 9) is None
    assert reader.read("r-1", 0, 5, 9) is None and reader.read("r-1", 0, 30, 9) is None


@pytest.mark.parametrize("gone", ["detokenizer", "logprobs_processor", "weight_version_starts"])
def test_a_release_that_holds_them_elsewhere_is_told_of_once_and_breaks_nothing(llm, gone, caplog):
    delattr(llm.output_processor.request_states["r-1"], gone)
    reader = ProgressReader(llm, labelled=True)
    with caplog.at_level(logging.WARNING):
        assert [reader.read("r-1", 0, 0, 9) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert "does not tell" in record.message and gone in record.message
