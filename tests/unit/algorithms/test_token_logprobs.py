"""Chunked log-probs: values, gradients and memory against plain log-softmax; vocabulary shards against the whole."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roll_async.algorithms.kl import full_kl
from roll_async.algorithms.logprobs import merge_vocab_shards, token_chunks, token_logprobs

B, T, V = 3, 7, 13


def make(seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(B, T, V, generator=g, dtype=torch.float64) * 3).to(dtype)
    tokens = torch.randint(0, V, (B, T), generator=g)
    mask = torch.rand(B, T, generator=g) < 0.7
    return logits, tokens, mask


def plain(logits, tokens, mask, temperature=1.0):
    """Autograd through log_softmax: (logprobs, entropy), 0 where masked."""
    log_p = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.where(mask, log_p.gather(-1, tokens[..., None])[..., 0], 0), torch.where(mask, entropy, 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 7, 15, 1000])
def test_values_and_gradients_equal_plain_log_softmax(seed, temperature, chunk):
    logits, tokens, mask = make(seed)
    leaf, reference = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    result = token_logprobs(
        logits_BTV=leaf, tokens_BT=tokens, mask_BT=mask, temperature=temperature, chunk_tokens=chunk, with_entropy=True
    )
    logprobs, entropy = plain(reference, tokens, mask, temperature)
    torch.testing.assert_close(result.logprobs, logprobs, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(result.entropy, entropy, rtol=1e-12, atol=1e-13)
    for values in ((result.logprobs, result.entropy), (logprobs, entropy)):
        (values[0] * torch.arange(T) - 0.3 * values[1].square()).sum().backward()
    torch.testing.assert_close(leaf.grad, reference.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7, "temperature": 1.4}])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_squares_are_those_of_what_the_token_was_sampled_from(options, chunk):
    logits, tokens, mask = make(5)
    leaf = logits.clone().requires_grad_()
    arguments = {"tokens_BT": tokens, "mask_BT": mask, "chunk_tokens": chunk, **options}
    result = token_logprobs(logits_BTV=leaf, with_squares=True, with_entropy=True, **arguments)
    without = token_logprobs(logits_BTV=logits, with_entropy=True, **arguments)
    # The probability of every token under the same sampling. One that truncation cut off is kept where it is the
    # sampled one, so its probability is read only where the sampled token alone changes nothing.
    slow = torch.zeros(B, T, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            z = (logits[b, t] / options.get("temperature", 1.0)).tolist()
            ordered = sorted(range(V), key=lambda v: -z[v])[: options.get("top_k") or V]
            weights, kept, before = [math.exp(z[v]) for v in ordered], [], 0.0
            for v, weight in zip(ordered, weights, strict=True):
                if before < options.get("top_p", 1.0):
                    kept.append(v)
                before += weight / math.fsum(weights)
            kept = {*kept, int(tokens[b, t])}
            whole = math.fsum(math.exp(z[v]) for v in kept)
            slow[b, t] = sum((math.exp(z[v]) / whole) ** 2 for v in kept) if mask[b, t] else 0.0
    torch.testing.assert_close(result.squares, slow, rtol=1e-10, atol=1e-12)
    assert not result.squares.requires_grad and without.squares is None
    for name in ("logprobs", "entropy"):
        assert torch.equal(getattr(result, name).detach(), getattr(without, name))


@pytest.mark.parametrize("used", ["log-probs", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_answer_that_no_loss_reads_leaves_the_gradient_of_the_other_alone(used, temperature):
    logits, tokens, mask = make(0)
    gradients = []
    for unused_weight in (None, 0.0):
        leaf = logits.clone().requires_grad_()
        result = token_logprobs(
            logits_BTV=leaf, tokens_BT=tokens, mask_BT=mask, temperature=temperature, chunk_tokens=4, with_entropy=True
        )
        read, unread = result.logprobs, result.entropy
        if used == "entropy":
            read, unread = unread, read
        loss = (read * torch.arange(T)).sum()
        (loss if unused_weight is None else loss + unused_weight * unread.sum()).backward()
        gradients.append(leaf.grad)
    assert gradients[0].any() and torch.equal(*gradients)


def kept_set(z, token, top_k, top_p):
    """Indices an engine could have sampled from, by the definition, plus the sampled token."""
    kept = list(range(len(z)))
    if top_k > 0:
        threshold = sorted(z, reverse=True)[min(top_k, len(z)) - 1]
        kept = [v for v in kept if z[v] >= threshold]
    if top_p < 1:
        order = sorted(kept, key=lambda v: -z[v])
        mass = [math.exp(z[v]) for v in order]
        total, before, chosen = sum(mass), 0.0, []
        for v, m in zip(order, mass, strict=True):
            if before / total < top_p:
                chosen.append(v)
            before += m
        kept = chosen
    return set(kept) | {token}


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (3, 1.0), (0, 0.5), (0, 0.95), (5, 0.8), (50, 0.7)])
def test_truncated_logprobs_match_a_loop(top_k, top_p):
    logits, tokens, mask = make(5)
    leaf, temperature = logits.clone().requires_grad_(), 0.8
    settings = {"tokens_BT": tokens, "mask_BT": mask, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    result = token_logprobs(logits_BTV=leaf, chunk_tokens=4, with_entropy=True, **settings)
    expected, slope = torch.zeros(B, T, dtype=torch.float64), torch.zeros_like(logits)
    for b, t in itertools.product(range(B), range(T)):
        if not mask[b, t]:
            continue
        z, token = (logits[b, t] / temperature).tolist(), int(tokens[b, t])
        kept = kept_set(z, token, top_k, top_p)
        total = sum(math.exp(z[v]) for v in kept)
        expected[b, t] = z[token] - math.log(total)
        for v in range(V):
            p = math.exp(z[v]) / total if v in kept else 0.0
            slope[b, t, v] = (float(v == token) - p) / temperature
    torch.testing.assert_close(result.logprobs, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(result.entropy, plain(logits, tokens, mask, temperature)[1], rtol=1e-12, atol=1e-13)
    result.logprobs.sum().backward()
    torch.testing.assert_close(leaf.grad, slope, rtol=1e-11, atol=1e-13)
    assert torch.isfinite(result.logprobs).all() and (result.logprobs <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 4}, {"top_p": 0.8}])
def test_masked_logits_may_be_anything_in_any_dtype(dtype, truncation, poisoned):
    logits, tokens, mask = make(2, dtype)
    dirty = poisoned(logits, mask[..., None].expand(B, T, V)).requires_grad_()
    bad_tokens = torch.where(mask, tokens, -100)
    result = token_logprobs(
        logits_BTV=dirty, tokens_BT=bad_tokens, mask_BT=mask, chunk_tokens=5, with_entropy=True, **truncation
    )
    clean = token_logprobs(logits_BTV=logits, tokens_BT=tokens, mask_BT=mask, with_entropy=True, **truncation)
    for field in ("logprobs", "entropy"):
        value = getattr(result, field)
        assert value.dtype == torch.float32 and torch.equal(value[~mask], torch.zeros(int((~mask).sum())))
        torch.testing.assert_close(value, getattr(clean, field), rtol=1e-6, atol=1e-6)
    (result.logprobs.sum() + result.entropy.sum()).backward()
    assert dirty.grad.dtype == dtype and torch.isfinite(dirty.grad).all()
    assert torch.equal(dirty.grad[~mask], torch.zeros_like(dirty.grad[~mask]))


def test_a_nan_gradient_at_a_masked_position_stays_there():
    logits, tokens, mask = make(4)
    leaf = logits.requires_grad_()
    result = token_logprobs(logits_BTV=leaf, tokens_BT=tokens, mask_BT=mask, with_entropy=True)
    hole = torch.where(mask, 1.0, torch.nan).double()
    torch.autograd.backward([result.logprobs, result.entropy], [hole, hole])
    assert torch.isfinite(leaf.grad).all() and torch.equal(leaf.grad[~mask], torch.zeros_like(leaf.grad[~mask]))


def test_top_p_stops_once_its_mass_is_reached():
    logits = torch.zeros(1, 1, 2, dtype=torch.float64)  # two halves: after the first the mass is exactly 0.5
    for token, top_p, expected in ((0, 0.5, 0.0), (1, 0.5, math.log(0.5)), (0, 0.51, math.log(0.5))):
        result = token_logprobs(logits_BTV=logits, tokens_BT=torch.tensor([[token]]), top_p=top_p)
        assert float(result.logprobs) == pytest.approx(expected)


def test_without_a_mask_every_position_counts():
    logits, tokens, _ = make(1)
    everywhere = token_logprobs(logits_BTV=logits, tokens_BT=tokens)
    assert everywhere.entropy is None
    torch.testing.assert_close(everywhere.logprobs, plain(logits, tokens, torch.ones(B, T).bool())[0])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)])
def test_nothing_valid_back_propagates_zero(shape):
    leaf = torch.full((*shape, V), torch.nan, requires_grad=True)
    result = token_logprobs(
        logits_BTV=leaf, tokens_BT=torch.zeros(shape).long(), mask_BT=torch.zeros(shape).bool(), with_entropy=True
    )
    (result.logprobs.sum() + result.entropy.sum()).backward()
    assert torch.equal(result.logprobs, torch.zeros(shape)) and torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize(
    ("shape", "chunk"), [((3, 7), 1), ((3, 7), 5), ((3, 7), 7), ((3, 7), 20), ((1, 1), 4), ((9, 2), 5)]
)
def test_chunks_cover_the_grid_once_and_are_small(shape, chunk):
    seen = torch.zeros(shape)
    for part in token_chunks(shape, chunk):
        assert seen[part].numel() <= chunk
        seen[part] += 1
    assert torch.equal(seen, torch.ones(shape))


class LargestResult(TorchDispatchMode):
    """Remembers the largest float32 tensor any operator made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        sizes = [x.numel() for x in made if isinstance(x, torch.Tensor) and x.dtype == torch.float32]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("view", [False, True], ids=["whole", "shifted-view"])
