"""Which rows a step takes: each once an epoch, also over a resume."""

import asyncio
from array import array
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from roll_async.launch import supervised as start
from roll_async.prompts.given import GivenRow
from roll_async.trainer.supervised import GivenData, SupervisedLearner, num_steps
from tests.unit.config.supervised import dpo_config, sft_config


class Actor:
    """Remembers the rows it is given; every log-prob is minus the token."""

    def __init__(self):
        self.steps, self.scored = [], 0

    async def update_given(self, rows, step):
        self.steps.append(rows)
        return {"trainer/loss": 0.0}

    async def compute_logprobs(self, rows):
        self.scored += len(rows.tokens)
        return -torch.where(rows.mask, rows.tokens, 0).float()

    @property
    def first_tokens(self):
        return [rows.tokens[:, 0].tolist() for rows in self.steps]


def data(count, held_out=0):
    rows = [GivenRow(array("i", [n, n + 1, 7]), b"\0\1\1") for n in range(count)]
    return GivenData(rows=rows, held_out=rows[:held_out])


def run(learner, steps):
    async def work():
        await learner.prepare()
        return [await learner.learn(step) for step in range(1, steps + 1)]

    return asyncio.run(work())


def test_an_epoch_takes_each_row_once_in_an_order_of_its_own():
    actor, config = Actor(), sft_config("train_batch_size=4", "num_train_epochs=2")
    reports = run(SupervisedLearner(actor, config, data(10)), num_steps(config, data(10)) + 1)
    taken = [n for step in actor.first_tokens for n in step]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10)) and taken[:10] != taken[10:]
    assert [len(step) for step in actor.first_tokens] == [4, 4, 4, 4, 4] and reports[-1] is None
    assert reports[-2].metrics["data/epoch"] == 2 and reports[0].metrics["data/trained_tokens"] == 8


def test_a_resumed_run_goes_on_at_its_row_also_with_another_batch():
    config = sft_config("train_batch_size=4", "num_train_epochs=1")
    whole, first, second = Actor(), Actor(), Actor()
    run(SupervisedLearner(whole, config, data(10)), 3)
    before = SupervisedLearner(first, config, data(10))
    run(before, 1)
    after = SupervisedLearner(second, sft_config("train_batch_size=3", "num_train_epochs=1"), data(10))
    after.restore_state(before.export_state())
    run(after, 2)
    assert [*first.first_tokens[0], *sum(second.first_tokens, [])] == sum(whole.first_tokens, [])


@pytest.mark.parametrize(
    ("keys", "batch", "last", "rows"),
    [
        (("max_steps=10",), 4, 10, 4 * 5),
        (("max_steps=10",), 2, 10, 2 * 5),
        (("max_steps=10",), 8, 10, 8 * 5),
        (("num_train_epochs=1",), 4, 10, 20),
        (("num_train_epochs=1",), 8, 8, 20),
        (("num_train_epochs=1",), 3, 12, 20),
        (("num_train_epochs=2",), 4, 20, 60),
    ],
)
def test_another_batch_after_half_of_a_run_changes_neither_its_steps_nor_its_epochs(keys, batch, last, rows):
    first, second = Actor(), Actor()
    before = SupervisedLearner(first, sft_config("train_batch_size=4", *keys), data(40))
    run(before, 5)
    after = SupervisedLearner(second, sft_config(f"train_batch_size={batch}", *keys), data(40))
    after.restore_state(before.export_state())
    assert after.last_step(5) == last
    reports = run(after, last - 5)
    assert None not in reports and sum(map(len, second.first_tokens)) == rows
    end = run(after, 1)[0]
    assert (end is None) == keys[0].startswith("num_train")


def test_pairs_of_a_resumed_run_all_have_their_reference():
    actor = Actor()
    config = dpo_config("train_batch_size=1", "max_steps=1", "checkpoint.resume_from=latest")
    run(SupervisedLearner(actor, config, data(8)), 1)
    assert actor.scored == 8, "where the run goes on is not known yet"


