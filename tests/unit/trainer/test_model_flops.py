"""The formula of model FLOPs against what torch counts in a forward pass of the Hugging Face model."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cluster"))
import tiny_families
from torch.utils.flop_counter import FlopCounterMode

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.trainer.megatron.model.model_flops import model_flops, peak_tflops
from roll_async.trainer.megatron.settings import MegatronSettings

LENGTH = 24


def flops_of(folder, **fields):
    model = HfConfig(json.loads((Path(folder) / "config.json").read_text()), "config.json")
    return model_flops(model, MegatronSettings(model_folder="", **fields))


# Transformers computes gated delta nets in chunks of 64, which are more products than the rule needs.
@pytest.mark.parametrize(
    "family", [name for name, (_, more) in tiny_families.FAMILIES.items() if "linear_num_key_heads" not in more]
)
def test_the_formula_counts_the_products_of_a_forward_pass(family, tmp_path):
    model = tiny_families.save_tiny(family, tmp_path)
    model.set_attn_implementation("eager")
    if family in tiny_families.MOE:
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(LENGTH)[None] + 3, use_cache=False)
    flops = flops_of(tmp_path)
    eager = LENGTH * flops.per_token + LENGTH**2 * flops.per_pair  # all pairs: it masks what a query may not see
    rotation = 0.02 * LENGTH * flops.per_token  # angles are a product of matrices there
    assert eager <= counter.get_total_flops() <= eager + rotation


def test_a_step_is_three_forward_passes_and_two_where_the_weights_are_frozen(tmp_path):
    tiny_families.save_tiny("qwen3", tmp_path)
    flops, frozen = flops_of(tmp_path), flops_of(tmp_path, lora_rank=4)
    assert flops.forward([3]) == 3 * flops.per_token + 6 * flops.per_pair
    assert flops.forward([3, 5]) == flops.forward([3]) + flops.forward([5])
    assert flops.step([7]) == 3 * flops.forward([7]) and frozen.step([7]) == 2 * frozen.forward([7])
    assert flops_of(tmp_path, with_value_head=True).per_token < flops.per_token


def test_a_device_is_known_by_a_part_of_its_name():
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989 and peak_tflops("NVIDIA H100 PCIe") == 756
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312 and peak_tflops("cpu") is None
