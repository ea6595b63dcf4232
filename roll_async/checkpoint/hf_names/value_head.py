"""The critic's head under the name it has in a reward model: `ForSequenceClassification` with one label.

The head is a row of weights without bias, read at every position: the value of a position is score.weight @ its hidden
state. A reward model of transformers reads the same row at the last position only.
"""

from __future__ import annotations

import re

from roll_async.checkpoint.hf_names.table import Match, ParameterRow

_LANGUAGE_MODEL, _WITH_HEAD = "ForCausalLM", "ForSequenceClassification"
_READS_IMAGES = "ForConditionalGeneration"

VALUE_HEAD = Match(
    row=ParameterRow(megatron="output_layer.weight", hf=("score.weight",)),
    name="output_layer.weight",
    hf_names=("score.weight",),
    layer=None,
    expert=None,
)
"""[1, hidden size], whole on every rank."""


def language_model(architecture: str) -> str:
    """The architecture with an output layer that has the same decoder."""
    ending = _READS_IMAGES if architecture.removesuffix(_WITH_HEAD).endswith("_VL") else _LANGUAGE_MODEL
    return architecture.replace(_WITH_HEAD, ending)


def has_value_head(architecture: str) -> bool:
    """Whether models of this architecture end in a head instead of an output layer."""
    return architecture.endswith(_WITH_HEAD)


def as_critic(config: dict) -> dict:
    """config.json of the model with the head in the place of its output layer."""
    names = [re.sub(f"({_LANGUAGE_MODEL}|{_READS_IMAGES})$", _WITH_HEAD, name) for name in config["architectures"]]
    return {**config, "architectures": names, "id2label": {"0": "value"}, "label2id": {"value": 0}}
