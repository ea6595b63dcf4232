from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    scale: float = 1.0


def ranked(inputs, options: Options):
    """The share of the group that a row beats, minus the share that beats it."""
    same = inputs.group_index[:, None] == inputs.group_index[None]
    ahead = (inputs.scores[:, None] > inputs.scores[None]).float() - (
        inputs.scores[:, None] < inputs.scores[None]
    ).float()
    advantage = options.scale * (ahead * same).sum(1) / same.sum(1)
    return advantage[:, None] * inputs.mask, inputs.scores[:, None] * inputs.mask
