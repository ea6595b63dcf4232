"""Small complete configs to break one key at a time."""

import copy
import json
import sys
from pathlib import Path

import pytest

RLVR = {
    "pretrain": "model",
    "prompt_length": 10,
    "response_length": 30,
    "rollout_batch_size": 4,
    "num_return_sequences_in_group": 2,
    "actor_train": {
        "training_args": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        "data_args": {"file_name": "data.jsonl"},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}},
        "device_mapping": "range(0,4)",
    },
    "actor_infer": {
        "generating_args": {},
        "strategy_args": {"strategy_name": "vllm", "strategy_config": {}},
        "device_mapping": "range(4,8)",
    },
}
AGENTIC = {
    "pretrain": "model",
    "sequence_length": 1024,
    "rollout_batch_size": 16,
    "val_batch_size": 16,
    "actor_train": {
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}},
        "device_mapping": "range(0,4)",
    },
    "actor_infer": {
        "generating_args": {"max_new_tokens": 64},
        "strategy_args": {"strategy_name": "sglang", "strategy_config": {}},
        "device_mapping": "range(4,8)",
    },
    "custom_envs": {"FrozenLake": {"env_type": "frozen_lake"}},
}
WORKER = {"strategy_args": {"strategy_name": "megatron_infer"}, "device_mapping": "range(8,12)"}
CRITIC = {
    "strategy_args": {"strategy_name": "megatron_train"},
    "training_args": {"learning_rate": 1.0e-5},
    "device_mapping": "range(8,12)",
}


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """Of the configs here. `validate` warns where it is not installed."""
    monkeypatch.setitem(sys.modules, "vllm", sys.modules.get("vllm"))


class Remove:
    """As a value: take the key out."""


def edited(base: dict, edits: dict) -> dict:
    """A copy of `base` with dotted paths set; `Remove` takes a key out."""
    tree = copy.deepcopy(base)
    for path, value in edits.items():
        *above, last = path.split(".")
        section = tree
        for key in above:
            section = section.setdefault(key, {})
        if value is Remove:
            del section[last]
        else:
            section[last] = value
    return tree


class Files:
    """Writes configs into one folder. JSON is YAML, and numbers in it are read as they are written."""

    RLVR, AGENTIC, WORKER, CRITIC, Remove = RLVR, AGENTIC, WORKER, CRITIC, Remove

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def text(self, text: str | bytes, name: str = "run.yaml") -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    def tree_text(self, edits: dict) -> str:
        """The small RLVR config with edits, as text."""
        return json.dumps(edited(RLVR, edits))

    def rlvr(self, edits: dict | None = None) -> str:
        return self.tree(edited(RLVR, edits or {}))

    def agentic(self, edits: dict | None = None) -> str:
        return self.tree(edited(AGENTIC, edits or {}))

    def tree(self, tree: dict) -> str:
        # YAML has no surrogate pairs, and reads U+2028 as a line break.
        return self.text(json.dumps(tree, indent=1, ensure_ascii=False).replace("\u2028", "\\u2028"))


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)
