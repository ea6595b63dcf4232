"""Floating-point operations that a training step needs, from sizes alone, and what a device can do in a second.

Counted are the products of matrices: two operations for each weight that a token meets (of experts, those it is sent
to; the output layer; not the embedding, which is looked up), and for each pair of a query with a key that it may see,
the score and the weighted value. Model FLOPs in the sense of PaLM (arXiv 2204.02311, appendix B), with the causal half
of the pairs: what a step computes again, recomputation, padding and a score of its own, counts as time and not as work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.families import is_tied
from roll_async.checkpoint.hf_names.table import delta_layers
from roll_async.checkpoint.transforms import HeadLayout
from roll_async.trainer.megatron.memory_estimate import fields_of, matrices_of
from roll_async.trainer.megatron.settings import MegatronSettings

_NOT_MULTIPLIED = ("embedding", "final_layernorm", "norms", "bias", "kv_layernorm", "visual")
"""Images have tokens of their own in the tower, as many as their pixels say: its products are not counted."""
_BACKWARD = 2
"""Times the forward pass: the gradients of weights and of inputs, once each. Frozen weights have only the latter."""
PEAK_BF16_TFLOPS = {
    "GB200": 2500, "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "H20": 148,
    "A100": 312, "A800": 312, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L20": 119,
    "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
"""Dense, by a part of the device's name, from the makers' data sheets; the first that fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Operations of one forward pass of a model."""

    per_token: int
    per_pair: int
    """Of one query with one key, in all layers and heads together."""
    backward: int

    def forward(self, lengths: Sequence[int]) -> int:
        """Of rows with so many tokens each."""
        return sum(n * self.per_token + n * (n + 1) // 2 * self.per_pair for n in lengths)

    def step(self, lengths: Sequence[int]) -> int:
        """Of a forward and a backward pass."""
        return (1 + self.backward) * self.forward(lengths)


def model_flops(model: HfConfig, settings: MegatronSettings) -> ModelFlops:
    """Of the whole model of a role, whatever its layout. Raises ValueError for a model that is in no family of ours."""
    num_layers, fields = model.integer("num_hidden_layers"), fields_of(model)
    whole = MegatronSettings(model_folder="", with_value_head=settings.with_value_head)
    per_token = 0
    for matrix in matrices_of(model, whole, stage=0, layers=range(num_layers)):
        if matrix.name not in _NOT_MULTIPLIED:
            met = min(matrix.copies, model.integer("num_experts_per_tok")) if matrix.is_expert else matrix.copies
            per_token += 2 * matrix.rows * matrix.columns * met
    if is_tied(model) and not settings.with_value_head:
        # `matrices_of` counts a tied head once, as the embedding; tokens are multiplied with it all the same.
        per_token += 2 * model.integer("vocab_size") * model.integer("hidden_size")
    if fields.get("multi_latent_attention"):
        names = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        widths = model.integer("num_attention_heads") * sum(int(str(fields.get(name) or 0)) for name in names)
    else:
        # The score reads a key, the weighted sum a value, of all query heads.
        widths = 2 * HeadLayout.of(model).rows()[0]
    with_delta = sum(delta_layers(fields))
    if (delta := HeadLayout.of(model).delta) is not None:
        # The state answers for the key, takes the change, and answers the query.
        per_token += 6 * delta.key_size * delta.values * with_delta
    frozen = bool(settings.lora_rank)
    return ModelFlops(
        per_token=per_token,
        per_pair=2 * widths * (num_layers - with_delta),
        backward=_BACKWARD - 1 if frozen else _BACKWARD,
    )


def peak_tflops(device_name: str) -> int | None:
    """Of a device in bfloat16; None for one that is not in the table."""
    return next((peak for part, peak in PEAK_BF16_TFLOPS.items() if part in device_name), None)
