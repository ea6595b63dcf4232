from array import array

import pytest

from roll_async.rollout.filters.duplicates import DuplicateAnswers


@pytest.fixture
def group(build):
    """A group of answers, each (tokens, log-prob of a token, replica)."""

    def make(*answers):
        prompt = build.prompt()
        samples = tuple(
            build.sample(prompt, ids, behaviour_logprobs=array("f", [logprob] * len(ids)), replica=replica)
            for ids, logprob, replica in answers
        )
        return build.group(prompt=prompt, samples=samples)

    return make


LONG, OTHER = tuple(range(40)), tuple(range(1, 41))


def test_the_share_counts_every_sample_that_has_a_copy_in_its_group(group):
    duplicates = DuplicateAnswers()
    assert duplicates.share == 0
    duplicates.add(group((LONG, -1.0, "a"), (OTHER, -1.0, "a"), (OTHER, -1.0, "a"), ((7,), -1.0, "a")))
    assert duplicates.share == 0.5
    duplicates.add(group((LONG, -1.0, "a"), ((7,), -1.0, "a")))  # another group's answers are no copies of these
    assert duplicates.share == pytest.approx(2 / 6)


def test_old_groups_leave_the_share(group):
    duplicates = DuplicateAnswers()
    duplicates.add(group((LONG, -1.0, "a"), (LONG, -1.0, "b")))
    for _ in range(256):
        duplicates.add(group((LONG, -1.0, "a"), (OTHER, -1.0, "b")))
    assert duplicates.share == 0


def test_long_copies_from_two_replicas_are_warned_of_once_by_their_cause(group, caplog):
    duplicates = DuplicateAnswers()
    for _ in range(3):
        duplicates.add(group((LONG, -1.0, "actor_infer-0"), (LONG, -1.0, "actor_infer-1"), (OTHER, -1.0, "x")))
    (record,) = caplog.records
    assert "2 of 3 samples are one answer of 40 tokens" in record.getMessage()
    assert "actor_infer-0, actor_infer-1. replicas draw the same samples" in record.getMessage()


def test_long_copies_from_one_replica_have_another_cause(group, caplog):
    DuplicateAnswers().add(group((LONG, -1.0, "actor_infer-0"), (LONG, -1.0, "actor_infer-0")))
    assert "one replica gives equal requests the same answer" in caplog.text


@pytest.mark.parametrize(("answer", "logprob"), [((7, 8), -1.0), (LONG, -0.001), (LONG, 0.0)])
def test_copies_that_chance_explains_are_no_news(group, caplog, answer, logprob):
    duplicates = DuplicateAnswers()
    duplicates.add(group((answer, logprob, "a"), (answer, logprob, "b")))
    assert duplicates.share == 1 and not caplog.records
