"""Limits of tests are written for two quiet cores; `patient` says how long the same may take on this machine just now.

It is for what must happen in time, where a defect would take for ever or many times longer. Work that has to be slow is
made slow by the test itself, and what can be counted (calls, steps of a virtual clock) is counted.
"""

import itertools
import os
import statistics
import time

_TERMS, _SUM_S = 50_000, 0.004
"""A sum in plain Python, and its seconds on a quiet core of 3 GHz."""


def slowness() -> float:
    """How many times slower than on two quiet cores: by the runnable processes of the last minute for each core, and by
    a piece of work now, which also sees a burst of other work and a slow processor. At least 1.
    """
    times = [time.perf_counter()]
    for _ in range(3):
        sum(i * i for i in range(_TERMS))
        times.append(time.perf_counter())
    measured = statistics.median(after - before for before, after in itertools.pairwise(times)) / _SUM_S
    return max(1.0, measured, os.getloadavg()[0] / (os.cpu_count() or 1))


def patient(seconds: float) -> float:
    """Seconds of this machine just now for `seconds` of two quiet cores. ROLL_ASYNC_TEST_PATIENCE multiplies it."""
    return seconds * slowness() * float(os.environ.get("ROLL_ASYNC_TEST_PATIENCE", "1"))
