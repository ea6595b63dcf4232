"""The arithmetic of the staleness contract, against counting and against brute force."""

import itertools
import random
from collections import Counter
from fractions import Fraction
from math import ceil

import pytest

from roll_async.buffer.freshness import censored_mean
from roll_async.buffer.states import QueueOptions
from roll_async.config.staleness import (
    admission_limit,
    default_max_versions,
    due_step,
    exact_ratio,
    is_schedulable,
    largest_excess,
    staleness,
    staleness_bound,
)


def can_be_trained_in_time(left, step, batch, bound):
    """Earliest deadline first, `batch` groups at each step after `step`: does every group meet its own?"""
    waiting = sorted(v for v, count in left.items() for _ in range(count))
    for number, version in enumerate(waiting):
        trained_at = step + 1 + number // batch
        if trained_at > version + bound + 1:
            return False
    return True


def test_a_ratio_is_the_decimal_number_the_user_wrote():
    assert exact_ratio(0.1) == Fraction(1, 10) and exact_ratio(1) == 1
    assert admission_limit(version=0, ratio=0.1, sync_every=1, groups_per_batch=10) == 11, "and not 12"


@pytest.mark.parametrize(
    ("ratio", "every", "bound"),
    [(0, 1, 0), (1, 1, 1), (0.5, 1, 1), (0.1, 1, 1), (2, 1, 2), (0, 4, 3), (1, 2, 3), (1.5, 2, 4)],
)
def test_the_bound_is_what_the_documents_promise(ratio, every, bound):
    assert staleness_bound(ratio=ratio, sync_every=every) == bound


def test_staleness_is_counted_from_the_freshest_weights_a_step_can_start_from():
    assert staleness(step=1, version=0) == 0 and staleness(step=5, version=3) == 1
    for version, bound in itertools.product(range(5), range(4)):
        last = due_step(admitted_version=version, max_versions=bound)
        assert staleness(step=last, version=version) == bound < staleness(step=last + 1, version=version)


@pytest.mark.parametrize(("ratio", "every", "batch"), [(0, 1, 4), (0.5, 1, 3), (1, 2, 4), (0.3, 3, 7), (2.5, 2, 5)])
def test_admission_counted_group_by_group_gives_the_limit(ratio, every, batch):
    """Without the formula: ahead of what the held weights have consumed lies one window, and r windows more."""
    for version in range(0, 6 * every, every):
        consumed = version * batch
        allowed = consumed + every * batch + exact_ratio(ratio) * every * batch
        assert admission_limit(version=version, ratio=ratio, sync_every=every, groups_per_batch=batch) == ceil(allowed)


def test_the_look_ahead_rule_agrees_with_serving_every_group_by_its_deadline():
    rng, seen = random.Random(1), {True: 0, False: 0}
    for _ in range(4000):
        step, batch, bound = rng.randint(1, 6), rng.randint(1, 4), rng.randint(0, 4)
        left = {v: rng.randint(0, 2 * batch) for v in range(max(0, step - 3), step + 2)}
        rule = is_schedulable(left_by_version=left, step=step, groups_per_batch=batch, max_versions=bound)
        assert rule == can_be_trained_in_time(left, step, batch, bound), (left, step, batch, bound)
        seen[rule] += 1
    assert min(seen.values()) > 500


def test_the_excess_names_the_first_deadline_that_cannot_be_met():
    excess = largest_excess(groups_by_version={3: 5, 4: 9}, next_step=5, groups_per_batch=4, max_versions=1)
    assert excess == (1, 3), "5 groups are due by step 5, which trains 4"
    assert largest_excess(groups_by_version={3: 4, 4: 5}, next_step=5, groups_per_batch=4, max_versions=1) == (1, 4)
    assert largest_excess(groups_by_version={3: 4, 4: 4}, next_step=5, groups_per_batch=4, max_versions=1) is None
    assert largest_excess(groups_by_version={0: 1}, next_step=5, groups_per_batch=4, max_versions=1) == (1, 0)


