"""The pool over the stream: what it asks, retires and refills, and that a run that goes on asks the same."""

import json
import logging
import random

import pytest

from roll_async.config.schema import PromptPoolConfig
from roll_async.prompts.pool import PooledPrompts
from roll_async.prompts.stream import ShuffledPrompts


def rows_of(build, **counts):
    return {
        name: [build.prompt(row_id=f"{name}{i}", domain=name, extra={"level": str(i)}) for i in range(count)]
        for name, count in counts.items()
    }


def pool_of(build, counts=None, reserve=None, **options):
    rows = rows_of(build, **(counts or {"math": 10}))
    stream = ShuffledPrompts(rows, seed=3)
    spare = {name: [build.prompt(row_id=f"spare{i}", domain=name) for i in range(n)]
             for name, n in (reserve or {}).items()}  # fmt: skip
    return PooledPrompts(stream.at, rows, PromptPoolConfig(**options), seed=3, reserve=spare), stream


def ask(pool, positions, rate):
    """Row ids asked at these positions; each answered with `rate(prompt)` right before the next."""
    asked = []
    for index in positions:
        prompt = pool.at(index)
        asked.append(prompt.row_id)
        pool.record(index, [rate(prompt)] * 2)
    return asked


def test_rows_nobody_has_seen_come_in_the_order_of_the_stream(build):
    pool, stream = pool_of(build, {"math": 10, "code": 5})
    assert ask(pool, range(15), lambda p: 0.5) == [stream.at(i).row_id for i in range(15)]


def test_rows_are_asked_as_often_as_they_teach_something(build):
    pool, _ = pool_of(build, floor=0.1)
    rates = {f"math{i}": (0.0, 0.5, 1.0)[i % 3] for i in range(10)}
    ask(pool, range(10), lambda p: rates[p.row_id])
    asked = ask(pool, range(10, 3010), lambda p: rates[p.row_id])
    counts = [sum(rates[row] == rate for row in asked) for rate in (0.0, 0.5, 1.0)]
    # 4, 3 and 3 rows of weight 0.1, 1 and 0.1; the stream's own row is tried first, which evens it out a little.
    expected = [4 * 0.1, 3 * 1.0, 3 * 0.1]
    for count, weight in zip(counts, expected, strict=True):
        assert count / 3000 == pytest.approx(weight / sum(expected), abs=0.05)


def test_shares_of_domains_are_those_of_the_stream(build):
    pool, stream = pool_of(build, {"math": 12, "code": 4})
    asked = ask(pool, range(800), lambda p: 1.0 if p.row_id == "math1" else 0.5)
    assert [row[:4] for row in asked] == [stream.at(i).domain for i in range(800)]


def test_a_row_solved_often_enough_is_never_asked_again_and_a_lapse_counts_from_the_start(build):
    pool, _ = pool_of(build, retire_after=2, retire_at=0.9)
    history = {f"math{i}": [] for i in range(10)}
    answers = {"math0": [1, 1], "math1": [1, 0, 1, 1]}

    def rate(prompt):
        seen = history[prompt.row_id]
        seen.append(answers.get(prompt.row_id, [0.5] * 9999)[len(seen)])
        return seen[-1]

    ask(pool, range(2000), rate)
    assert history["math0"] == [1, 1] and history["math1"] == [1, 0, 1, 1]
    assert pool.metrics()["pool/retired"] == 2 and pool.metrics()["pool/active"] == 8


def test_the_reserve_takes_the_place_of_what_is_solved_and_an_empty_one_is_said(build, caplog):
    caplog.set_level(logging.INFO, "roll_async")
    pool, _ = pool_of(build, reserve={"math": 4}, retire_after=1, refill_below=0.8)
    asked = []
    for index in range(200):
        prompt = pool.at(index)
        if prompt is None:
            break
        asked.append(prompt.row_id)
        pool.record(index, [1.0, 1.0])
    assert sorted(asked) == sorted([f"math{i}" for i in range(10)] + [f"spare{i}" for i in range(4)])
    assert "3 retired, 3 refilled from the reserve" in caplog.text and "the reserve is empty" in caplog.text
    assert pool.metrics()["pool/reserve"] == 0 and pool.metrics()["pool/refills"] == 2
    assert pool.at(200) is None, "everything is solved: the data ends"


