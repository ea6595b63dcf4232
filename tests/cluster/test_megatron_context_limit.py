"""Context parallelism without Transformer Engine gathers all keys and forms a mask: refused where that is quadratic."""

import pytest

pytest.importorskip("megatron.core")

from roll_async.trainer.megatron.model.attention import LONGEST_SHARED_ROW
from roll_async.trainer.megatron.model.model import check_context
from roll_async.trainer.megatron.settings import MegatronSettings, ParallelSizes


def settings(longest, context=2):
    parallel = ParallelSizes(context=context)
    return MegatronSettings(model_folder="", transformer_impl="local", parallel=parallel, longest_row=longest)


def test_rows_up_to_the_limit_are_taken_and_longer_ones_refused_with_the_remedy():
    check_context(settings(LONGEST_SHARED_ROW))
    check_context(settings(10 * LONGEST_SHARED_ROW, context=1))
    with pytest.raises(
        ValueError, match=r"context_parallel_size=2 without .* 32768 x 16384 .*install transformer-engine"
    ):
        check_context(settings(2 * LONGEST_SHARED_ROW))
