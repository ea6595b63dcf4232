"""Settings of `tools/bench/admission_table.py` in which a wrong guess of lengths shows, shorter than there."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "bench"))
from admission_table import SETTINGS, measure


def by_kv(name, **changes):
    (setting,) = [one for one in SETTINGS if one.name == name]
    return measure(replace(setting, **changes), fixed=None, seed=1)


def test_answers_that_become_ten_times_as_long_do_not_fill_the_cache_over_and_over():
    """A fixed 45 gives 1,826 tokens/s without a preemption, a fixed 128 gives 1,792 with 1,385."""
    result = by_kv("10x longer after a third", seconds=120, longer_from_s=40)
    assert result.tokens_per_s > 2200 and result.preemptions < 300


def test_short_answers_let_many_run_and_the_tenth_that_is_long_fits_beside_them():
    """A fixed 32 gives 1,435 tokens/s, a fixed 45 gives 1,644 with 321 preemptions."""
    result = by_kv("9 in 10 are short", seconds=120)
    assert result.tokens_per_s > 1650 and result.preemptions < 50
