"""The tensors of a checkpoint find their places in a live Transformers model: experts, tied and fused ones."""

import asyncio
from array import array

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

import tiny_families
from tiny_families import FAMILIES

from roll_async.config.engine_traits import ENGINE_TRAITS
from roll_async.inference.hf.engine import HfEngine
from roll_async.inference.hf.weights import WeightTargets
from roll_async.inference.settings import EngineSettings
from roll_async.schema import GenerateRequest, SamplingParams

SERVED = [n for n, (family, _) in FAMILIES.items() if family.name not in ENGINE_TRAITS["hf_infer"].unserved]


@pytest.mark.parametrize("name", SERVED)
def test_a_saved_model_copied_tensor_by_tensor_is_that_model(tmp_path, name):
    kind = type(tiny_families.save_tiny(name, tmp_path))
    expected, model = (kind.from_pretrained(tmp_path, dtype=torch.float32) for _ in range(2))
    expected = expected.state_dict()
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


def test_latent_attention_generates_with_the_cache_what_it_scores_without(tmp_path):
    """Keys and values have other sizes there, and the cache of continuous batching has one."""
    tiny_families.save_tiny("deepseek v3", tmp_path)
    settings = EngineSettings(model_folder=str(tmp_path), dtype="fp32", device="cpu", max_model_len=64, max_running=4)

    async def drive():
        engine = HfEngine(settings)
        await engine.start()
        try:
            sampling = SamplingParams(max_new_tokens=12)
            asked = (GenerateRequest(request_id=f"r{i}", prompt_token_ids=array("i", [5 + i, 9, 20]), sampling=sampling)
                     for i in range(3))  # fmt: skip
            answers = await asyncio.gather(*map(engine.generate, asked))
            return [(x, await engine.score([5 + i, 9, 20, *x.token_ids])) for i, x in enumerate(answers)]
        finally:
            await engine.close()

    for answer, scored in asyncio.run(drive()):
        assert len(answer.token_ids) > 0
        assert list(answer.logprobs) == pytest.approx(list(scored[2:]), abs=1e-4)
