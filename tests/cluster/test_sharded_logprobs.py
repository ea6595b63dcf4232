"""Log-probs of a vocabulary split over ranks are those of the whole one, truncated sampling included."""

import math

import pytest

pytest.importorskip("megatron.core")

import megatron_cases as cases
import torch

from roll_async.algorithms.logprobs import token_logprobs
from roll_async.trainer.megatron.settings import MegatronSettings
from tests.rounding import assert_near, reordered

SAMPLING = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_k": 11, "top_p": 0.6, "temperature": 1.3},
    {"top_k": 1},
]
NUM_TOKENS, VOCABULARY = 1100, 24
POSITIONS = [2000, 300, 7]
"""Of a piece: more than there are, some, a few."""
SUM = reordered(10 * VOCABULARY)
"""A handful of sums over the vocabulary, there and back."""


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_finds_what_one_rank_with_the_whole_vocabulary_finds(rank_pool, world_size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, NUM_TOKENS // 2, VOCABULARY, generator=generator) * 3
    mask = torch.rand(logits.shape[:2], generator=generator) < 0.8
    order = logits.argsort(-1, descending=True)
    rank_of_token = torch.randint(0, 5, mask.shape, generator=generator)  # within top_k = 5
    settings = [(MegatronSettings(model_folder="", **sampling), size) for sampling in SAMPLING for size in POSITIONS]
    tokens = order.gather(-1, rank_of_token[..., None])[..., 0]
    arguments = {"logits": logits, "tokens": tokens, "mask": mask, "settings": settings}
    found = rank_pool.run(cases.sharded_logprobs, world_size, **arguments)
    for i, sampling in enumerate(SAMPLING):
        whole = logits.clone().requires_grad_()
        wanted = token_logprobs(
            logits_BTV=whole, tokens_BT=tokens, mask_BT=mask, with_entropy=True, with_squares=True, **sampling
        )
        (wanted.logprobs * 2 + wanted.entropy * 3).sum().backward()
        largest = max(1.0, float(whole.grad.abs().max()))
        for case in range(len(POSITIONS) * i, len(POSITIONS) * (i + 1)):
            for logprobs, entropy, _, squares in (rank[case] for rank in found):
                assert_near(squares, wanted.squares, SUM)
                assert_near(logprobs, wanted.logprobs, SUM)
                assert_near(entropy, wanted.entropy, SUM, of=math.log(VOCABULARY))
            grad = torch.cat([rank[case][2] for rank in found], -1)
            assert_near(grad, whole.grad, SUM, of=largest)
        assert whole.grad.abs().max() > 0.1 and wanted.logprobs[mask].min() < -0.5 or sampling == {"top_k": 1}