def test_no_float32_tensor_is_larger_than_a_chunk(view):
    rows, length, vocabulary, chunk = 4, 32, 257, 8
    logits = torch.randn(rows, length + 1, vocabulary).bfloat16().requires_grad_()
    used = logits[:, :-1] if view else logits
    tokens, mask = torch.randint(0, vocabulary, used.shape[:2]), torch.rand(used.shape[:2]) < 0.8
    with LargestResult() as largest:
        for truncation in ({}, {"top_k": 20, "top_p": 0.9}):
            result = token_logprobs(
                logits_BTV=used, tokens_BT=tokens, mask_BT=mask, chunk_tokens=chunk, with_entropy=True, **truncation
            )
            (result.logprobs.sum() + result.entropy.sum()).backward()
        kl = full_kl(logits_BTV=used, ref_logits_BTV=used.detach() + 1, mask_BT=mask, chunk_tokens=chunk)
        kl.sum().backward()
    assert vocabulary < largest.elements <= chunk * vocabulary


def test_bad_settings_are_refused():
    logits, tokens, mask = make(0)
    for bad in ({"temperature": 0.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.5}, {"chunk_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            token_logprobs(logits_BTV=logits, tokens_BT=tokens, **bad)
    with pytest.raises(ValueError, match="bool"):
        token_logprobs(logits_BTV=logits, tokens_BT=tokens, mask_BT=mask.long())


def sharded_logprobs(logits_NV, tokens_N, num_shards, temperature):
    """What tensor-parallel ranks do, one after the other: (logprobs, gradient of their sum) from local shards only."""
    shards = (logits_NV / temperature).chunk(num_shards, -1)
    width = shards[0].shape[-1]
    local = [tokens_N - rank * width for rank in range(num_shards)]
    owned = [(x >= 0) & (x < z.shape[-1]) for x, z in zip(local, shards, strict=True)]
    highest = torch.stack([z.amax(-1) for z in shards])
    sums = torch.stack([(z - m[:, None]).exp().sum(-1) for z, m in zip(shards, highest, strict=True)])
    targets = torch.stack([
        torch.where(mine, z.gather(-1, x.clamp(0, z.shape[-1] - 1)[:, None])[:, 0], 0)
        for x, mine, z in zip(local, owned, shards, strict=True)
    ])  # fmt: skip
    logprobs = merge_vocab_shards(max_PN=highest, sumexp_PN=sums, target_logit_PN=targets)
    log_z = targets.sum(0) - logprobs
    gradients = []
    for x, mine, z in zip(local, owned, shards, strict=True):
        one_hot = (torch.arange(z.shape[-1]) == x[:, None]) & mine[:, None]
        gradients.append((one_hot.to(z.dtype) - (z - log_z[:, None]).exp()) / temperature)
    return logprobs, torch.cat(gradients, -1)


@pytest.mark.parametrize("num_shards", [1, 2, 5, 13])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_vocabulary_shards_give_the_values_of_the_whole(num_shards, dtype, scale):
    logits, tokens, _ = make(9)
    logits, temperature = (logits * scale).to(dtype), 0.7
    leaf = logits.clone().requires_grad_()
    whole = token_logprobs(logits_BTV=leaf, tokens_BT=tokens, temperature=temperature).logprobs
    whole.sum().backward()
    merged, gradient = sharded_logprobs(logits.view(-1, V), tokens.flatten(), num_shards, temperature)
    tight = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(merged.view(B, T), whole.detach(), rtol=tight, atol=tight)
    torch.testing.assert_close(gradient.view_as(logits), leaf.grad, rtol=tight, atol=max(tight, scale * tight * 10))


def test_shards_of_any_finite_size_merge():
    huge = torch.tensor([[3e38], [-3e38], [0.0]])
    ones, target = torch.ones(3, 1), torch.tensor([[0.0], [-3e38], [0.0]])
    assert (
        float(merge_vocab_shards(max_PN=huge, sumexp_PN=ones, target_logit_PN=huge * torch.tensor([[1.0], [0], [0]])))
        == 0
    )
    assert not torch.isnan(merge_vocab_shards(max_PN=huge, sumexp_PN=ones, target_logit_PN=target)).any()