def test_another_domain_is_asked_where_all_of_one_is_solved(build):
    pool, _ = pool_of(build, {"math": 3, "code": 6}, retire_after=1)
    asked = ask(pool, range(60), lambda p: float(p.domain == "math"))
    assert sum(row.startswith("math") for row in asked) == 3 and len(asked) == 60


def test_a_position_that_comes_again_is_the_same_prompt_and_counts_once(build):
    pool, _ = pool_of(build)
    first = pool.at(0)
    pool.record(0, [1.0])
    assert pool.at(0) is first
    pool.record(0, [0.0])
    assert pool.metrics()["pool/pass_rate_visit_1"] == 1.0 and pool.metrics()["pool/visits"] == 1


def test_a_curriculum_begins_with_the_easiest_rows_and_ends_with_all(build):
    pool, _ = pool_of(build, {"math": 50}, curriculum_column="level", curriculum_prompts=100)
    levels = [int(row.removeprefix("math")) for row in ask(pool, range(200), lambda p: 0.5)]
    assert all(level <= (index + 1) / 2 for index, level in enumerate(levels[:100]))
    assert max(levels[100:]) > 45 and max(levels[50:100]) > max(levels[:20])
    with pytest.raises(ValueError, match="curriculum_column size: a row of math has no number there"):
        pool_of(build, curriculum_column="size")


def test_statistics_tell_the_visits_of_a_row_apart(build):
    pool, _ = pool_of(build, floor=1.0)
    visits = {}

    def rate(prompt):
        visits[prompt.row_id] = visits.get(prompt.row_id, 0) + 1
        return {1: 0.25, 2: 0.5}.get(visits[prompt.row_id], 0.75)

    ask(pool, range(30), rate)
    found = pool.metrics()
    assert [found[f"pool/pass_rate_visit_{n}"] for n in (1, 2, 3)] == [0.25, 0.5, 0.75]
    assert found["pool/visits"] == 3 and found["pool/seen_share"] == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_goes_on_from_any_position_asks_exactly_the_same(build, seed):
    """Groups end out of order; the state is saved with some of them open, and some of those recorded already."""
    options = {"retire_after": 2, "retire_at": 0.7, "refill_below": 0.9, "curriculum_column": "level"}
    options |= {"curriculum_prompts": 40, "counts": {"math": 8, "code": 5}, "reserve": {"math": 4, "code": 9}}
    rng = random.Random(seed)
    outcomes = [rng.choice([0.0, 0.4, 1.0]) for _ in range(400)]
    save_at = rng.randrange(20, 150)

    def go(pool, start, open_positions, until):
        asked, saved = [], None
        for index in range(start, until):
            if index == save_at and start == 0:
                saved = json.loads(json.dumps(pool.state(set(open_positions)))), list(open_positions), len(asked)
            prompt = pool.at(index)
            asked.append(None if prompt is None else prompt.row_id)
            open_positions.append(index)
            while len(open_positions) > 5:
                done = open_positions.pop(outcomes[index + 7] > 0.3)
                pool.record(done, [outcomes[done]] * 2)
        return asked, saved

    whole, (state, left_open, count) = go(pool_of(build, **options)[0], 0, [], 300)
    resumed = pool_of(build, **options)[0]
    resumed.restore(state)
    for index in left_open:
        assert resumed.at(index).row_id == whole[index], "what was open is asked again as it was"
    again, _ = go(resumed, save_at, list(left_open), 300)
    assert again == whole[count:]


def test_a_pool_of_other_data_is_refused(build):
    state = pool_of(build, {"math": 4}, reserve={"math": 3}, retire_after=1, refill_below=1.0)[0]
    state.at(0)
    state.record(0, [1.0])
    saved = state.state(())
    with pytest.raises(ValueError, match="has domains math, not code"):
        pool_of(build, {"code": 4})[0].restore(saved)
    with pytest.raises(ValueError, match="holds fewer rows of math"):
        pool_of(build, {"math": 4})[0].restore(saved)
