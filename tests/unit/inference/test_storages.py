import os
import platform
import subprocess
import sys

import pytest
import torch

from roll_async.cluster.placement import ProcessPlacement, process_env
from roll_async.inference.storages import Storages


def test_memory_is_given_back_and_views_of_it_are_valid_again():
    whole = torch.arange(12.0)
    part, same = whole[3:6], whole.view(3, 4)
    storages = Storages([whole, part, same])
    assert storages.num_bytes == 48, "each piece of memory counts once"
    storages.release(keep_content=False)
    assert storages.num_bytes == 0 and whole.untyped_storage().nbytes() == 0
    storages.restore(zero=True)
    assert storages.num_bytes == 48
    part.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert whole.tolist() == [0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0] and same[1, 0] == 2


def test_host_memory_that_is_to_be_kept_stays_where_it_is():
    tensor = torch.arange(4.0)
    storages = Storages([tensor])
    storages.release(keep_content=True)
    assert storages.num_bytes == 16 and storages.host_bytes == 0
    storages.restore()
    assert tensor.tolist() == [0, 1, 2, 3]


_SLEEPS = """
from pathlib import Path
import torch
from roll_async.inference.storages import Storages
caches = [torch.ones(10 << 20, dtype=torch.uint8) for _ in range(16)]
above = torch.ones(1 << 16)  # a later piece, behind which nothing is given back by itself
def resident_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
held, awake = Storages(caches), resident_kib()
held.release(keep_content=False)
asleep = resident_kib()
held.restore(zero=True)
print((awake - asleep) // 1024, sum(int(cache.sum()) for cache in caches))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are not told to keep what is freed")
def test_the_pieces_of_a_sleeping_engine_are_the_systems_memory():
    env = process_env(ProcessPlacement(index=0, node=0, gpu_ids=(), num_threads=1), None)
    found = subprocess.check_output([sys.executable, "-c", _SLEEPS], env={**os.environ, **env}, text=True)
    given_back, content = map(int, found.split())
    assert given_back > 140 and content == 0
