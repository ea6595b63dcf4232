"""Steps that move only a part of the model, or are pushed by more than the policy loss: adapters, frozen parameters,
the routers' auxiliary loss. Each is the same step in every layout.
"""

import re

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases
import tiny_families

from roll_async.trainer.megatron.model import layer_spec
from roll_async.trainer.megatron.model.layer_spec import LayerChoice, choose_layers
from roll_async.trainer.megatron.model.model_config import layers_of

DISTRIBUTED = {"optimizer": {"distributed": True}}
T2 = (2, {"parallel": {"tensor": 2, "sequence_parallel": True}})
T2_PLAIN = (2, {"parallel": {"tensor": 2}})
P2 = (2, {"parallel": {"pipeline": 2}})
C2 = (2, {"parallel": {"context": 2}})
D2 = (2, DISTRIBUTED)
D2_OVERLAP = (2, {"optimizer": {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}})
T2X2 = (2, {"parallel": {"tensor": 2, "expert_tensor": 2, "sequence_parallel": True}})
T2E2X2D2 = (4, {"parallel": {"tensor": 2, "expert": 2, "expert_tensor": 2, "sequence_parallel": True}, **DISTRIBUTED})
FULL = {"recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: cases.model_folder(tmp_path_factory.mktemp("model"), kind) for kind in cases.MODELS}


@pytest.fixture(scope="module")
def measured(rank_pool, folders):
    """Measures a layout once: the one-rank figures are compared with many others."""
    known = {}

    def measure(kind, layout, **more):
        key = (kind, str(layout), str(more))
        if key not in known:
            world_size, settings = layout
            settings = cases.settings_of(folders[kind], **settings, **more)
            known[key] = rank_pool.run(cases.measure, world_size, settings=settings)[0]
        return known[key]

    return measure


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dense", T2),
        ("dense", T2_PLAIN),
        ("dense, tied", P2),
        ("dense", D2),
        ("dense", D2_OVERLAP),
        ("MoE", T2X2),
        ("MoE", T2E2X2D2),
    ],  # fmt: skip
)
def test_adapters_take_the_same_step_in_every_layout(measured, kind, layout):
    cases.assert_same_steps(measured(kind, layout, **LORA), measured(kind, (1, {}), **LORA))


def test_adapters_move_their_layers_only_and_off_they_leave_the_model_as_it_was(measured):
    found = measured("dense", (1, {}), **LORA, lora_targets=("q_proj", "k_proj", "v_proj", "down_proj"))
    assert (found["base"] == found["before"]).all()
    assert (found["after"] - found["before"]).abs().max() > 1e-3
    moved = {name for name, x in found["trained"].items() if not (x == found["exported"][name]).all()}
    targets = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "down_proj.weight")
    assert moved == {name for name in found["exported"] if name.endswith(targets)}


@pytest.mark.parametrize("layout", [(1, FULL), P2])
def test_frozen_prefixes_do_not_train_and_the_rest_does(measured, layout):
    prefixes = ("model.embed_tokens", "model.layers.1.", "decoder.layers.3.mlp")
    found = measured("dense", layout, frozen=prefixes)
    for name, tensor in found["exported"].items():
        frozen = name.startswith(prefixes[:2]) or name.startswith("model.layers.3.mlp")
        assert bool((found["trained"][name] == tensor).all()) == frozen, name


def test_a_prefix_and_a_target_that_nothing_has_are_refused(rank_pool, folders):
    with pytest.raises(RuntimeError, match="freeze_module_prefix 'model.visual': no parameter begins with it"):
        rank_pool.run(cases.measure, 1, settings=cases.settings_of(folders["dense"], frozen=("model.visual",)))
    with pytest.raises(RuntimeError, match="k_proj, v_proj in one layer; name all of them or none"):
        settings = cases.settings_of(folders["dense"], **LORA, lora_targets=("q_proj",))
        rank_pool.run(cases.measure, 1, settings=settings)


@pytest.mark.parametrize("layout", [T2, T2X2, P2, C2])
def test_the_routers_auxiliary_loss_pushes_alike_in_every_layout(measured, layout):
    aux = {"moe_aux_loss_coeff": 0.5}
    cases.assert_same_steps(measured("MoE", layout, **aux), measured("MoE", (1, {}), **aux))
    plain = measured("MoE", (1, {}))["steps"][0]["trainer/grad_norm"]
    assert measured("MoE", (1, {}), **aux)["steps"][0]["trainer/grad_norm"] != pytest.approx(plain, rel=1e-3)


def test_adapters_survive_a_checkpoint_and_a_change_of_layout(rank_pool, folders, tmp_path):
    def run(function, layout):
        settings = cases.settings_of(folders["dense"], **layout[1], **LORA)
        return rank_pool.run(function, layout[0], settings=settings, folder=str(tmp_path / "step"))[0]

    expected = run(cases.train_and_save, T2)
    cases.assert_same_losses(run(cases.load_and_train, (1, {})), expected)


