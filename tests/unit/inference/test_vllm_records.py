"""vLLM's arrays of routed experts to our records."""

import pytest

numpy = pytest.importorskip("numpy")

from roll_async.inference.engine import expert_record


@pytest.mark.parametrize(("kind", "typecode"), [("uint8", "B"), ("uint16", "h")])
def test_positions_come_first_then_layers_then_experts(kind, typecode):
    routed = numpy.arange(5 * 3 * 2, dtype=kind).reshape(5, 3, 2)
    record = expert_record(routed[1:])  # a view, as of a request that resumes
    assert (record.num_positions, record.num_layers, record.top_k) == (4, 3, 2)
    assert record.ids.typecode == typecode and record.ids.tolist() == list(range(6, 30))


def test_a_request_that_never_ran_has_no_record():
    assert expert_record(None) is None
