"""A seed is a world: the same bytes in another process, whatever its hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", [564])
def test_a_seed_replays_byte_by_byte_in_another_process(tmp_path, seed):
    command = [sys.executable, "-m", "roll_async.cli", "simulate", "--seed", str(seed), "--trace"]
    for name in ("1", "2"):  # order must not come from a set of strings
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": name}
        subprocess.run([*command, str(tmp_path / name)], check=True, env=env, stdout=subprocess.DEVNULL)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
