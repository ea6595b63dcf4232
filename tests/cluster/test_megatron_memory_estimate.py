"""The estimate of `roll-async show --memory` against the bytes that ranks really hold, kind by kind."""

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases
import tiny_families

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.trainer.megatron.memory_estimate import rank_memory

DISTRIBUTED = {"optimizer": {"distributed": True}}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
ROWS = [
    ("dense, tied", 1, {"dtype": "bf16", **LORA, "lora_targets": ("o_proj", "down_proj")}),
    ("dense, tied", 2, {"dtype": "bf16", "parallel": {"pipeline": 2}}),
    ("dense", 2, {"dtype": "bf16", **DISTRIBUTED}),
    ("MoE", 4, {"dtype": "bf16", "parallel": {"tensor": 2, "expert": 2, "sequence_parallel": True}, **DISTRIBUTED}),
    ("deepseek v3", 2, {"dtype": "bf16", "parallel": {"tensor": 2, "sequence_parallel": True}}),
]


@pytest.mark.parametrize(("kind", "world_size", "fields"), ROWS, ids=[f"{r[0]} {r[1]} {r[2]}" for r in ROWS])
def test_the_estimate_is_what_the_fullest_rank_holds(rank_pool, tmp_path, kind, world_size, fields):
    if kind in cases.MODELS:
        cases.model_folder(tmp_path, kind)
    else:
        tiny_families.save_tiny(kind, tmp_path)
    settings = cases.settings_of(str(tmp_path), **fields)
    found = rank_pool.run(cases.state_bytes, world_size, settings=settings)
    model = HfConfig(json.loads((Path(tmp_path) / "config.json").read_text()), "config.json")
    expected = rank_memory(model, settings, world_size)
    for name in ("weights", "gradients", "optimizer"):
        held = max(rank.device_bytes[name] for rank in found)
        assert held == pytest.approx(getattr(expected, name), rel=0.01, abs=3000), name
