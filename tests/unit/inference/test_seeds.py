import numpy as np

from roll_async.inference.seeds import manager_seed, replica_seed


def test_seeds_differ_by_run_replica_and_restart_and_come_again():
    """verl PR 5179: replicas started with the run's own seed answered every prompt alike."""
    keys = [(run, replica, restart) for run in (0, 1, 42) for replica in range(64) for restart in range(4)]
    seeds = [replica_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys) and all(0 <= seed < 2**32 for seed in seeds)
    assert seeds == [replica_seed(*key) for key in keys]


def test_neighbouring_replicas_share_no_part_of_their_streams():
    """A sum of run seed and replica number would: run 42, replica 1 is run 43, replica 0."""
    assert replica_seed(42, 1, 0) != replica_seed(43, 0, 0) and replica_seed(42, 1, 0) != replica_seed(42, 0, 1)


def test_requests_of_a_runner_that_draws_their_seeds_from_numpy_differ_between_replicas():
    """As vLLM's second model runner does: its k-th request gets the k-th draw, whatever the timing."""
    drawn = [np.random.RandomState(replica_seed(42, replica, 0)).randint(-(2**63), 2**63 - 1, 64) for replica in (0, 1)]
    assert not set(drawn[0].tolist()) & set(drawn[1].tolist())


def test_every_manager_of_an_engine_begins_a_stream_of_its_own():
    assert len({manager_seed(7, number) for number in range(100)}) == 100