@pytest.mark.parametrize("policy", ["oldest first without looking ahead", "the rule"])
def test_taking_without_the_look_ahead_breaks_the_bound_and_with_it_never(policy):
    """Random finishing orders: the trainer takes finished groups oldest first; the rule makes it wait."""
    rng, broken = random.Random(5), 0
    for _ in range(300):
        batch, ratio = rng.randint(1, 3), rng.choice((0.5, 1.0, 2.0))
        bound = staleness_bound(ratio=ratio, sync_every=1)
        groups, admitted, step = {}, 0, 1
        while step <= 8:
            limit = admission_limit(version=step - 1, ratio=ratio, sync_every=1, groups_per_batch=batch)
            while admitted < limit:
                groups[admitted] = [step - 1, False]
                admitted += 1
            rng.choice([g for g in groups.values() if not g[1]] or [[0, False]])[1] = True
            ready = sorted(i for i, (_, finished) in groups.items() if finished)[:batch]
            if len(ready) < batch:
                continue
            left = {}
            for i, (version, _) in groups.items():
                if i not in ready:
                    left[version] = left.get(version, 0) + 1
            rule = is_schedulable(left_by_version=left, step=step, groups_per_batch=batch, max_versions=bound)
            if policy == "the rule" and not rule:
                continue
            broken += any(staleness(step=step, version=groups.pop(i)[0]) > bound for i in ready)
            step += 1
    assert (broken > 0) == (policy != "the rule")


def test_options_that_contradict_each_other_are_refused_with_their_key():
    with pytest.raises(ValueError, match="max_versions 0 is below the 1 versions admitted"):
        QueueOptions(groups_per_batch=4, async_generation_ratio=1.0, max_versions=0)
    QueueOptions(groups_per_batch=4, async_generation_ratio=1.0, max_versions=0, policy="drop")
    with pytest.raises(ValueError, match="max_queue_size 3 cannot hold the 4 groups"):
        QueueOptions(groups_per_batch=4, max_queue_size=3)
    options = QueueOptions(groups_per_batch=4, async_generation_ratio=0.5, trigger_parameter_sync_step=2)
    assert (options.bound_versions, options.queue_limit, options.admission_limit(2)) == (2, 12, 20)


@pytest.mark.parametrize(
    ("ratio", "every", "groups", "extra", "bound"),
    [
        (0.0, 1, 4, 8, 0),
        (1.0, 1, 32, 0, 1),
        (1.0, 1, 32, 64, 3),
        (1.5, 1, 4, 6, 3),
        (0.1, 10, 8, 8, 10),
        (6.0, 1, 4, 12, 8),
    ],
)
def test_over_sampling_raises_the_default_bound_by_what_it_begins_ahead_up_to_8(ratio, every, groups, extra, bound):
    found = default_max_versions(ratio=ratio, sync_every=every, groups_per_batch=groups, oversample_groups=extra)
    assert found == bound


def test_the_mean_of_answers_of_which_some_were_cut_short_is_that_of_the_model():
    """Against the answers themselves: cut at random they lose their tail, and the mean must not."""
    rng = random.Random(1)
    lengths = [min(4000, round(rng.lognormvariate(6, 1))) + 1 for _ in range(20_000)]
    cuts = [rng.expovariate(1 / 800) + 1 for _ in lengths]
    finished = Counter(n for n, cut in zip(lengths, cuts) if n <= cut)
    censored = Counter(int(cut) for n, cut in zip(lengths, cuts) if n > cut)
    truth = sum(lengths) / len(lengths)
    seen = sum(n * count for n, count in finished.items()) / sum(finished.values())
    assert seen < 0.7 * truth, "finished answers alone say something else"
    assert censored_mean(finished, censored) == pytest.approx(truth, rel=0.05)
    assert censored_mean({1: 1, 3: 2}, {2: 1}) == 2.5 and censored_mean({}, {5: 3}) == 0.0