def test_a_run_with_other_adapters_does_not_load_a_checkpoint(rank_pool, folders, tmp_path):
    """The files would fit another alpha, and be another model."""

    def run(function, **lora):
        settings = cases.settings_of(folders["dense"], **lora)
        return rank_pool.run(function, 1, settings=settings, folder=str(tmp_path / "step"))[0]

    run(cases.train_and_save, **LORA)
    for lora in ({**LORA, "lora_alpha": 16.0}, {**LORA, "lora_targets": ("o_proj",)}, {}):
        said = run(cases.load_and_train, **lora)
        assert "was written with lora_rank=4, lora_alpha=8.0, lora_target=all-linear, this run has lora_rank=" in said


@pytest.mark.parametrize("layout", [(1, {}), T2_PLAIN])
def test_dropout_leaves_out_inputs_of_the_adapter_only(rank_pool, folders, layout):
    """One layer cut by columns and one cut by rows, in every tensor-parallel rank."""
    settings = cases.settings_of(folders["dense"], **layout[1], **LORA, lora_dropout=0.5)
    for answers in rank_pool.run(cases.dropped_layers, layout[0], settings=settings):
        for name, gaps in answers.items():
            assert gaps["scoring"] < 1e-5 and gaps["mean"] < 0.1 < gaps["one draw"], (name, gaps)
            assert gaps["column, same draw"] < 1e-5, name


def test_dropout_moves_a_step_and_is_drawn_alike_when_activations_are_computed_again(measured):
    plain, dropped = measured("dense", (1, {}), **LORA), measured("dense", (1, {}), **LORA, lora_dropout=0.3)
    assert (dropped["before"] == plain["before"]).all()
    assert (dropped["after"] - plain["after"]).abs().max() > 1e-3
    again = measured("dense", (1, {}), **LORA, lora_dropout=0.3, **FULL)
    assert (again["after"] == dropped["after"]).all()


@pytest.mark.parametrize(("layout", "dtype"), [((1, {}), "bf16"), (D2, "bf16"), ((1, {}), "fp32")])
def test_steps_are_the_same_when_the_optimizers_state_lives_elsewhere_between_them(rank_pool, folders, layout, dtype):
    settings = cases.settings_of(folders["dense"], **layout[1], dtype=dtype)
    found = rank_pool.run(cases.steps_from_host_memory, layout[0], settings=settings)
    for rank in found:
        assert rank["away"] and rank["moved"][:2] == rank["plain"][:2]
        assert rank["tensors"] > 0
    assert (found[0]["moved"][2] == found[0]["plain"][2]).all()


def test_on_cpu_the_offload_has_nothing_to_do(rank_pool, folders):
    settings = cases.settings_of(folders["dense"], optimizer={"cpu_offload": True})
    plain = cases.settings_of(folders["dense"])
    steps = [rank_pool.run(cases.measure, 1, settings=x)[0]["steps"] for x in (settings, plain)]
    assert steps[0] == steps[1]


def test_adapters_that_no_layer_takes_are_refused_by_name(rank_pool, tmp_path):
    tiny_families.save_tiny("deepseek v3", tmp_path)
    targets = {"lora_targets": ("o_proj", "q_proj", "k_proj", "v_proj")}  # latent attention has no such projection
    settings = cases.settings_of(str(tmp_path), **LORA, **targets)
    with pytest.raises(RuntimeError, match="'v_proj'.: no layer linear_qkv of this model takes an adapter"):
        rank_pool.run(cases.measure, 1, settings=settings)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("qwen3.5", "gated delta net"), ("gpt-oss", "attention sinks"), ("qwen2.5-vl", "three axes"),
        ("gemma 3", "windowed layers"),
    ],
)  # fmt: skip
def test_where_transformer_engine_has_no_such_part_auto_takes_local_layers_and_asking_for_it_is_refused(
    tmp_path, monkeypatch, caplog, kind, part
):
    """As on a machine that has a device and the package."""
    monkeypatch.setattr(layer_spec.engine_import, "problem", lambda: None)
    monkeypatch.setattr(layer_spec.torch.cuda, "is_available", lambda: True)
    tiny_families.save_tiny(kind, tmp_path / "it")
    tiny_families.save_tiny("qwen3", tmp_path / "other")
    for folder in ("it", "other"):
        choose_layers.cache_clear()
        with caplog.at_level("INFO"):
            found = layers_of(cases.settings_of(str(tmp_path / folder)))
        assert found is (LayerChoice.LOCAL if folder == "it" else LayerChoice.TRANSFORMER_ENGINE)
    assert re.search(rf"layers: local \(.*{part}", caplog.text)
    choose_layers.cache_clear()
    with pytest.raises(ValueError, match=f"=transformer_engine: .*{part}.*; use auto, or local"):
        layers_of(cases.settings_of(str(tmp_path / "it"), transformer_impl="transformer_engine"))
    choose_layers.cache_clear()


def test_without_transformer_engine_layers_are_local_and_the_log_says_why(caplog):
    choose_layers.cache_clear()
    with caplog.at_level("INFO"):
        assert choose_layers("auto", adapters=True) is LayerChoice.LOCAL
    assert "layers: local (the package transformer_engine is not installed)" in caplog.text
    with pytest.raises(ValueError, match="transformer_engine is not installed; install it, or use auto"):
        choose_layers("transformer_engine")
