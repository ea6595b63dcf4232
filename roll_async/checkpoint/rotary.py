"""Rotary position embeddings of a Hugging Face config, scaled ones included.

Formulas: `modeling_rope_utils.py` of transformers; llama3 is Meta's Llama 3.1, yarn is arXiv:2309.00071.
D rotated dimensions have D / 2 frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_async.checkpoint.folders.hf_config import HfConfig

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Parameters of a model's rotary embedding."""

    base: float
    fraction: float
    """Share of the head that is rotated."""
    kind: str
    parameters: HfConfig
    """The config's section; the keys depend on `kind`."""
    sections: tuple[int, ...] = ()
    """Of the frequencies, how many turn with time, with height and with width; (): all with the one position."""

    @classmethod
    def of(cls, config: HfConfig, fraction: float = 1.0) -> Rotary:
        """transformers 5 keeps all in rope_parameters, older files in rope_scaling and at the top. `fraction` is the
        family's share of the head that is rotated. Raises ValueError for a kind that is not supported.
        """
        nested = config.section("rope_parameters", "rope_scaling")
        if "full_attention" in nested:  # those of windowed layers beside it, see `local`
            nested = nested.section("full_attention")
        kind = nested.values.get("rope_type") or nested.values.get("type") or "default"  # `type` is the older name
        if kind == "mrope":  # of older files, beside the sections
            kind = "default"
        if kind not in KINDS:
            raise ValueError(f"{nested.source}: rope_type {kind!r} is not supported; supported: {', '.join(KINDS)}")
        return cls(
            base=nested.number("rope_theta", default=config.number("rope_theta", default=10000.0)),
            fraction=nested.number(
                "partial_rotary_factor", default=config.number("partial_rotary_factor", default=fraction)
            ),
            kind=str(kind),
            parameters=nested,
            sections=nested.layers("mrope_section"),
        )

    @classmethod
    def local(cls, config: HfConfig, *, scaled: bool = True) -> Rotary | None:
        """Of windowed layers, where they rotate otherwise (Gemma 3, OLMo-3); None where all rotate alike. `scaled`: the
        family's scaling is of all layers, where one is given for the whole model.
        """
        section = config.section("rope_parameters")
        windowed = section.values.get("sliding_attention")
        if windowed is not None:
            alike = windowed == section.values.get("full_attention")
            return None if alike else cls.of(HfConfig({"rope_parameters": windowed}, config.source))
        if not scaled and "rope_scaling" in config:
            return cls.of(HfConfig({"rope_theta": config.number("rope_theta")}, config.source))
        if "rope_local_base_freq" in config:
            return cls.of(HfConfig({"rope_theta": config.number("rope_local_base_freq")}, config.source))
        return None

    def frequencies(self, dimensions: int, context: int) -> Tensor:
        """[D / 2] float32 angle per position; `context` is the model's max_position_embeddings."""
        import torch  # here: a check of a config reads this file, too

        if self.sections and sum(self.sections) != dimensions // 2:
            raise ValueError(
                f"{self.parameters.source}: mrope_section={list(self.sections)} are not the {dimensions // 2} "
                "frequencies of a head"
            )
        exponents = torch.arange(0, dimensions, 2, dtype=torch.float32) / dimensions
        plain = 1.0 / (self.base**exponents)
        if self.kind == "default":
            return plain
        factor = self.parameters.number("factor")
        if self.kind == "linear":
            return plain / factor
        original = self.parameters.integer("original_max_position_embeddings", default=context)
        if self.kind == "llama3":
            low, high = self.parameters.number("low_freq_factor"), self.parameters.number("high_freq_factor")
            return _llama3(plain, factor=factor, low=low, high=high, context=original)
        fast = self.parameters.number("beta_fast", default=32.0)
        slow = self.parameters.number("beta_slow", default=1.0)
        first, last = (
            # The dimension that turns so many times over the original context.
            dimensions * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.base))
            for turns in (fast, slow)
        )
        if self.parameters.flag("truncate", default=True):
            first, last = math.floor(first), math.ceil(last)
        return _yarn(plain, factor=factor, first=max(first, 0), last=min(last, dimensions - 1))

    def attention_factor(self) -> float:
        """Factor of cosines and sines: 1 except with yarn."""
        if self.kind != "yarn":
            return 1.0
        given, factor = self.parameters.values.get("attention_factor"), self.parameters.number("factor")
        if given is not None:
            return self.parameters.number("attention_factor")
        scale, all_dimensions = (self.parameters.values.get(key) for key in ("mscale", "mscale_all_dim"))
        # As in transformers: 0 counts as absent.
        if scale and all_dimensions:
            upper, lower = self.parameters.number("mscale"), self.parameters.number("mscale_all_dim")
            return yarn_scale(factor, upper) / yarn_scale(factor, lower)
        return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, weight: float) -> float:
    """Yarn's correction of the attention temperature for a context `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(plain: Tensor, *, factor: float, low: float, high: float, context: int) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    import torch

    waves = 2 * math.pi / plain
    blend = (context / waves - low) / (high - low)
    scaled = torch.where(waves > context / low, plain / factor, plain)
    between = (waves >= context / high) & (waves <= context / low)
    return torch.where(between, (1 - blend) * scaled / factor + blend * scaled, scaled)


def _yarn(plain: Tensor, *, factor: float, first: float, last: float) -> Tensor:
    """Dimensions up to `first` keep their frequency, those from `last` on are stretched, with a ramp between."""
    import torch

    if first == last:
        # As transformers does: no division by 0.
        last += 0.001
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)
