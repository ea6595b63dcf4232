"""Hugging Face to Megatron, loaded and saved again by real ranks under TP=2 PP=2 (and EP=2 PP=2), back to Hugging Face:
the same files, bit for bit, for every family.
"""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import megatron_ranks  # noqa: E402
import tiny_families  # noqa: E402
from tiny_families import FAMILIES, MOE  # noqa: E402

from roll_async.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf  # noqa: E402

SAME_ROWS = ("qwen2.5 yarn", "llama 2")  # as qwen2 and llama 3, which differ in what is no weight
CASES = [(name, {"tensor": 2, "pipeline": 2}) for name in FAMILIES if name not in SAME_ROWS]
CASES += [(name, {"expert": 2, "pipeline": 2}) for name in MOE]


@pytest.fixture(scope="module")
def ranks():
    pool = megatron_ranks.Ranks(4, tiny_families.__file__)
    yield pool
    pool.close()


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}-{'-'.join(layout)}" for name, layout in CASES])
def test_the_round_trip_through_ranks_is_bitwise(ranks, tmp_path, name, layout):
    from safetensors.torch import load_file

    tiny_families.save_tiny(name, tmp_path / "hf")
    assert hf_to_megatron(tmp_path / "hf", tmp_path / "in", ConversionOptions(file_bytes=100_000)) == []
    differences = ranks.run("reshard", layout, tmp_path / "hf", tmp_path / "in", tmp_path / "out")
    assert differences == [0.0] * 4
    megatron_to_hf(tmp_path / "out", tmp_path / "back", ConversionOptions(), like=tmp_path / "hf")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
