"""The passes over a piece of logits, as a device runs them: compiled whole, for any number of rows, in place. Their
numbers are compared with those of the whole vocabulary in tests/cluster/test_sharded_logprobs.py.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from roll_async.algorithms.logprobs import Sampling
from roll_async.trainer.megatron.model import logprobs
from tests.rounding import assert_near, reordered

VOCABULARY = 50


def _logits(rows, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, VOCABULARY, generator=generator) * 3).to(dtype)
    return logits, torch.randint(0, VOCABULARY, (rows,), generator=generator), torch.randn(rows, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_is_one_graph_that_is_compiled_twice_however_many_lengths_come(dtype, monkeypatch):
    """Once for the first number of rows, once for any; a graph that breaks would be refused."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # an engine on a CPU sets it for its process
    torch._dynamo.reset()  # it remembers which sizes have varied
    counts = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    read, slope = (
        torch.compile(each, backend=count, fullgraph=True)
        for each, count in zip((logprobs._read, logprobs._slope), counts, strict=True)
    )
    for rows in (64, 63, 17, 2, 40):
        logits, words, gain = _logits(rows, dtype, seed=rows)
        plain = logprobs._read(logits, words, 1.0, True, True)
        for found, wanted in zip(read(logits, words, 1.0, True, True), plain, strict=True):
            assert_near(found, wanted, reordered(VOCABULARY))
        compiled, eager = logits.clone(), logits.clone()
        slope(compiled, plain[1], gain, 1.0, (gain, plain[2]))
        logprobs._slope(eager, plain[1], gain, 1.0, (gain, plain[2]))
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=torch.finfo(dtype).eps)
        assert not torch.equal(compiled, logits), "the gradient stands where the logits stood"
    assert [count.frame_count for count in counts] == [2, 2]


def test_the_entry_of_a_sure_target_keeps_the_digits_that_its_rounded_probability_has_lost():
    """In bf16 p = 0.9975 is 0.996 or 1: one minus that is 0.0039 or nothing."""
    logits = torch.tensor([[6.0, 0.0]], dtype=torch.bfloat16)
    words, as_it_is = torch.tensor([0]), (Sampling(1.0, 0, 1.0, 1, False, False), _Alone())
    found = logprobs.piece_statistics(logits, words, *as_it_is)
    logprobs.slope_in_place(logits, words, found, (torch.ones(1), None), *as_it_is)
    assert logits[0].tolist() == [pytest.approx(0.0024726, rel=2**-8), pytest.approx(-0.0024726, rel=2**-8)]


class _Alone:
    """A tensor group of one rank."""

    def size(self):
        return 1

    def rank(self):
        return 0
