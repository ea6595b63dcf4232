"""Conversion between the two formats: bitwise for every family, adapters, dtypes, and input that cannot be used."""

import json
import random
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import synthetic

from roll_async.checkpoint.comparison import compare
from roll_async.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from roll_async.checkpoint.folders.find_model import find_model
from roll_async.checkpoint.folders.hf_folder import HfFolder, write_hf_folder
from roll_async.checkpoint.folders.manifest import write_manifest
from roll_async.checkpoint.folders.megatron_folder import MegatronFolder, Piece, write_megatron_folder
from roll_async.checkpoint.folders.safetensors_files import stack_name
from roll_async.checkpoint.folders.stored_keys import key_to_write, keys_to_read
from roll_async.checkpoint.hf_names.families import family_of
from roll_async.checkpoint.hf_names.table import ModelShape, shape_of
from roll_async.checkpoint.hf_names.value_head import as_critic
from roll_async.commands.convert import run_convert

PLAIN = ConversionOptions()


@pytest.fixture
def make(tmp_path):
    """Write the synthetic model of an architecture; returns (folder, tensors)."""

    def write(architecture="Qwen2ForCausalLM", **changes):
        config = synthetic.config_of(architecture, **changes)
        tensors = synthetic.tensors_of(config)
        return synthetic.write(tmp_path / "hf", config, tensors), tensors

    return write


def tensors_in(folder):
    read = HfFolder(folder)
    return {name: read.tensor(name) for name in read.names()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("file_bytes", [1 << 30, 2000])
@pytest.mark.parametrize("architecture", synthetic.CONFIGS)
def test_there_and_back_is_bitwise(make, tmp_path, architecture, file_bytes):
    source, tensors = make(architecture)
    options = ConversionOptions(file_bytes=file_bytes)
    assert hf_to_megatron(source, tmp_path / "megatron", options) == []
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", options)
    assert_equal(tensors_in(tmp_path / "back"), tensors)
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    many = file_bytes < 1 << 30
    assert (tmp_path / "back" / "model.safetensors.index.json").exists() is many
    assert (len(list((tmp_path / "megatron").glob("*.distcp"))) > 2) is many


@pytest.mark.parametrize("architecture", synthetic.CONFIGS)
def test_a_file_without_one_of_its_tensors_is_refused_and_nothing_is_written(make, tmp_path, architecture):
    source, tensors = make(architecture)
    hf_to_megatron(source, tmp_path / "whole", PLAIN)
    rng = random.Random(architecture)
    kinds = {re.sub(r"\d+", "0", name) for name in tensors}
    for name in rng.sample(sorted(tensors), min(len(tensors), 2 * len(kinds))):
        (source / "model.safetensors").unlink()
        kept = {k: v for k, v in tensors.items() if stack_name(k) != stack_name(name)}
        synthetic.write_file(source / "model.safetensors", kept)
        missing = next(k for k in tensors if k not in kept)  # of experts in one tensor, the first
        with pytest.raises(ValueError, match=re.escape(missing)):
            hf_to_megatron(source, tmp_path / "megatron", PLAIN)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "whole"], name


@pytest.mark.parametrize("architecture", synthetic.CONFIGS)
def test_a_megatron_folder_without_one_of_its_tensors_is_refused_and_nothing_is_written(make, tmp_path, architecture):
    source, _ = make(architecture)
    hf_to_megatron(source, tmp_path / "whole", PLAIN)
    whole, family = MegatronFolder(tmp_path / "whole"), family_of(architecture)
    config = HfFolder(source).config
    shape = shape_of(3, family.fields(config))
    matches = [key_to_write(match, shape) for match in family.parameters(shape)]
    stored = {(to.key, to.index): to for to in matches if to.key in whole.keys()}
    values = {place: whole.tensor(*place) for place in stored}
    for number, key in enumerate(random.Random(architecture).sample(sorted({key for key, _ in stored}), 3)):
        pieces = [Piece(key=to.key, index=to.index, stack=to.stack, shape=tuple(values[place].shape),
                        dtype=values[place].dtype) for place, to in stored.items() if to.key != key]  # fmt: skip
        target = tmp_path / str(number)
        target.mkdir()
        write_megatron_folder(target, pieces, lambda piece: values[piece.key, piece.index])
        with pytest.raises(ValueError, match="has no .*, which a .* model needs"):
            megatron_to_hf(target, tmp_path / "back", PLAIN, like=source)
        assert not list(tmp_path.glob("back*")), key


