"""The tensors of a checkpoint find their places in a live Transformers model: experts, tied and fused ones."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

import tiny_families
from tiny_families import FAMILIES

from roll_async.inference.hf.weights import WeightTargets


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", [*FAMILIES])
def test_a_saved_model_copied_tensor_by_tensor_is_that_model(tmp_path, name):
    tiny_families.save_tiny(name, tmp_path)
    expected, model = load(tmp_path).state_dict(), load(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    targets = WeightTargets(model, model.config.model_type)
    assert targets.names == saved.keys()
    for key, tensor in saved.items():
        targets[key].copy_(tensor)
    found = model.state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    with pytest.raises(RuntimeError, match=r"the model has no parameter model\.nothing"):
        targets["model.nothing"]
