"""The metrics of one validation, as papers report them: n samples per prompt, avg@n, pass@k, the standard error.

pass@k = mean over prompts of 1 - C(n - c, k) / C(n, k), c of n samples right   (Chen et al. 2021, arXiv 2107.03374)
standard error = sample deviation of the prompts' means / sqrt(prompts); samples of one prompt are not independent
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from roll_async.pipelines.metrics import accuracy, mean
from roll_async.schema import FinishReason, Prompt, Reward, Sample

_Scored = tuple[Prompt, Sample, Reward]


def validation_metrics(answered: Sequence[tuple[Prompt, Sample]], *, num_asked: int) -> dict[str, float]:
    """`validation/NAME` over all samples, and with more than one domain `validation/domains/DOMAIN/NAME`. A mean over
    nothing is not published; `num_asked` counts the samples, those without a score included.
    """
    scored = [(prompt, sample, sample.reward) for prompt, sample in answered if sample.reward is not None]
    metrics = {"validation/unscored": float(num_asked - len(scored))}
    domains = sorted({prompt.domain for prompt, _, _ in scored})
    parts = {"validation": scored}
    if len(domains) > 1:
        parts |= {f"validation/domains/{d}": [item for item in scored if item[0].domain == d] for d in domains}
    for prefix, part in parts.items():
        metrics[f"{prefix}/samples"] = float(len(part))
        if part:
            metrics |= {f"{prefix}/{name}": value for name, value in _of_part(part).items()}
    return metrics


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k samples drawn without repetition is right.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _of_part(part: Sequence[_Scored]) -> dict[str, float]:
    verdicts: dict[tuple[str, bytes], list[float]] = {}
    for prompt, _, reward in part:
        # The same question in several rows (AIME 2024 as published for DAPO) is one question with more samples.
        verdicts.setdefault((prompt.domain, prompt.token_ids.tobytes()), []).append(accuracy(reward))
    means = [mean(of_prompt) for of_prompt in verdicts.values()]
    metrics = {
        "prompts": float(len(means)),
        "reward": mean([r.score for _, _, r in part]),
        "accuracy": mean([accuracy(r) for _, _, r in part]),
        "length_mean": mean([len(s.response_token_ids) for _, s, _ in part]),
        "truncated": mean([float(s.finish_reason is FinishReason.LENGTH) for _, s, _ in part]),
    }
    if len(means) > 1:
        center = mean(means)
        metrics["standard_error"] = math.sqrt(sum((m - center) ** 2 for m in means) / (len(means) - 1) / len(means))
    most = max(map(len, verdicts.values()))
    if most > 1:
        metrics[f"avg@{most}"] = mean(means)
        for k in sorted({2**i for i in range(most.bit_length())} | {most}):
            drawn = [pass_at_k(len(v), sum(x > 0 for x in v), k) for v in verdicts.values() if len(v) >= k]
            metrics[f"pass@{k}"] = mean(drawn)
    for name in sorted({name for _, _, r in part for name in r.metrics} - {"acc"}):
        metrics[f"metrics/{name}"] = mean([r.metrics[name] for _, _, r in part if name in r.metrics])
    return metrics
