"""Checkpoints of Megatron roles: any layout reads what any other wrote, with the optimizer's state; resume is exact."""

import json
import shutil

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases

from roll_async.checkpoint.conversion import ConversionOptions, megatron_to_hf
from roll_async.checkpoint.folders.manifest import write_manifest
from roll_async.commands.convert import run_convert

T2 = (2, {"parallel": {"tensor": 2, "sequence_parallel": True}})
P2 = (2, {"parallel": {"pipeline": 2}})
P2V2 = (2, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}})
ONE = (1, {})
D2 = (2, {"optimizer": {"distributed": True}})
D4 = (4, {"optimizer": {"distributed": True}})
T2D2 = (4, {"parallel": {"tensor": 2, "sequence_parallel": True}, "optimizer": {"distributed": True}})
P2D2 = (4, {"parallel": {"pipeline": 2}, "optimizer": {"distributed": True}})
E2 = (2, {"parallel": {"expert": 2}})
E2D = (2, {"parallel": {"expert": 2}, "optimizer": {"distributed": True}})
T2E2X2D2 = (
    4,
    {
        "parallel": {"tensor": 2, "expert": 2, "expert_tensor": 2, "sequence_parallel": True},
        "optimizer": {"distributed": True},
    },
)
BF16 = {"dtype": "bf16"}
PAIRS = {
    "T2 to one rank": ("dense, tied", T2, ONE),
    "T2 to D2 distributed": ("dense, tied", T2, D2),
    "P2 to T2": ("dense, tied", P2, T2),
    "P2 V2 to P2": ("dense", P2V2, P2),
    "D2 distributed to one rank": ("dense", D2, ONE),
    "D4 distributed to D2 distributed": ("dense", D4, D2),
    "T2 D2 distributed to D2 distributed": ("dense", T2D2, D2),
    "P2 D2 distributed to T2": ("dense, tied", P2D2, T2),
    "one rank to T2 D2 distributed": ("dense", ONE, T2D2),
    "E2 to one rank": ("MoE", E2, ONE),
    "E2 distributed to T2 E2 X2 D2 distributed": ("MoE", E2D, T2E2X2D2),
    "T2 E2 X2 D2 distributed to E2": ("MoE", T2E2X2D2, E2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models to start from, and models of the same shape with other weights to load into."""
    make = tmp_path_factory.mktemp
    return {(kind, seed): cases.model_folder(make("model"), kind, seed) for kind in cases.MODELS for seed in (0, 1)}


def run(rank_pool, function, folders, kind, layout, checkpoint, *, seed=0, more=None, **arguments):
    world_size, settings = layout
    settings = cases.settings_of(folders[kind, seed], **{**settings, **(more or {})})
    return rank_pool.run(function, world_size, settings=settings, folder=str(checkpoint), **arguments)[0]


def assert_same_steps(found, expected):
    cases.assert_same_losses(found, expected)
    for mine, theirs in zip(found, expected, strict=True):
        cases.assert_near(mine["trainer/grad_norm"], theirs["trainer/grad_norm"], cases.BOUNDS.moved)


@pytest.mark.parametrize("pair", PAIRS)
def test_another_layout_goes_on_as_the_one_that_saved(rank_pool, folders, tmp_path, pair):
    kind, before, after = PAIRS[pair]
    expected = run(rank_pool, cases.train_and_save, folders, kind, before, tmp_path / "step")
    found = run(rank_pool, cases.load_and_train, folders, kind, after, tmp_path / "step", seed=1)
    assert_same_steps(found, expected)


@pytest.mark.parametrize(("kind", "layout"), [("dense", D2), ("dense, tied", T2D2), ("MoE", E2D), ("dense", P2V2)])
def test_the_same_layout_resumes_bit_for_bit_even_when_the_save_ran_in_the_background(
    rank_pool, folders, tmp_path, kind, layout
):
    for background in (False, True):
        place = tmp_path / f"background_{background}"
        expected = run(rank_pool, cases.train_and_save, folders, kind, layout, place, background=background)
        found = run(rank_pool, cases.load_and_train, folders, kind, layout, place, seed=1)
        assert found == expected


def test_bf16_keeps_its_fp32_parameters_across_layouts(rank_pool, folders, tmp_path):
    expected = run(rank_pool, cases.train_and_save, folders, "dense", D2, tmp_path / "step", more=BF16)
    assert run(rank_pool, cases.load_and_train, folders, "dense", D2, tmp_path / "step", seed=1, more=BF16) == expected
    # What follows cannot be compared: rounding to bf16 makes two layouts drift apart within a step.
    saved = run(rank_pool, cases.train_save_and_tell_state, folders, "dense", D2, tmp_path / "whole", more=BF16)
    held = run(rank_pool, cases.load_and_tell_state, folders, "dense", ONE, tmp_path / "whole", seed=1, more=BF16)
    assert held.keys() == saved.keys() and {kind for _, kind in held} == {"exp_avg", "exp_avg_sq", "fp32_param"}
    for key, tensor in held.items():
        assert tensor.equal(saved[key]), key
        assert key[1] != "fp32_param" or not tensor.equal(tensor.bfloat16().float()), key


def test_a_checkpoint_that_is_damaged_foreign_or_of_another_model_is_refused_by_name(rank_pool, folders, tmp_path):
    run(rank_pool, cases.train_and_save, folders, "dense", D2, tmp_path / "whole")

    def message(name, kind="dense"):
        return run(rank_pool, cases.load_and_train, folders, kind, D2, tmp_path / name)

    def copy(name):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        return tmp_path / name

    data = copy("short") / "megatron" / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    assert "__1_0.distcp is truncated" in message("short")
    (copy("gap") / "megatron" / "common.pt").unlink()
    assert "common.pt is missing" in message("gap")
    state = copy("changed") / "state.bin"
    state.write_bytes(b"State of the loop")
    assert "state.bin was changed" in message("changed")
    (copy("open") / "manifest.json").unlink()
    assert "open is not a checkpoint of roll_async" in message("open")
    manifest = copy("foreign") / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": "other"}))
    assert "manifest of something else" in message("foreign")
    assert "whole does not fit this model" in message("whole", kind="MoE")
    assert not list(tmp_path.glob("*.tmp"))


def test_a_checkpoint_of_another_precision_is_refused_by_the_key_that_sets_it(rank_pool, folders, tmp_path):
    expected = run(rank_pool, cases.train_and_save, folders, "dense", D2, tmp_path / "step")
    said = run(rank_pool, cases.load_and_train, folders, "dense", D2, tmp_path / "step", more=BF16)
    assert "step was written with actor_train.model_args.dtype=fp32, this run has bf16" in said
    assert "; set actor_train.model_args.dtype=fp32, or choose another checkpoint" in said
    manifest = tmp_path / "step" / "manifest.json"
    about = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({name: value for name, value in about.items() if name != "dtype"}))
    assert run(rank_pool, cases.load_and_train, folders, "dense", D2, tmp_path / "step", seed=1) == expected

    (tmp_path / "critic").mkdir()
    write_manifest(tmp_path / "critic", {}, {"step": 2, "world_size": 1, "dtype": "bf16", "lora": None})
    critic = {"with_value_head": True}
    said = run(rank_pool, cases.load_and_train, folders, "dense", ONE, tmp_path / "critic", more=critic)
    assert "critic was written with critic.model_args.dtype=bf16, this run has fp32" in said


def test_hugging_face_weights_come_out_of_a_checkpoint_of_any_layout(rank_pool, folders, tmp_path):
    from safetensors.torch import load_file

    for kind, layout in (("dense, tied", T2D2), ("MoE", T2E2X2D2)):
        place = tmp_path / kind[:3]
        run(rank_pool, cases.save_and_export, folders, kind, layout, place / "step", export=str(place / "exported"))
        megatron_to_hf(place / "step", place / "converted", ConversionOptions())
        exported = load_file(place / "exported" / "model.safetensors")
        converted = load_file(place / "converted" / "model.safetensors")
        assert exported.keys() == converted.keys()
        assert all((converted[name] == tensor).all() for name, tensor in exported.items())


WRITTEN = {
    "T2 D2 distributed": ("dense, tied", T2D2, {}),
    "P2 V2": ("dense", P2V2, {}),
    "bf16": ("dense", ONE, BF16),
    "T2 E2 X2 D2 distributed": ("MoE", T2E2X2D2, {}),
    "LoRA, P2": ("dense", P2, {"lora_rank": 2, "lora_alpha": 4.0}),
    "critic": ("dense", ONE, {"with_value_head": True}),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_the_command_converts_and_verifies_what_any_run_writes(rank_pool, folders, tmp_path, capsys, written):
    kind, layout, more = WRITTEN[written]
    step = tmp_path / "checkpoints" / "step_00000002"
    run(rank_pool, cases.save_at, folders, kind, layout, step / "actor_train", more=more)
    assert run_convert([str(step), str(tmp_path / "out"), "--verify"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "digest " in said and ("from Transformers" in said) == ("logits not compared" not in said)
    assert ("from Transformers" in said) == (not {"lora_rank", "with_value_head"} & more.keys())


ADAPTED = {
    "T2 D2 distributed": ("dense, tied", T2D2, "all-linear"),
    "P2 V2": ("dense", P2V2, "all-linear"),
    "attention alone": ("dense", ONE, "q_proj k_proj v_proj o_proj"),
    "E2 distributed": ("MoE", E2D, "all-linear"),
}


@pytest.mark.parametrize("written", ADAPTED)
def test_a_lora_run_leaves_its_adapter_in_the_format_of_peft(rank_pool, folders, tmp_path, capsys, written):
    """Base and adapter are the merged model, as written by the ranks of any layout and from their checkpoint."""
    from safetensors.torch import load_file

    kind, layout, targets = ADAPTED[written]
    more = {"lora_rank": 2, "lora_alpha": 3.0, "lora_targets": tuple(targets.split())}
    places = {"checkpoint": tmp_path / "step", "export": str(tmp_path / "hf")}
    former = [tmp_path / place / "model-00001-of-00002.safetensors" for place in ("hf", "hf_adapter")]
    for shard in former:
        shard.parent.mkdir()
        shard.touch()
    run(rank_pool, cases.save_and_export, folders, kind, layout, **places, more=more)
    typed = [str(tmp_path / "step"), str(tmp_path / "adapter"), "--adapter-only", "--verify"]
    assert run_convert(typed) == 0, capsys.readouterr().err
    assert not any(shard.exists() for shard in former), "an export takes the place of the former one"
    written, converted = (
        load_file(tmp_path / place / "adapter_model.safetensors") for place in ("hf_adapter", "adapter")
    )
    assert written.keys() == converted.keys() and all(x.equal(converted[name]) for name, x in written.items())
    about = json.loads((tmp_path / "hf_adapter" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (2, 3.0, folders[kind, 0])
    leaves = {name.split(".")[-3] for name in written}
    assert set(about["target_modules"]) == leaves and (leaves == set(targets.split())) == ("_" in targets)

    merged = load_file(tmp_path / "hf" / "model.safetensors")
    base = load_file(f"{folders[kind, 0]}/model.safetensors")
    moved = 0
    for name, weight in merged.items():
        a, b = (written.get(f"base_model.model.{name.removesuffix('.weight')}.{half}.weight") for half in HALVES)
        expected = base[name] if a is None else base[name] + 3.0 / 2 * b @ a
        assert (weight - expected).abs().max() < 1e-6, name
        moved += a is not None and bool((b != 0).any())
    assert moved * 2 == len(written) and moved >= 16


HALVES = ("lora_A", "lora_B")


@pytest.mark.parametrize(("kind", "layout"), [("dense", D2), ("dense", (2, {})), ("MoE", T2E2X2D2)])
def test_data_parallel_ranks_write_like_shares_of_what_they_hold_alike(rank_pool, folders, tmp_path, kind, layout):
    run(rank_pool, cases.train_and_save, folders, kind, layout, tmp_path / "step", background=True)
    sizes = [path.stat().st_size for path in (tmp_path / "step" / "megatron").glob("*.distcp")]
    assert len(sizes) == layout[0]
    assert max(sizes) < 1.35 * sum(sizes) / len(sizes), sizes
