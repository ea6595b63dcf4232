from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    width: float = 0.2


def soft_clip(inputs, options: Options):
    """The ratio, bent by a tanh around 1 instead of cut."""
    ratio = torch.exp(inputs.logprobs - inputs.proximal_logprobs)
    bent = 1 + options.width * torch.tanh((ratio - 1) / options.width)
    return -bent * inputs.advantages, {"bent": (ratio - bent).detach().abs()}
