"""Every case of tools/gpu_suite.py as a test: one command each, with a limit, JSON out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_suite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", [*gpu_suite.CASES, "demo", "resident"])
def test_a_case_of_the_suite(name):
    command = [sys.executable, str(ROOT / "tools" / "gpu_suite.py"), "--only", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    skipped = [line["skipped"] for line in lines if "skipped" in line]
    assert done.returncode == 0, done.stdout + done.stderr
    if skipped:
        pytest.skip("; ".join(skipped))
