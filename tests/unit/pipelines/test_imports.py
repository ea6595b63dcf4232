"""The loops are plain asyncio: what imports them needs neither torch nor Ray, and starts in a moment."""

import subprocess
import sys

HEAVY = ("torch", "numpy", "ray", "vllm", "transformers", "megatron")


def test_the_loops_and_their_wiring_import_without_torch():
    code = f"import sys, roll_async.pipelines.wire; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