def test_an_untied_model_without_output_layer_and_biases_the_config_denies_are_refused(make, tmp_path):
    source, tensors = make("Glm4ForCausalLM")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(ValueError, match=r"self_attn.q_proj.bias is unknown"):
        hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    without = {name: t for name, t in tensors.items() if not name.endswith(".bias")}
    (source / "model.safetensors").unlink()
    synthetic.write_file(source / "model.safetensors", {n: t for n, t in without.items() if n != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"has no tensor lm_head.weight, which config.json asks for"):
        hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    (source / "model.safetensors").unlink()
    synthetic.write_file(source / "model.safetensors", without)
    hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", PLAIN)
    assert_equal(tensors_in(tmp_path / "back"), without)


def test_tensors_that_the_config_could_not_hold_are_refused_before_anything_is_written(make, tmp_path):
    source, tensors = make(vocab_size=24)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 25}))
    with pytest.raises(
        ValueError, match=r"model.embed_tokens.weight has shape \[24, 16\], config.json says \[25, 16\]"
    ):
        hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    assert not (tmp_path / "megatron").exists()


SIDE_FILES = {
    "tokenizer.model": "t", "chat_template.jinja": "c", "additional_chat_templates/tool.jinja": "d",
    "modeling_mine.py": "code", "LICENSE": "free", "README.md": "card", "preprocessor_config.json": "{}",
}  # fmt: skip
NO_SIDE_FILES = (
    "original/consolidated.00.pth",
    "old/model.safetensors",
    ".git/config",
    "model.gguf",
    "pytorch_model.bin.index.json",
)


def test_a_target_inside_the_source_does_not_copy_itself(make, tmp_path):
    source, _ = make()
    hf_to_megatron(source, source / "converted" / "megatron", PLAIN)
    assert not (source / "converted" / "megatron" / "huggingface" / "converted").exists()


def test_every_side_file_that_is_not_weights_travels_both_ways(make, tmp_path):
    source, _ = make()
    for name, text in {**SIDE_FILES, **dict.fromkeys(NO_SIDE_FILES, "x")}.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", PLAIN)
    write_hf_folder(str(tmp_path / "export"), iter([]), like=str(source), dtype="bfloat16")
    for folder in (tmp_path / "back", tmp_path / "export"):
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert found - {"model.safetensors"} == {*SIDE_FILES, "config.json", "tokenizer.json"}
        assert all((folder / name).read_text() == text for name, text in SIDE_FILES.items())


@pytest.mark.parametrize("num_files", [1, 2])
def test_pytorch_model_bin_folders_convert(make, tmp_path, num_files):
    source, tensors = make("Qwen3ForCausalLM")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    if num_files == 1:
        torch.save(tensors, source / "pytorch_model.bin")
    else:
        half = len(names) // 2
        parts = {"pytorch_model-1.bin": names[:half], "pytorch_model-2.bin": names[half:]}
        for file, part in parts.items():
            torch.save({name: tensors[name] for name in part}, source / file)
        weight_map = {name: file for file, part in parts.items() for name in part}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", PLAIN)
    assert_equal(tensors_in(tmp_path / "back"), tensors)


class _Runs:
    def __reduce__(self):
        return (print, ("a pickle ran",))


def test_a_bin_file_that_holds_more_than_tensors_is_refused_and_runs_nothing(make, tmp_path, capsys):
    source, tensors = make("Qwen3ForCausalLM")
    (source / "model.safetensors").unlink()
    for content, problem in (({**tensors, "x": _Runs()}, "cannot be read"), ({"x": 1}, "something else")):
        torch.save(content, source / "pytorch_model.bin")
        with pytest.raises(ValueError, match=problem):
            hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    (source / "pytorch_model.bin").write_bytes(b"cut")
    with pytest.raises(ValueError, match="cannot be read"):
        hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    assert "a pickle ran" not in capsys.readouterr().out and not (tmp_path / "megatron").exists()


