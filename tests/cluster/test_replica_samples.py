"""Replicas of one run do not sample alike: their samples, looked at themselves."""

import numpy as np
import pytest
import torch
from test_engine_protocol import PROMPT, Replica

from roll_async.inference.seeds import replica_seed

GROUP = 4


def answers(strategy, folder, seed):
    """What one replica samples first for one prompt, as tuples of tokens."""
    pytest.importorskip({"vllm": "vllm", "hf_infer": "transformers"}[strategy])
    replica = Replica(strategy, folder, tied=True, seed=seed)
    try:
        requests = [replica.request(PROMPT, max_new_tokens=32) for _ in range(GROUP)]

        async def all_of_them():
            return [await task for task in replica.start(*requests)]

        return [tuple(c.token_ids) for c in replica.runner.run(all_of_them())]
    finally:
        replica.close()


@pytest.mark.parametrize("strategy", ["vllm", "hf_infer"])
def test_no_answer_of_a_replica_is_that_of_another_or_of_itself_before_a_restart(strategy, tmp_path):
    """verl PR 5179, NeMo-RL PR 171: replicas with one seed gave every group as many copies as there were replicas."""
    starts = [(0, 0), (1, 0), (2, 0), (0, 1)]
    sampled = [answers(strategy, tmp_path, replica_seed(42, replica, restart)) for replica, restart in starts]
    assert len({answer for group in sampled for answer in group}) == GROUP * len(starts)
    assert answers(strategy, tmp_path, replica_seed(42, 0, 0)) == sampled[0], "the same start samples the same again"


def test_the_generators_of_a_vllm_process_start_from_the_replicas_seed(tmp_path):
    """Its second model runner draws the seed of each request from numpy's, which is set after the warm-up."""
    pytest.importorskip("vllm")
    seed = replica_seed(42, 3, 0)
    replica = Replica("vllm", tmp_path, tied=True, seed=seed)
    try:
        drawn = np.random.randint(2**31, size=8)
    finally:
        replica.close()
    assert drawn.tolist() == np.random.RandomState(seed).randint(2**31, size=8).tolist()


def test_a_vllm_core_in_this_process_computes_with_as_many_threads_as_the_process_was_told(tmp_path, monkeypatch):
    """vLLM's other executors set torch to one thread, its worker makes the setting do nothing, and a new thread of a
    process starts with OpenMP's number.
    """
    pytest.importorskip("vllm")
    before = torch.get_num_threads()
    torch._C.set_num_threads(before + 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    try:
        assert len(answers("vllm", tmp_path, seed=1)) == GROUP
    finally:
        torch._C.set_num_threads(before)
