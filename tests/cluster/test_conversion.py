"""Hugging Face to Megatron, loaded and saved again by real ranks under TP=2 PP=2 (and EP=2 PP=2), back to Hugging Face:
the same files, bit for bit, for every kind of row.
"""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import tiny_families
from tiny_families import MOE

from roll_async.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from roll_async.commands.convert import run_convert
from roll_async.config.api import load
from roll_async.trainer.megatron.model.logits_probe import largest_difference
from tests.rounding import Bounds

CPU = Path(__file__).resolve().parents[2] / "configs/rlvr_config_async_cpu.yaml"
HF = "actor_infer.strategy_args={strategy_name: hf_infer}"
# Each kind of row once; certificates have every family's conversion.
ROWS = ("qwen2 tied", "qwen3", "llama 3", "qwen2 moe", "qwen3 moe", "mixtral", "deepseek v3", "deepseek v3 yarn",
        "glm", "glm 4", "glm 4.5", "phi 3")  # fmt: skip
TP2_PP2, EP2_PP2 = {"tensor": 2, "pipeline": 2}, {"expert": 2, "pipeline": 2}
CASES = [(name, dict(TP2_PP2, sequence_parallel=True) if name in MOE else TP2_PP2) for name in ROWS]
CASES += [(name, EP2_PP2) for name in ROWS if name in MOE]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}-{next(iter(layout))}" for name, layout in CASES])
def test_the_round_trip_through_ranks_is_bitwise(rank_pool, tmp_path, name, layout):
    from safetensors.torch import load_file

    tiny_families.save_tiny(name, tmp_path / "hf")
    assert hf_to_megatron(tmp_path / "hf", tmp_path / "in", ConversionOptions(file_bytes=100_000)) == []
    places = {"hf": tmp_path / "hf", "source": tmp_path / "in", "target": tmp_path / "out"}
    differences = rank_pool.run(tiny_families.reshard, 4, layout=layout, **places)
    assert differences == [0.0] * 4
    megatron_to_hf(tmp_path / "out", tmp_path / "back", ConversionOptions(), like=tmp_path / "hf")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_the_command_verifies_digests_and_logits_in_both_directions(tmp_path, capsys):
    tiny_families.save_tiny("deepseek v3", tmp_path / "hf")
    assert run_convert([str(tmp_path / "hf"), str(tmp_path / "megatron"), "--verify"]) == 0
    assert run_convert([str(tmp_path / "megatron"), str(tmp_path / "back"), "--verify"]) == 0
    said = capsys.readouterr().out.splitlines()
    digests = [line for line in said if line.startswith("digest ")]
    assert len(digests) == 2 and digests[0] == digests[1]
    assert sum("from Transformers" in line for line in said) == 2


def test_the_probe_sees_a_model_that_computes_something_else(tmp_path):
    """Equal tensors under another normalisation: only the logits tell."""
    tiny_families.save_tiny("qwen3", tmp_path / "hf")
    assert run_convert([str(tmp_path / "hf"), str(tmp_path / "megatron")]) == 0
    config = json.loads((tmp_path / "megatron" / "huggingface" / "config.json").read_text())
    other = {**config, "rms_norm_eps": 0.1}
    difference, scale = largest_difference(
        tmp_path / "megatron", tmp_path / "hf", tmp_path / "megatron" / "huggingface"
    )
    assert difference < Bounds(layers=4, hidden=64, inner=96, length=64).forward * scale
    (tmp_path / "megatron" / "huggingface" / "config.json").write_text(json.dumps(other))
    difference, scale = largest_difference(
        tmp_path / "megatron", tmp_path / "hf", tmp_path / "megatron" / "huggingface"
    )
    assert difference > 1e-2 * scale


def test_the_commands_that_make_a_model_of_an_adapter_are_those_that_validate_prints(tmp_path):
    from safetensors.torch import load_file, save_file

    from roll_async.launch.checks.model_fit import mismatches

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny_families.save_tiny("qwen3", base)
    adapter.mkdir()
    name = "model.layers.0.self_attn.q_proj"
    weight = load_file(base / "model.safetensors")[f"{name}.weight"]
    up, down = torch.randn(weight.shape[0], 2), torch.randn(2, weight.shape[1])
    tensors = {f"base_model.model.{name}.lora_B.weight": up, f"base_model.model.{name}.lora_A.weight": down}
    save_file(tensors, adapter / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 6}
    (adapter / "adapter_config.json").write_text(json.dumps({**described, "target_modules": ["q_proj"]}))

    config = load(CPU, [f"pretrain={adapter}"])
    ((key, message),) = mismatches(config)
    commands, _, named = message.partition("merge it with: ")[2].partition(", and name ")
    for command in commands.split(" && "):
        assert command.startswith("roll-async convert ") and run_convert(command.split()[2:]) == 0, command
    assert key == "pretrain" and list(mismatches(load(CPU, [f"pretrain={named}", HF]))) == []
    merged = load_file(f"{named}/model.safetensors")[f"{name}.weight"]
    assert torch.allclose(merged.float(), weight.float() + 3 * up @ down, atol=1e-5)
