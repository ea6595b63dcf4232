"""Every family against Transformers, on one rank and under tensor, pipeline and expert parallelism: the logits agree,
and what the ranks export is the file they read, bit for bit.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases
import tiny_families
from tiny_families import FAMILIES, MOE

from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.checkpoint.hf_names.families import family_of
from roll_async.trainer.megatron.model.model_config import transformer_config
from tests.rounding import Bounds, assert_near

LAYOUTS = {"1 rank": {}, "TP=2": {"tensor": 2}, "PP=2": {"pipeline": 2}, "EP=2": {"expert": 2}}
CASES = [(name, layout) for name in FAMILIES for layout in LAYOUTS if layout != "EP=2" or name in MOE]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """name -> (folder, tokens, logits of Transformers, tensors of the file); each made once."""
    from safetensors.torch import load_file

    made = {}
    tokens = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("tiny")
            model = tiny_families.save_tiny(name, folder)
            with torch.no_grad():
                made[name] = folder, tokens, model(tokens).logits, load_file(folder / "model.safetensors")
        return made[name]

    return make


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}-{layout}" for name, layout in CASES])
def test_logits_agree_with_transformers_and_the_export_is_the_file(rank_pool, reference, name, layout):
    folder, tokens, wanted, file = reference(name)
    sizes = dict(LAYOUTS[layout], sequence_parallel=layout == "TP=2" and name in MOE)
    arguments = {"layout": sizes, "folder": folder, "tokens": tokens.numpy()}
    results = rank_pool.run(tiny_families.logits_and_export, 1 if layout == "1 rank" else 2, **arguments)
    computed = [torch.from_numpy(logits) for logits, _ in results if logits is not None]
    assert computed
    for logits in computed:
        assert_near(logits, wanted, Bounds(layers=4, hidden=64, inner=96, length=40).forward)
    assert wanted.std() > 0.1, "logits this small would agree by accident"
    for _, exported in results:
        assert exported.keys() == file.keys()
        assert all(torch.equal(torch.from_numpy(exported[key]), file[key]) for key in file)


# Families with parts of their own: latent attention, shared experts and their gate, norms behind attention and MLP.
TRAINED = ("deepseek v3", "deepseek v3 yarn", "qwen2 moe", "glm 4")
STEPS = [(name, layout) for name, layout in CASES if name in TRAINED and layout != "1 rank"]


@pytest.fixture(scope="module")
def one_rank(rank_pool, reference):
    """name -> what a single rank measures; each run once."""
    made = {}

    def measure(name):
        if name not in made:
            settings = cases.settings_of(str(reference(name)[0]))
            made[name] = rank_pool.run(cases.measure, 1, settings=settings)[0]
        return made[name]

    return measure


@pytest.mark.parametrize(("name", "layout"), STEPS, ids=[f"{name}-{layout}" for name, layout in STEPS])
def test_a_training_step_is_that_of_one_rank(rank_pool, reference, one_rank, name, layout):
    expected = one_rank(name)
    parallel = dict(LAYOUTS[layout], sequence_parallel=layout == "TP=2")
    settings = cases.settings_of(str(reference(name)[0]), parallel=parallel)
    found = rank_pool.run(cases.measure, 2, settings=settings)[0]
    cases.assert_same_steps(found, expected, routed=name in MOE)
    first, second = (step["trainer/loss"] for step in expected["steps"])
    assert second < first - 1e-3


@pytest.mark.parametrize(
    ("name", "parallel", "problem"),
    [
        ("qwen3", {"tensor": 4}, "num_key_value_heads=2 cannot be shared evenly by 4"),
        ("qwen3", {"tensor": 5}, "vocab_size=96 cannot be shared evenly by 5"),
        ("qwen3", {"pipeline": 3}, "num_hidden_layers=4 cannot be shared evenly by 3"),
        ("qwen3", {"expert": 2}, "expert_model_parallel_size=2, but the model has no experts"),
        ("qwen3 moe", {"expert": 3}, "num_experts=4 cannot be shared evenly by 3"),
        ("qwen3 moe", {"tensor": 2}, "needs sequence_parallel: true"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_by_name(reference, name, parallel, problem):
    settings = cases.settings_of(str(reference(name)[0]), parallel=parallel)
    config = HfFolder(settings.model_folder).config
    with pytest.raises(ValueError, match=problem):
        transformer_config(config, family_of(config.architecture()), settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_transformer_engine_is_refused_where_it_cannot_run(reference):
    settings = replace(cases.settings_of(str(reference("qwen3")[0])), transformer_impl="transformer_engine")
    config = HfFolder(settings.model_folder).config
    with pytest.raises(ValueError, match="the package transformer_engine is not installed; install it, or use auto"):
        transformer_config(config, family_of(config.architecture()), settings)
