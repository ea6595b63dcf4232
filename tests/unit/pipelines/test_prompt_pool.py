"""A pool of prompts in a whole run: told how groups fared, saved with the position, restored with it."""

from array import array

import pytest

from roll_async.config.schema import PromptPoolConfig
from roll_async.pipelines.protocol import RunEnd
from roll_async.prompts.pool import PooledPrompts
from roll_async.prompts.stream import ShuffledPrompts


def pool_of(build, size=40, metric="score"):
    """Prompts whose groups all score alike: solved at the first visit."""
    rows = {"math": [build.prompt(row_id=str(i)) for i in range(size)]}
    options = PromptPoolConfig(retire_after=1, refill_below=0.1, metric=metric)
    return PooledPrompts(ShuffledPrompts(rows, seed=1).at, rows, options, seed=0)


def test_groups_reach_the_pool_and_what_it_knows_is_published_and_saved(run, a_run, build):
    pool = pool_of(build)
    done = a_run(steps=4, save_every=2, pool=pool)
    assert run(done.go()) is RunEnd.FINISHED
    assert done.published[-1]["pool/retired"] >= 16, "every group that was trained had been told of"
    assert len(set(done.rows)) == len(done.rows) == 16, "a retired prompt never comes again"
    saved = done.positions[2]["pool"]
    assert set(saved["domains"]["math"]["retired"]) >= {row for row in map(int, done.rows[:8])}
    assert len(saved["chosen"]) == len([i for i in done.positions[2]["open"] if i < done.positions[2]["next_index"]])


def test_a_restored_run_asks_no_prompt_again_that_the_first_one_solved(run, a_run, build):
    first = a_run(steps=3, save_every=2, pool=pool_of(build))
    run(first.go())
    again = a_run(steps=5, pool=pool_of(build), position=first.positions[2])
    assert run(again.go()) is RunEnd.FINISHED
    assert [step for step, _ in again.learned] == [3, 4, 5]
    rows = [*first.rows[:8], *again.rows]
    assert len(set(rows)) == len(rows) == 20


def test_the_end_of_all_prompts_ends_the_run(run, a_run, build):
    done = a_run(steps=40, pool=pool_of(build, size=24))
    assert run(done.go()) is RunEnd.END_OF_DATA
    assert sorted(done.rows) == list(range(24))


@pytest.mark.parametrize("metric", ["score", "acc"])
def test_what_nothing_scores_says_nothing_of_a_prompt(run, a_run, build, metric):
    rows = {"math": [build.prompt(row_id=str(i), answer_ids=array("i", [7, 8])) for i in range(40)]}
    options = PromptPoolConfig(retire_after=1, refill_below=0.1, metric=metric)
    done = a_run(pool=PooledPrompts(ShuffledPrompts(rows, seed=1).at, rows, options, seed=0))
    assert run(done.go()) is RunEnd.FINISHED
    assert "pool/pass_rate_visit_1" not in done.published[-1]


def test_a_metric_that_no_reward_reports_ends_the_run_with_its_name(run, a_run, build):
    done = a_run(pool=pool_of(build, metric="speed"))
    with pytest.raises(ExceptionGroup) as raised:
        run(done.go())
    while isinstance(error := raised.value if not isinstance(raised, BaseException) else raised, ExceptionGroup):
        raised = error.exceptions[0]
    assert "prompt_pool.metric 'speed' is not reported" in str(raised)