def test_transformers_and_safetensors_read_what_is_written(make, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    source, tensors = make()
    hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ConversionOptions(file_bytes=3000))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    found = {}
    for name in set(index["weight_map"].values()):
        part = safetensors.load_file(tmp_path / "back" / name)
        assert all(index["weight_map"][key] == name for key in part)
        found |= part
    assert_equal(found, tensors)


def test_a_dtype_casts_all_but_what_stays_in_float32(make, tmp_path):
    source, tensors = make("DeepseekV3ForCausalLM")
    hf_to_megatron(source, tmp_path / "megatron", ConversionOptions(dtype=torch.float16))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", PLAIN)
    expected = {name: t if t.dtype == torch.float32 else t.half() for name, t in tensors.items()}
    assert any(t.dtype == torch.float32 for t in expected.values())
    assert_equal(tensors_in(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float16"


def test_tensors_without_use_are_left_out_and_named(make, tmp_path):
    source, tensors = make("DeepseekV3ForCausalLM")
    (source / "model.safetensors").unlink()
    more = {
        "model.layers.3.eh_proj.weight": torch.ones(2, 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    synthetic.write_file(source / "model.safetensors", {**tensors, **more})
    assert sorted(hf_to_megatron(source, tmp_path / "megatron", PLAIN)) == sorted(more)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", PLAIN)
    assert_equal(tensors_in(tmp_path / "back"), tensors)


def test_experts_that_come_one_by_one_are_one_tensor_in_the_file_whatever_its_size(make, tmp_path):
    """In the order of ranks: expert by expert, and those of expert parallel ranks in turn."""
    source, tensors = make("GptOssForCausalLM")
    experts = sorted((n for n in tensors if ".experts." in n), key=lambda n: (n.split(".experts.")[0], n[-4:], n[::-1]))
    others = [name for name in tensors if ".experts." not in name]
    write_hf_folder(
        str(tmp_path / "export"), ((n, tensors[n]) for n in others + experts), like=str(source), dtype="bfloat16",
        shard_bytes=1000,
    )  # fmt: skip
    assert_equal(tensors_in(tmp_path / "export"), tensors)
    weight_map = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 3, "a layer's experts are a file"
    name = "model.layers.2.mlp.experts.down_proj"
    safetensors = pytest.importorskip("safetensors.torch")
    stack = safetensors.load_file(tmp_path / "export" / weight_map[name])[name]
    assert stack.shape == (4, 20, 16)
    assert torch.equal(stack[3], tensors["model.layers.2.mlp.experts.3.down_proj"])


def test_the_output_layer_of_a_tied_model_is_its_embedding(make, tmp_path):
    source, tensors = make()
    (source / "model.safetensors").unlink()
    synthetic.write_file(
        source / "model.safetensors", {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
    assert hf_to_megatron(source, tmp_path / "megatron", PLAIN) == ["lm_head.weight"]


def adapter(folder, tensors, **config):
    folder.mkdir()
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    synthetic.write_file(folder / "adapter_model.safetensors", tensors)
    return folder


LORA = {
    "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": torch.randn(2, 16),
    "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight": torch.randn(16, 2),
    "base_model.model.model.norm.weight": torch.randn(16).bfloat16(),
}


@pytest.mark.parametrize(
    ("config", "scale"), [({}, 3.0), ({"use_rslora": True}, 6 / 2**0.5), ({"alpha_pattern": {"q_proj": 8}}, 4.0)]
)
@pytest.mark.parametrize("back", [False, True])
def test_an_adapter_is_merged_in_either_direction(make, tmp_path, config, scale, back):
    source, tensors = make()
    with_adapter = replace(PLAIN, adapter=adapter(tmp_path / "adapter", LORA, **config))
    hf_to_megatron(source, tmp_path / "megatron", PLAIN if back else with_adapter)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", with_adapter if back else PLAIN)
    name = "model.layers.1.self_attn.q_proj.weight"
    a, b, norm = LORA.values()
    expected = {**tensors, "model.norm.weight": norm, name: (tensors[name].float() + scale * (b @ a)).bfloat16()}
    found = tensors_in(tmp_path / "back")
    assert torch.allclose(found[name].float(), expected[name].float(), rtol=1e-2)
    assert not torch.equal(found[name], tensors[name])
    assert_equal({**found, name: expected[name]}, expected)


@pytest.mark.parametrize(
    ("tensors", "config", "problem"),
    [
        ({**LORA, "base_model.model.x.lora_A.weight": torch.ones(1, 1)}, {}, "x.lora_A.weight fits no weight"),
        (LORA, {"use_dora": True}, "use_dora=True is not supported"),
        (dict(list(LORA.items())[:1]), {}, "without lora_B"),
        ({k: v[:, :1] if "lora_A" in k else v for k, v in LORA.items()}, {}, "do not fit model.layers.1"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused(make, tmp_path, tensors, config, problem):
    source, _ = make()
    options = replace(PLAIN, adapter=adapter(tmp_path / "adapter", tensors, **config))
    with pytest.raises(ValueError, match=problem):
        hf_to_megatron(source, tmp_path / "megatron", options)
    assert not list(tmp_path.glob("megatron*"))


def damage(folder, how):
    file = folder / "model.safetensors"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    elif how == "garbage":
        file.write_bytes(b"not a tensor in sight" * 10)
    elif how == "no weights":
        file.unlink()
    elif how == "bad json":
        (folder / "config.json").write_text("{")
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "lost shard":
        index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        tensors = tensors_in(folder)
        file.unlink()
        if how == "unknown tensor":
            tensors["model.layers.0.mlp.secret.weight"] = torch.ones(2)
        elif how == "missing tensor":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        elif how == "wrong heads":
            tensors["model.layers.1.self_attn.q_proj.weight"] = torch.ones(12, 16).bfloat16()
        elif how == "mixed dtypes":
            tensors["model.layers.1.input_layernorm.weight"] = torch.ones(16)
        synthetic.write_file(file, tensors)


BAD_HF = {
    "truncated": r"model\.safetensors is truncated",
    "garbage": r"model\.safetensors is truncated or not a safetensors file",
    "no weights": "holds neither model.safetensors nor",
    "bad json": r"config\.json is truncated or not JSON",
    "no config": r"has safetensors files but no config\.json",
    "lost shard": r"model-00002-of-00002\.safetensors is missing",
    "unknown tensor": r"model\.layers\.0\.mlp\.secret\.weight is unknown to the family qwen2",
    "missing tensor": r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight",
    "wrong heads": r"layers\.1\.self_attn\.q_proj\.weight and its neighbours do not",
    "mixed dtypes": "--dtype makes dtypes equal",
}


@pytest.mark.parametrize("how", BAD_HF)
def test_a_bad_hugging_face_folder_is_one_readable_error_and_nothing_is_left(make, tmp_path, capsys, how):
    source, _ = make()
    damage(source, how)
    assert run_convert([str(source), str(tmp_path / "megatron")]) == 2
    error = capsys.readouterr().err
    assert re.search(BAD_HF[how], error) and len(error.splitlines()) == 1, error
    assert not list(tmp_path.glob("megatron*"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["BartModel"]}, "architecture BartModel has no entry"),
        ({"architectures": None}, "names no architecture"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the model is quantised"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3', expected an integer"),
    ],
)
def test_a_model_that_is_not_supported_is_refused(make, tmp_path, changes, problem):
    source, _ = make()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=problem):
        hf_to_megatron(source, tmp_path / "megatron", PLAIN)


def damage_megatron(folder, how):
    if how == "no index":
        (folder / ".metadata").unlink()
    elif how == "truncated index":
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:100])
    elif how == "no data":
        (folder / "__0_0.distcp").unlink()
    elif how == "truncated data":
        (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:-500])
    elif how == "other format":
        (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    elif how == "no config":
        (folder / "huggingface" / "config.json").unlink()
    elif how == "other model":
        config = json.loads((folder / "huggingface" / "config.json").read_text())
        (folder / "huggingface" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))


BAD_MEGATRON = {
    "no index": r"\.metadata is missing",
    "truncated index": r"\.metadata is truncated or damaged",
    "no data": r"__0_0\.distcp is missing",
    "truncated data": r"__0_0\.distcp is truncated",
    "other format": "format 'zarr', only torch_dist",
    "no config": "pass --like",
    "other model": "has no decoder.layers.0",
}


@pytest.mark.parametrize("how", BAD_MEGATRON)
def test_a_bad_megatron_folder_is_one_readable_error_and_nothing_is_left(make, tmp_path, capsys, how):
    source, _ = make()
    hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    damage_megatron(tmp_path / "megatron", how)
    assert run_convert([str(tmp_path / "megatron"), str(tmp_path / "back")]) == 2
    error = capsys.readouterr().err
    assert re.search(BAD_MEGATRON[how], error) and len(error.splitlines()) == 1, error
    assert not list(tmp_path.glob("back*"))


def test_a_target_that_exists_is_never_touched(make, tmp_path, capsys):
    source, _ = make()
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "precious").write_text("x")
    assert run_convert([str(source), str(tmp_path / "megatron")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "megatron").iterdir()] == ["precious"]


@pytest.mark.parametrize("to_hf", [False, True])
def test_a_disk_that_fails_while_writing_leaves_nothing(make, tmp_path, capsys, to_hf):
    """The kernel refuses to let a file grow beyond 4 KB, as a full disk would."""
    pytest.importorskip("tqdm")
    source, _ = make()
    if to_hf:
        hf_to_megatron(source, tmp_path / "megatron", PLAIN)
        source = tmp_path / "megatron"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        code = run_convert([str(source), str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert code == 1 and "File too large" in error and len(error.splitlines()) == 1, error
    assert not list(tmp_path.glob("out*"))


def test_a_disk_without_room_is_refused_before_anything_is_written(make, tmp_path, monkeypatch):
    from roll_async.checkpoint import conversion

    source, _ = make()
    usage = conversion.shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="needs .* GB, its disk has"):
        hf_to_megatron(source, tmp_path / "megatron", PLAIN)


def test_a_run_checkpoint_is_searched_for_the_one_megatron_folder(make, tmp_path):
    source, tensors = make()
    hf_to_megatron(source, tmp_path / "step" / "actor_train" / "weights", PLAIN)
    megatron_to_hf(tmp_path / "step", tmp_path / "back", PLAIN)
    assert_equal(tensors_in(tmp_path / "back"), tensors)
    hf_to_megatron(source, tmp_path / "step" / "critic", PLAIN)
    with pytest.raises(ValueError, match="several: .*actor_train/weights, .*critic; name one"):
        megatron_to_hf(tmp_path / "step", tmp_path / "again", PLAIN)


MEANT = {
    "run": "run/checkpoints/step_00000012/actor_train",
    "run/checkpoints": "run/checkpoints/step_00000012/actor_train",
    "run/checkpoints/step_00000002": "run/checkpoints/step_00000002/actor_train",
    "run/checkpoints/step_00000002/critic": "run/checkpoints/step_00000002/critic",
    "run/hf": "run/hf",
    "exported": "exported/hf",
    "torch_dist": "torch_dist",
    "megatron_lm": "megatron_lm",
}


@pytest.mark.parametrize("named", MEANT)
def test_every_folder_that_a_run_leaves_names_one_model(tmp_path, named):
    """Step 12 is newer than step 2, whatever the order of their names; an hf/ beside checkpoints may be of an older end
    of the run."""
    for step in ("step_00000002", "step_00000012", "step_00000020.tmp"):
        for role in ("actor_train", "critic"):
            megatron = tmp_path / "run" / "checkpoints" / step / role / "megatron"
            megatron.mkdir(parents=True)
            (megatron / "metadata.json").write_text("{}")
    for hf in ("run/hf", "exported/hf"):
        (tmp_path / hf).mkdir(parents=True)
        (tmp_path / hf / "config.json").write_text("{}")
    for torch_dist in ("torch_dist", "megatron_lm/iter_0000010"):
        (tmp_path / torch_dist).mkdir(parents=True)
        (tmp_path / torch_dist / "metadata.json").write_text("{}")
    assert find_model(tmp_path / named) == tmp_path / MEANT[named]


def test_a_folder_that_names_no_model_is_refused_with_what_it_is(tmp_path):
    (tmp_path / "run" / "hf").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"run holds neither .* nor a Megatron checkpoint .*; name .*run/hf"):
        find_model(tmp_path / "run")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is a LoRA adapter; merge it: roll-async convert BASE TARGET --adapter-path"):
        find_model(tmp_path)


@pytest.mark.parametrize("to_hf", [False, True])
def test_a_result_that_fails_its_check_gets_no_name(make, tmp_path, to_hf):
    source, _ = make()
    if to_hf:
        hf_to_megatron(source, tmp_path / "megatron", PLAIN)

    def check(written):
        assert written.is_dir() and not (tmp_path / "out").exists()
        raise KeyError("whatever it is")

    with pytest.raises(KeyError):
        convert, place = (megatron_to_hf, tmp_path / "megatron") if to_hf else (hf_to_megatron, source)
        convert(place, tmp_path / "out", replace(PLAIN, check=check))
    assert not list(tmp_path.glob("out*"))


def test_the_comparison_finds_one_changed_byte(make, tmp_path):
    source, tensors = make()
    hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    same = compare(tmp_path / "megatron", source, source, PLAIN, source_is_hf=True)
    assert (same.expected, same.differing, same.num_tensors) == (same.found, (), len(tensors))
    (source / "model.safetensors").unlink()
    tensors["model.layers.2.mlp.down_proj.weight"].view(torch.uint8)[0, 0] ^= 1
    synthetic.write_file(source / "model.safetensors", tensors)
    other = compare(tmp_path / "megatron", source, source, PLAIN, source_is_hf=True)
    assert other.expected != other.found and other.differing == ("model.layers.2.mlp.down_proj.weight",)


def test_a_layer_is_a_slice_of_its_stored_tensor(tmp_path):
    full = torch.arange(2 * 8 * 3.0).reshape(2, 8, 3)
    pieces = [Piece(key="fc1", index=(i,), stack=(2,), shape=(8, 3), dtype=torch.float32) for i in range(2)]
    (tmp_path / "m").mkdir()
    write_megatron_folder(tmp_path / "m", pieces, lambda piece: full[piece.index])
    read = MegatronFolder(tmp_path / "m")
    assert read.shape("fc1") == (2, 8, 3)
    assert torch.equal(read.tensor("fc1"), full)
    assert torch.equal(read.tensor("fc1", (1,)), full[1])


def test_the_adapters_of_a_run_are_merged_with_their_alpha(make, tmp_path):
    source, tensors = make()
    hf_to_megatron(source, tmp_path / "one", PLAIN)
    one, shape = MegatronFolder(tmp_path / "one"), ModelShape(moe_layers=(False,) * 3)
    pieces, values = [], {}

    def add(key, stored, value):
        piece = Piece(key=key, index=stored.index, stack=stored.stack, shape=tuple(value.shape), dtype=value.dtype)
        pieces.append(piece)
        values[piece.key, piece.index] = value

    for match in family_of("Qwen2ForCausalLM").parameters(shape):
        stored = key_to_write(match, shape)
        if stored.key in one.keys():
            add(stored.key, stored, one.tensor(stored.key, stored.index))
        if match.te_name.endswith("mlp.linear_fc1.weight"):
            layer = stored.key.removesuffix(".weight")
            add(f"{layer}.adapter.up", stored, torch.randn(40, 2).bfloat16())
            add(f"{layer}.adapter.down", stored, torch.randn(2, 16).bfloat16())
    (tmp_path / "run").mkdir()
    write_megatron_folder(tmp_path / "run", pieces, lambda piece: values[piece.key, piece.index])
    with pytest.raises(ValueError, match="holds LoRA adapters: pass --lora-alpha"):
        megatron_to_hf(tmp_path / "run", tmp_path / "back", PLAIN, like=source)
    with pytest.raises(ValueError, match="holds no LoRA adapters"):
        megatron_to_hf(tmp_path / "one", tmp_path / "back", replace(PLAIN, lora_alpha=8.0))
    megatron_to_hf(tmp_path / "run", tmp_path / "given", replace(PLAIN, lora_alpha=8.0), like=source)
    write_manifest(tmp_path, {}, {"lora": {"rank": 2, "alpha": 8.0, "layers": ["linear_fc1"]}})  # as a run leaves it
    with pytest.raises(ValueError, match="--lora-alpha 4 is not the run's 8"):
        megatron_to_hf(tmp_path / "run", tmp_path / "back", replace(PLAIN, lora_alpha=4.0), like=source)
    megatron_to_hf(tmp_path / "run", tmp_path / "back", PLAIN, like=source)
    expected = dict(tensors)
    for layer in range(3):
        key = "decoder.layers.mlp.linear_fc1.adapter"
        delta = 4.0 * (values[f"{key}.up", (layer,)].float() @ values[f"{key}.down", (layer,)].float())
        for name, part in zip(("gate_proj", "up_proj"), delta.chunk(2), strict=True):
            expected[f"model.layers.{layer}.mlp.{name}.weight"] = (
                tensors[f"model.layers.{layer}.mlp.{name}.weight"].float() + part
            )
    found = tensors_in(tmp_path / "back")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():  # an adapter's sum is rounded to one of its two neighbours (`lora.merged`)
        assert found[name].dtype == tensors[name].dtype
        torch.testing.assert_close(
            found[name].float(), tensor.float(), rtol=2**-7 if tensor is not tensors[name] else 0, atol=0
        )
    assert_equal(tensors_in(tmp_path / "given"), found)

    alone = ["--adapter-only", "--like", str(source)]
    assert run_convert([str(tmp_path / "run"), str(tmp_path / "adapter"), *alone, "--verify"]) == 0
    megatron_to_hf(tmp_path / "one", tmp_path / "again", replace(PLAIN, adapter=tmp_path / "adapter"))
    for name, tensor in tensors_in(tmp_path / "again").items():
        torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=2**-8, atol=0)
    assert run_convert([str(tmp_path / "one"), str(tmp_path / "none"), *alone]) == 2
    assert run_convert([str(source), str(tmp_path / "none"), "--adapter-only"]) == 2
    assert run_convert([str(tmp_path / "run"), str(tmp_path / "none"), *alone, "--dtype", "bf16"]) == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("form", range(4))
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_every_form_in_which_megatron_stores_a_model_is_read(make, tmp_path, architecture, form):
    """Stacked layers or a key for each, Transformer Engine's names or the local ones."""
    source, tensors = make(architecture)
    hf_to_megatron(source, tmp_path / "one", PLAIN)
    one, config = MegatronFolder(tmp_path / "one"), HfFolder(source).config
    family = family_of(architecture)
    shape = shape_of(3, family.fields(config))
    pieces, values = [], {}
    for match in family.parameters(shape):
        written = key_to_write(match, shape)
        if written.key in one.keys():
            value = one.tensor(written.key, written.index)
            forms = keys_to_read(match, shape)
            to = forms[min(form, len(forms) - 1)]
            if len(set(shape.moe_layers)) > 1 and to.index and "layers." in to.key:
                to = forms[1]  # layers that differ cannot be stacked
            pieces.append(
                Piece(key=to.key, index=to.index, stack=to.stack, shape=tuple(value.shape), dtype=value.dtype)
            )
            values[to.key, to.index] = value
    (tmp_path / "other").mkdir()
    write_megatron_folder(tmp_path / "other", pieces, lambda piece: values[piece.key, piece.index])
    megatron_to_hf(tmp_path / "other", tmp_path / "back", PLAIN, like=source)
    assert_equal(tensors_in(tmp_path / "back"), tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_a_reward_model_keeps_its_head_in_both_directions(tmp_path, tied):
    config = synthetic.config_of("Qwen3ForCausalLM", tie_word_embeddings=tied)
    tensors = {name: x for name, x in synthetic.tensors_of(config).items() if name != "lm_head.weight"}
    tensors["score.weight"] = torch.randn(1, 16).bfloat16()
    source = synthetic.write(tmp_path / "hf", as_critic(config), tensors)
    hf_to_megatron(source, tmp_path / "megatron", PLAIN)
    assert MegatronFolder(tmp_path / "megatron").shape("output_layer.weight") == (1, 16)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", PLAIN)
    assert_equal(tensors_in(tmp_path / "back"), tensors)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3ForSequenceClassification"] and written["id2label"] == {"0": "value"}
