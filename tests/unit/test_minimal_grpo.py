"""The teaching script runs the algorithm with our own functions, and learns."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "minimal_grpo.py"


@pytest.mark.slow
def test_the_teaching_script_is_short_and_learns(capsys):
    assert len(SCRIPT.read_text().splitlines()) <= 120
    spec = importlib.util.spec_from_file_location("minimal_grpo", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(steps=20) > 0.25  # a guess is right once in ten
    assert "staleness 1" in capsys.readouterr().out
