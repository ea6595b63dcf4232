"""The loops are plain asyncio: what imports them needs neither torch nor Ray, and starts in a moment."""

import subprocess
import sys
from pathlib import Path

import roll_async.pipelines
from tests.patience import patient

HEAVY = ("torch", "numpy", "ray", "vllm", "transformers", "megatron")


def test_the_loops_and_their_wiring_import_without_torch():
    folder = Path(roll_async.pipelines.__path__[0])
    modules = [f"roll_async.pipelines.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"]
    code = f"import sys, {', '.join(modules)}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60), check=True)
    assert done.stdout.strip() == "[]"