def test_a_checkpoint_of_other_rows_is_refused():
    learner = SupervisedLearner(Actor(), sft_config(), data(10))
    with pytest.raises(ValueError, match=r"^actor_train.data_args: the checkpoint is of rows "):
        learner.restore_state(SupervisedLearner(Actor(), sft_config(), data(9)).export_state())


def test_pairs_stay_together_and_bring_the_log_probs_of_the_reference():
    actor, config = Actor(), dpo_config("train_batch_size=2", "max_steps=2", "beta=0.3")
    run(SupervisedLearner(actor, config, data(8)), 2)
    for rows in actor.steps:
        first = rows.tokens[:, 0]
        assert (first[::2] % 2 == 0).all() and (first[1::2] == first[::2] + 1).all()
        assert rows.ref_logprobs.tolist() == [-(n + 1 + 7) for n in first.tolist()]
        assert rows.preference.beta == 0.3
    assert actor.scored == 8, "once"


def test_rows_that_the_run_does_not_reach_are_not_scored():
    actor = Actor()
    run(SupervisedLearner(actor, dpo_config("train_batch_size=1", "max_steps=1"), data(8)), 1)
    assert actor.scored == 2


def test_the_validation_is_the_mean_loss_of_a_token():
    learner = SupervisedLearner(Actor(), sft_config(), data(10, held_out=2))
    assert asyncio.run(learner.validate()) == {"validation/loss": pytest.approx((8 + 9) / 4)}


@pytest.mark.parametrize(("tokens", "loss"), [([[5, 3, 7], [5]], 5.0), ([[5]], 0.0)])
def test_a_rows_first_token_which_nothing_predicts_is_not_counted_in_the_validation(tokens, loss):
    rows = [GivenRow(array("i", ids), b"\1" * len(ids)) for ids in tokens]
    learner = SupervisedLearner(Actor(), sft_config(), GivenData(rows=data(10).rows, held_out=rows))
    assert asyncio.run(learner.validate()) == {"validation/loss": loss}


def test_the_validation_of_pairs_is_against_the_reference():
    learner = SupervisedLearner(Actor(), dpo_config(), data(10, held_out=4))

    async def work():
        await learner.prepare()
        return await learner.validate()

    found = asyncio.run(work())
    assert found["validation/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert found["validation/rewards/margins"] == 0


def test_steps_of_epochs_and_of_max_steps():
    of = SimpleNamespace(rows=[0] * 10, held_out=[])
    assert num_steps(sft_config("train_batch_size=4", "num_train_epochs=2"), of) == 5
    assert num_steps(sft_config("train_batch_size=4", "num_train_epochs=1"), of) == 3
    assert num_steps(dpo_config("train_batch_size=4", "num_train_epochs=1"), of) == 2
    assert num_steps(sft_config("max_steps=7"), of) == 7


def test_a_start_plans_the_steps_that_are_left_with_the_batch_of_today(monkeypatch):
    config = sft_config("train_batch_size=8", "num_train_epochs=1")
    before = SupervisedLearner(Actor(), sft_config("train_batch_size=4", "num_train_epochs=1"), data(40))
    run(before, 5)

    class Roles:
        def __init__(self, *arguments):
            pass

        async def start_ranks(self):
            return {"actor_train": SimpleNamespace(export_hf=None)}

    async def restore(config, roles, learner, checkpoints):
        learner.restore_state(before.export_state())
        return 5, None

    async def closed(*arguments):
        pass

    monkeypatch.setattr(start, "RoleStarter", Roles)
    monkeypatch.setattr(start, "restore_loop", restore)
    monkeypatch.setattr(start, "checkpoints_of", lambda config, record: None)
    monkeypatch.setattr(start, "LoopCheckpoint", lambda *arguments: SimpleNamespace(close=closed))

    async def started():
        async with AsyncExitStack() as stack:
            folder = SimpleNamespace(record=None, last_step=5)
            return await start.start_supervised(config, None, stack, (None, folder), data(40))

    assert asyncio.run(started()).states() == ["trainer: starting; step 5 of 8 is trained"]
