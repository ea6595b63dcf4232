"""Configs of runs without engines, from overrides."""

import tempfile
from pathlib import Path

from roll_async.config.api import load_with_warnings

TEXT = """
pretrain: model
sequence_length: 64
actor_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: megatron_train, strategy_config: {}}
"""


def loaded(kind, *overrides):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kind}.yaml"
        path.write_text(TEXT)
        return load_with_warnings(path, overrides, kind)


def sft_config(*overrides):
    return loaded("sft", *overrides).config


def dpo_config(*overrides):
    return loaded("dpo", *overrides).config
