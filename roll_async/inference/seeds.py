"""Random generators of engine replicas.

Two replicas with equal seeds sample equal responses to a prompt: the samples of a group, dealt to replicas in turn,
are then copies, and a group without reward variance has a zero gradient.
"""

from __future__ import annotations

import numpy as np


def replica_seed(run_seed: int, replica: int, restart: int) -> int:
    """Seed of one replica, below 2**32, as libraries want it. `restart`: how often it was started before.

    Streams of other replicas, of the same one before it died, and of runs with another seed are independent of it; the
    same three numbers give the same seed again. All generators of the replica's processes start from it, numpy's
    included: vLLM's second model runner draws the seed of every request from that one.
    """
    return _derived(run_seed, replica, restart)


def manager_seed(engine_seed: int, number: int) -> int:
    """Seed of the `number`-th generator that one engine makes after another: each begins a stream of its own."""
    return _derived(engine_seed, number)


def _derived(entropy: int, *key: int) -> int:
    # Spawn keys, not a sum: seed + replica would be the seed of another run's replica.
    return int(np.random.SeedSequence(entropy, spawn_key=key).generate_state(1)[0])
