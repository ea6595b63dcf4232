"""Megatron's real Transformer Engine layer spec over a Transformer Engine in plain torch (te_stub/): the same steps,
weights and files as local layers, in every kind of layout. What is left to a GPU is the kernels.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases
from engine_pool import EnginePool

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
ENGINE = {"transformer_impl": "transformer_engine"}
PACKED = {"micro_batching": "packed", "max_tokens_per_microbatch": 96}
FULL = {"recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}
DISTRIBUTED = {"optimizer": {"distributed": True}}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
T2 = {"parallel": {"tensor": 2, "sequence_parallel": True}}
C2 = {"parallel": {"context": 2}}
T2C2 = {"parallel": {"tensor": 2, "context": 2, "sequence_parallel": True}}
E2 = {"parallel": {"expert": 2}}
T2E2X2 = {"parallel": {"tensor": 2, "expert": 2, "expert_tensor": 2, "sequence_parallel": True}}
P2 = {"parallel": {"pipeline": 2}}
ROWS = [
    ("dense", 1, PACKED),
    ("dense, tied", 2, {**T2, **FULL}),
    ("dense", 2, {**C2, **PACKED}),
    ("dense", 4, {**T2C2, **PACKED}),
    ("dense", 4, {"parallel": {"context": 4}}),
    ("dense, tied", 4, {**P2, **PACKED, **DISTRIBUTED}),
    ("MoE", 1, {}),
    ("MoE", 2, {**E2, **PACKED, **DISTRIBUTED}),
    ("MoE", 4, {**T2E2X2, **DISTRIBUTED}),
    ("MoE", 4, {"parallel": {"pipeline": 2, "expert": 2}}),
    ("dense", 2, {**C2, **PACKED, **LORA}),
    ("MoE", 2, {**T2, **LORA}),
]


@pytest.fixture(scope="module")
def engine_pool():
    pool = EnginePool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: cases.model_folder(tmp_path_factory.mktemp("model"), kind) for kind in cases.MODELS}


@pytest.fixture(scope="module")
def local(rank_pool, folders):
    """What one rank of local layers measures, per model, with and without adapters."""
    known = {}

    def measure(kind, lora):
        if (kind, bool(lora)) not in known:
            settings = cases.settings_of(folders[kind], **lora)
            known[kind, bool(lora)] = rank_pool.run(cases.measure, 1, settings=settings)[0]
        return known[kind, bool(lora)]

    return measure


@pytest.mark.parametrize(("kind", "world_size", "fields"), ROWS, ids=[f"{r[0]} {r[1]} {r[2]}" for r in ROWS])
def test_its_layers_take_the_same_steps_as_local_ones(engine_pool, folders, local, kind, world_size, fields):
    expected = local(kind, {key: fields[key] for key in LORA if key in fields})
    settings = cases.settings_of(folders[kind], **{**fields, **ENGINE})
    found = engine_pool.run(cases.measure, world_size, settings=settings)[0]
    assert found["exported"].keys() == expected["exported"].keys()
    assert all((found["exported"][name] == tensor).all() for name, tensor in expected["exported"].items())
    cases.assert_same_steps(found, expected)
    moved = float((expected["after"] - expected["before"]).abs().max())
    cases.assert_near(found["base"], expected["base"], cases.BOUNDS.moved, of=moved)


def test_the_layers_and_the_adam_are_those_of_the_package(engine_pool, folders):
    found = engine_pool.run(cases.classes_of_layers, 1, settings=cases.settings_of(folders["MoE"], **ENGINE))[0]
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"} <= found["layers"]
    assert {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"} <= found["layers"]
    assert found["optimizers"] == {"FusedAdam"}
    found = engine_pool.run(cases.classes_of_layers, 1, settings=cases.settings_of(folders["dense"], **ENGINE, **LORA))[
        0
    ]
    assert {"AdaptedColumnParallelLinear", "AdaptedRowParallelLinear", "TEDotProductAttention"} <= found["layers"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_goes_on_with_the_bias_correction_of_an_adam_that_counts_by_group(
    engine_pool, folders, tmp_path, dtype, world_size
):
    """Its entry `step` does not exist before its first step; without it the third step would be as large as a first."""
    layout = {} if world_size == 1 else DISTRIBUTED
    settings = cases.settings_of(folders["dense"], dtype=dtype, **layout, **ENGINE)
    arguments = {"settings": settings, "folder": str(tmp_path / "step")}
    expected = engine_pool.run(cases.train_and_save, world_size, **arguments)[0]
    assert engine_pool.run(cases.load_and_train, world_size, **arguments)[0] == expected


def test_a_count_of_steps_that_begins_anew_is_seen_in_the_next_step(engine_pool, folders, tmp_path):
    """What a resume would do without `restore_steps`; the test above rests on it being large."""
    settings = cases.settings_of(folders["dense"], **ENGINE)
    arguments = {"settings": settings, "folder": str(tmp_path / "step")}
    engine_pool.run(cases.train_and_save, 1, **arguments)
    known, forgotten = (
        engine_pool.run(cases.logprobs_after_resume, 1, **arguments, forget_count=forget)[0] for forget in (False, True)
    )
    gap = (known - forgotten).abs().mean().item()
    print(f"log-probs after the step, count kept against begun anew: {gap:.3f} nat")
    assert gap > 0.01


@pytest.mark.parametrize(("kind", "wide"), [("dense", T2), ("MoE", T2E2X2)])
def test_checkpoints_pass_from_its_layers_to_local_ones_and_back(rank_pool, engine_pool, folders, tmp_path, kind, wide):
    world_size = 4 if kind == "MoE" else 2
    there = cases.settings_of(folders[kind], **wide, **ENGINE)
    here = cases.settings_of(folders[kind])
    folder = str(tmp_path / "step")
    for saving, by, loading, into in (
        (engine_pool, (world_size, there), rank_pool, (1, here)),
        (rank_pool, (1, here), engine_pool, (world_size, there)),
    ):
        expected = saving.run(cases.train_and_save, by[0], settings=by[1], folder=folder)[0]
        found = loading.run(cases.load_and_train, into[0], settings=into[1], folder=folder)[0]
        assert not isinstance(found, str), found
        cases.assert_same_losses(found, expected)


def test_half_an_install_is_hidden_from_megatron_and_its_error_is_the_reason(tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('Found empty `transformer-engine` meta package')\n")
    script = (
        "from roll_async.trainer.megatron.state import engine_import\n"
        "print(engine_import.problem())\n"
        "try:\n    import transformer_engine\nexcept ImportError:\n    print('hidden')\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=patient(60), env=env)
    assert done.stdout.splitlines() == [
        "transformer_engine is installed, but does not import: RuntimeError: Found empty `transformer-engine` meta "
        "package",
        "hidden",
    ], done.stderr
