"""Scaled rotary frequencies against transformers."""

import pytest

transformers = pytest.importorskip("transformers")
import torch

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.rotary import Rotary

CONTEXT = {"original_max_position_embeddings": 256}
SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **CONTEXT},
    {"rope_type": "yarn", "factor": 4.0, **CONTEXT},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.6, "beta_fast": 16, **CONTEXT},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "truncate": False, **CONTEXT},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']}-{len(s)}")
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_frequencies_and_factor_are_those_of_transformers(scaling, fraction):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**scaling, "rope_theta": 500000.0, "partial_rotary_factor": fraction}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=parameters
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    rotary = Rotary.of(HfConfig(config.to_dict(), "config.json"))
    assert torch.allclose(rotary.frequencies(int(64 * fraction), 2048), wanted, rtol=1e-6)
    assert rotary.attention_factor() == pytest.approx(factor)


def test_both_places_of_the_base_are_read():
    assert Rotary.of(HfConfig({"rope_theta": 5e5}, "c")).base == 5e5
    assert Rotary.of(HfConfig({"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}, "c")).base == 5e6
    old = Rotary.of(HfConfig({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, "c"))
    assert (old.base, old.kind) == (5e5, "linear")


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="rope_type 'dynamic' is not supported"):
        Rotary.of(HfConfig({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "c"))
