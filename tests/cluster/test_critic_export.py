"""A critic leaves a run as a model that transformers and the converter read."""

import pickle
import re
import shutil

import pytest

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

import megatron_cases as cases
import torch

from roll_async.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from roll_async.checkpoint.folders.manifest import fingerprint, read_manifest, write_manifest
from tests.rounding import assert_near

STATE = 1.0
"""Size of the states, after a norm, that values are sums of."""


@torch.no_grad()
def values_of(folder, rows):
    """[B,T] value of the state before token t, by transformers."""
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.score.weight.shape[0] == 1
    values = torch.zeros(rows.tokens.shape)
    for b, length in enumerate(rows.lengths.tolist()):
        hidden = model.eval().model(rows.tokens[b : b + 1, :length]).last_hidden_state
        values[b, 1:length] = model.score(hidden)[0, :-1, 0]
    return torch.where(rows.mask, values, 0)


def forget_state_of_head(checkpoint):
    index = checkpoint / "megatron" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for key in [key for key in metadata.state_dict_metadata if re.match(r"optimizer\..*output_layer\.", key)]:
        del metadata.state_dict_metadata[key]
    index.write_bytes(pickle.dumps(metadata))
    about = read_manifest(checkpoint)
    files = {**about.pop("files"), "megatron/.metadata": fingerprint(index)}
    write_manifest(checkpoint, files, {name: value for name, value in about.items() if name != "format"})


LAYOUTS = [
    ("dense, tied", (1, {})),
    ("dense", (1, {"lora_rank": 4, "lora_alpha": 8.0})),
    ("MoE", (2, {"parallel": {"pipeline": 2}})),
]


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS, ids=("dense", "adapters", "MoE P2"))
def test_a_trained_critic_is_read_as_a_reward_model_with_the_same_values(rank_pool, tmp_path, kind, layout):
    folder = cases.model_folder(tmp_path / "start", kind)
    settings = cases.settings_of(folder, **layout[1], with_value_head=True)
    places = {"folder": str(tmp_path / "step"), "export": str(tmp_path / "export")}
    values = rank_pool.run(cases.critic_export, layout[0], settings=settings, **places)[0]
    rows, _ = cases.batch()
    assert values.abs().max() > 1e-3, "an untrained head says zero"
    resumed = rank_pool.run(cases.critic_values, layout[0], settings=settings, folder=places["folder"])[0]
    assert torch.equal(resumed, values)
    if "lora_rank" in layout[1]:  # before its head was trained a critic with adapters had no state of it
        shutil.copytree(tmp_path / "step", tmp_path / "before")
        forget_state_of_head(tmp_path / "before")
        before = rank_pool.run(cases.critic_values, 1, settings=settings, folder=str(tmp_path / "before"))[0]
        assert torch.equal(before, values)
    assert_near(values_of(tmp_path / "export", rows), values, cases.BOUNDS.forward, of=STATE)
    megatron_to_hf(tmp_path / "step", tmp_path / "converted", ConversionOptions())
    assert_near(values_of(tmp_path / "converted", rows), values, cases.BOUNDS.forward, of=STATE)
    hf_to_megatron(tmp_path / "export", tmp_path / "back", ConversionOptions())
    megatron_to_hf(tmp_path / "back", tmp_path / "again", ConversionOptions())
    first, last = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("converted", "again"))
    assert first == last
    started = rank_pool.run(
        cases.critic_values, 1, settings=cases.settings_of(str(tmp_path / "export"), with_value_head=True)
    )
    assert_near(started[0], values, cases.BOUNDS.forward, of=STATE)
