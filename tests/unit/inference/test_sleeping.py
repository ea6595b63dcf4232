import pytest

from roll_async.inference.sleeping import SleepRules, SleepState


def asleep(level=1):
    rules = SleepRules((1, 2))
    assert rules.may_sleep(level, paused=True, num_running=0)
    rules.fell_asleep(level)
    return rules


def wake(rules, *tags):
    tags = rules.to_wake(tags)
    rules.woke(tags)
    return tags


def test_weights_wake_before_the_cache_and_the_replica_generates_when_both_are_there():
    rules = asleep()
    assert wake(rules, "weights") == ("weights",) and rules.state is SleepState.WEIGHTS_AWAKE
    rules.need_weights("begin_update")
    with pytest.raises(RuntimeError, match="generate: the replica is weights awake"):
        rules.need_awake("generate")
    assert wake(rules, "kv_cache") == ("kv_cache",) and rules.state is SleepState.AWAKE and rules.level == 0
    rules.need_awake("generate")


def test_both_wake_at_once_weights_first_whatever_the_order_of_the_tags():
    assert wake(asleep(2), "kv_cache", "weights") == ("weights", "kv_cache")


def test_a_cache_does_not_wake_without_weights():
    with pytest.raises(RuntimeError, match="wake weights first"):
        asleep().to_wake(["kv_cache"])


def test_a_sleeping_replica_takes_no_update_and_no_request():
    for refused in (asleep().need_weights, asleep().need_awake):
        with pytest.raises(RuntimeError, match="asleep"):
            refused("begin_update")


def test_calls_that_come_twice_change_nothing():
    rules = asleep()
    assert not rules.may_sleep(1, paused=True, num_running=0)
    wake(rules, "weights")
    assert wake(rules, "weights") == () and rules.state is SleepState.WEIGHTS_AWAKE
    wake(rules, "kv_cache")
    assert wake(rules, "weights", "kv_cache") == ()


def test_another_level_while_asleep_and_a_sleep_half_awake_are_refused():
    with pytest.raises(RuntimeError, match="wake it first"):
        asleep(1).may_sleep(2, paused=True, num_running=0)
    rules = asleep()
    wake(rules, "weights")
    with pytest.raises(RuntimeError, match="weights awake"):
        rules.may_sleep(1, paused=True, num_running=0)


@pytest.mark.parametrize("paused, num_running", [(False, 0), (True, 3), (False, 3)])
def test_a_replica_that_may_generate_does_not_sleep(paused, num_running):
    with pytest.raises(RuntimeError, match=f"{num_running} requests running; pause"):
        SleepRules((1,)).may_sleep(1, paused=paused, num_running=num_running)


def test_a_level_or_a_tag_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ValueError, match="its levels are 1;"):
        SleepRules((1,)).may_sleep(2, paused=True, num_running=0)
    with pytest.raises(ValueError, match="started without; set EngineSettings.sleep_level"):
        SleepRules(()).may_sleep(1, paused=True, num_running=0)
    for tags in (["kv"], []):
        with pytest.raises(ValueError, match="weights, kv_cache"):
            asleep().to_wake(tags)
