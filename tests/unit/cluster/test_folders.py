"""The same name means the same files in every process of a run, or the run is refused."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from roll_async.cluster.folders import absolute_paths, require_model, shared_folders
from roll_async.config.api import load

ROOT = Path(__file__).resolve().parents[3]
PATH_KEYS = {
    "output_dir", "ledger.path", "checkpoint.output_dir", "checkpoint.resume_from", "tracking.rollout_dump_dir",
    "pretrain", "reward_pretrain", "actor_train.model_args.model_name_or_path",
    "actor_infer.model_args.model_name_or_path", "actor_train.data_args.file_name", "validation.data_args.file_name",
    "validation.sets.more.data_args.file_name",
}  # fmt: skip


def texts(part, prefix=""):
    """Every string in a config, by key."""
    if is_dataclass(part):
        for field in fields(part):
            yield from texts(getattr(part, field.name), f"{prefix}.{field.name}" if prefix else field.name)
    elif isinstance(part, dict):
        for name, one in part.items():
            yield from texts(one, f"{prefix}.{name}")
    elif isinstance(part, tuple):
        for one in part:
            yield from texts(one, prefix)
    elif isinstance(part, str):
        yield prefix, part


def test_every_path_of_a_config_becomes_absolute_and_nothing_else_changes(tmp_path):
    (tmp_path / "assets" / "model").mkdir(parents=True)
    config = load(
        str(ROOT / "configs" / "rlvr_config_async_cpu.yaml"),
        [
            "output_dir=out", "pretrain=assets/model", "reward_pretrain=assets/model",
            "checkpoint.resume_from=old/step_00000001", "tracking.rollout_dump_dir=dump",
            "actor_train.data_args.file_name=train.jsonl", "validation.data_args.file_name=held_out.jsonl",
            "validation.sets={more: {data_args: {file_name: more.jsonl}}, sampled: {generating_args: {top_p: 0.9}}}",
        ],
    )  # fmt: skip
    before, after = list(texts(config)), list(texts(absolute_paths(config, tmp_path)))
    changed = {key for (key, old), (_, new) in zip(before, after, strict=True) if old != new}
    assert changed == PATH_KEYS
    assert all(new.startswith(f"{tmp_path}/") for key, new in after if key in PATH_KEYS)
    assert absolute_paths(absolute_paths(config, tmp_path), Path("/elsewhere")) == absolute_paths(config, tmp_path)


def test_a_hub_name_and_latest_are_no_paths(tmp_path):
    config = load(str(ROOT / "configs" / "rlvr_config_async_cpu.yaml"), ["pretrain=Qwen/Qwen2.5-0.5B"])
    config = replace(config, checkpoint=replace(config.checkpoint, resume_from="latest"))
    there = absolute_paths(config, tmp_path)
    assert (there.pretrain, there.checkpoint.resume_from) == ("Qwen/Qwen2.5-0.5B", "latest")
    assert there.actor_infer.model_args.model_name_or_path == "Qwen/Qwen2.5-0.5B"


def test_a_process_that_sees_other_files_under_the_same_name_says_which_key_and_host(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "other"
    with shared_folders([("checkpoint.output_dir", str(folder))]) as folders:
        assert folders.problems() == []
        folder.rename(elsewhere)
        folder.mkdir()
        (problem,) = folders.problems()
        assert problem.startswith(f"checkpoint.output_dir={folder} is not the driver's folder on host ")
        assert "put it on a file system that all nodes share" in problem
        folder.rmdir()
        elsewhere.rename(folder)
    assert list(folder.iterdir()) == []


def test_a_model_folder_that_is_not_on_this_host_is_refused_and_a_hub_name_is_not(tmp_path):
    with pytest.raises(ValueError, match="does not exist on host"):
        require_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    require_model(str(tmp_path))
    require_model("Qwen/Qwen2.5-0.5B")
