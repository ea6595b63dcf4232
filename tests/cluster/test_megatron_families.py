"""Every family against Transformers, on one rank and under tensor, pipeline and expert parallelism: the logits agree,
and what the ranks export is the file they read, bit for bit.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import tiny_families  # noqa: E402
from tiny_families import FAMILIES, MOE  # noqa: E402

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
        assert (logits - wanted).abs().max() < 1e-5
    assert wanted.std() > 0.1, "logits this small would agree by accident"
    for _, exported in results:
        assert exported.keys() == file.keys()
        assert all(torch.equal(torch.from_numpy(exported[key]), file[key]) for key in file)
