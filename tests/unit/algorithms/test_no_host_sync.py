"""No loss reads a tensor on the host: each runs on the meta device and calls no operator that would have to wait."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roll_async.algorithms.aggregation import AGGREGATION_MODES, Denominators, aggregate
from roll_async.algorithms.critic import value_loss
from roll_async.algorithms.kl import KL_ESTIMATORS, full_kl, kl_estimate
from roll_async.algorithms.logprobs import merge_vocab_shards, token_logprobs
from roll_async.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from roll_async.config.options.policy_loss_options import POLICY_LOSS_OPTIONS

B, T, V = 3, 5, 11
LEVELS = {"ppo": 3, "decoupled_ppo": 3, "tis": 4, "cispo": 4, "topr": 4}
SYNCHRONISING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default", "_to_cpu")


class ForbidHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if any(word in name for word in SYNCHRONISING):
            raise AssertionError(f"{name} waits for the device")
        if "index.Tensor" in name and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise AssertionError("boolean indexing waits for the device")
        return func(*args, **(kwargs or {}))


def run_losses(device):
    g = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, generator=g).to(device)

    mask = (torch.rand(B, T, generator=g) < 0.7).to(device)
    segments = torch.randint(0, 3, (B, T), generator=g).to(device)
    denominators = Denominators(global_tokens=9, global_sequences=3, normalizer_length=5)
    tokens = torch.randint(0, V, (B, T), generator=g).to(device)
    logits, reference, scores = numbers(B, T, V).requires_grad_(), numbers(B, T, V), numbers(B)
    proximal, behaviour, advantages, kept = numbers(B, T), numbers(B, T), numbers(B, T), numbers(B, T) > 0
    with ForbidHostReads():
        for truncation in ({}, {"top_k": 3}, {"top_p": 0.7}):
            both = token_logprobs(
                logits_BTV=logits, tokens_BT=tokens, mask_BT=mask, chunk_tokens=4, with_entropy=True, **truncation
            )
        total = full_kl(logits_BTV=logits, ref_logits_BTV=reference, mask_BT=mask).sum() + both.entropy.sum()
        for name, loss in POLICY_LOSSES.items():
            for level in ("token", "sequence", "segment", "sequence_product")[: LEVELS.get(name, 0)] or (None,):
                options = POLICY_LOSS_OPTIONS[name](**({} if level is None else {"ratio_level": level}))
                inputs = PolicyLossInputs(
                    logprobs=both.logprobs, proximal_logprobs=proximal, behaviour_logprobs=behaviour,
                    advantages=advantages, mask=mask, scores=scores, segment_ids=segments, selection=kept,
                )  # fmt: skip
                per_token, metrics = loss(inputs, options=options)
                assert len(metrics) >= 5
                for mode in AGGREGATION_MODES:
                    total = total + aggregate(
                        loss_BT=per_token, mask_BT=mask, mode=mode, denominators=denominators, weights_BT=proximal.exp()
                    )
        for estimator in KL_ESTIMATORS:
            kl = kl_estimate(logprobs_BT=both.logprobs, ref_logprobs_BT=behaviour, mask_BT=mask, estimator=estimator)
            total = total + kl.sum()
        values, _ = value_loss(
            values_BT=both.logprobs, old_values_BT=proximal, returns_BT=advantages, mask_BT=mask, clip=0.2
        )
        merge_vocab_shards(max_PN=proximal, sumexp_PN=behaviour.exp(), target_logit_PN=proximal)
        (total + values.sum()).backward()
    return logits.grad


def test_losses_read_nothing_on_the_host():
    gradient = run_losses("cpu")
    assert torch.isfinite(gradient).all() and float(gradient.abs().sum()) > 0


@pytest.mark.slow
def test_losses_run_on_the_meta_device():
    assert run_losses("meta").shape == (B, T, V)


def test_the_guard_sees_a_read():
    for read in (lambda x: x.item(), lambda x: float(x), lambda x: bool(x > 0), lambda x: x[x > 0]):
        with pytest.raises(AssertionError, match="waits"), ForbidHostReads():
            read(torch.ones(()))
