"""Gated delta nets: the rule against a loop over positions, and models with rows of several chunks against
Transformers, gradients of every parameter among them.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases
import tiny_families

from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.checkpoint.hf_names.families import family_of
from roll_async.commands.certify.rank_side import saved_name, transformers_model
from roll_async.trainer.megatron.worker import MegatronWorker  # noqa: F401  # first: it installs the shim
from roll_async.trainer.protocol import TokenRows

# isort: split
from roll_async.trainer.megatron.model.delta_net import RowChunks, gated_delta_rule
from roll_async.trainer.megatron.model.model_config import transformer_config
from tests.rounding import assert_near

EXACT = 1e-6
LENGTHS = (65, 100, 2, 64, 100, 31)
SHAPES = ("qwen3.5",)
"""Those with experts differ in the names of these layers alone, and have their certificates."""


def looped(query, key, value, decay, rate):
    """One row, one position after another."""
    state, out = query.new_zeros(query.shape[1], query.shape[2], value.shape[2]), []
    for q, k, v, g, b in zip(query, key, value, decay, rate, strict=True):
        state = state * g.exp()[:, None, None]
        change = b[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, change)
        out.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(out)


def numbers(lengths, heads=3, key=8, value=5):
    torch.manual_seed(0)
    count = sum(lengths)
    query, keys = (torch.nn.functional.normalize(torch.randn(count, heads, key), dim=-1) for _ in "qk")
    decay, rate = -torch.rand(count, heads) * 2, torch.rand(count, heads)
    return [x.requires_grad_() for x in (query, keys, torch.randn(count, heads, value), decay, rate)]


@pytest.mark.parametrize("lengths", [(1,), (64, 64), LENGTHS, (3, 200, 65, 64, 63)])
def test_packed_rows_in_chunks_are_each_row_position_by_position(lengths):
    given = numbers(lengths)

    def in_chunks(*row):
        return gated_delta_rule(*row, RowChunks.of((len(row[0]),), 4, torch.device("cpu")))

    def row_by_row(rule):
        return torch.cat([rule(*row) for row in zip(*(x.split(lengths) for x in given), strict=True)])

    found = gated_delta_rule(*given, RowChunks.of(lengths, 4, torch.device("cpu")))
    alone, wanted = row_by_row(in_chunks), row_by_row(looped)
    weights = torch.randn_like(wanted)
    for other, bound in ((alone, EXACT), (wanted, 10 * EXACT)):
        assert_near(found.detach(), other.detach(), bound)
        gradients = [torch.autograd.grad((x * weights).sum(), given, retain_graph=True) for x in (found, other)]
        for one, another in zip(*gradients, strict=True):
            assert_near(one, another, bound)


def rows_of(vocabulary=96):
    """Rows that end before, at and after the end of a chunk."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, vocabulary, (len(LENGTHS), max(LENGTHS)), generator=generator)
    lengths = torch.tensor(LENGTHS)
    within = torch.arange(max(LENGTHS))[None] < lengths[:, None]
    mask = within.clone()
    mask[:, 0] = False
    return TokenRows(tokens=tokens * within, lengths=lengths, mask=mask)


@pytest.fixture(scope="module", params=SHAPES)
def reference(request, tmp_path_factory):
    """(folder, log-probs of Transformers row by row, gradients of their mean cross-entropy)."""
    folder, rows, found = tmp_path_factory.mktemp("model"), rows_of(), []
    tiny_families.save_tiny(request.param, folder)
    model = transformers_model(folder)
    for tokens, length in zip(rows.tokens, LENGTHS, strict=True):
        logprobs = model(tokens[None, :length]).logits.log_softmax(-1)[0, :-1].gather(1, tokens[1:length, None])[:, 0]
        found.append(torch.nn.functional.pad(logprobs, (1, max(LENGTHS) - length)))
    logprobs = torch.stack(found)
    (-logprobs.sum() / rows.mask.sum()).backward()
    return folder, logprobs.detach(), {saved_name(name): x.grad for name, x in model.named_parameters()}


PACKED = {"micro_batching": "packed", "max_tokens_per_microbatch": 300}


@pytest.mark.parametrize(
    ("parallel", "more"),
    [
        ({}, {}),
        ({}, PACKED),
        ({"tensor": 2, "sequence_parallel": True}, PACKED),
        ({"tensor": 2}, {}),
        ({"pipeline": 2}, PACKED),
    ],
    ids=["padded", "packed", "TP2 SP, packed", "TP2, padded", "PP2, packed"],
)
def test_logprobs_and_all_gradients_are_those_of_transformers(rank_pool, reference, parallel, more):
    folder, logprobs, gradients = reference
    settings = cases.settings_of(str(folder), parallel=parallel, optimizer={"max_grad_norm": 0.0}, **more)
    settings = replace(settings, mini_batch_rows=len(LENGTHS), micro_batch_rows=2)
    found = rank_pool.run(
        tiny_families.logprobs_and_gradients, settings.parallel.tensor * settings.parallel.pipeline,
        settings=settings, rows=rows_of(),
    )  # fmt: skip
    assert_near(found[0][0], logprobs, cases.BOUNDS.forward)
    largest = max(float(x.abs().max()) for x in gradients.values())
    seen = set()
    for _, parts in found:
        for part in parts:
            if part.name == "lm_head.weight":  # the last stage's copy of a tied embedding
                continue
            wanted, cut = gradients[part.name], part.cut
            if cut is not None:
                wanted = wanted.narrow(cut.dim, cut.start, cut.stop - cut.start)
            assert_near(part.tensor, wanted, 1e-5, of=largest)
            seen.add(part.name)
    assert seen == gradients.keys()


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        ({"context": 2}, "context_parallel_size=2 must be 1"),
        ({"tensor": 4, "sequence_parallel": True}, "cannot be shared evenly by 4 ranks"),
    ],
)
def test_a_layout_that_a_delta_net_does_not_have_is_refused(reference, parallel, problem):
    settings = cases.settings_of(str(reference[0]), parallel=parallel)
    config = HfFolder(settings.model_folder).config
    with pytest.raises(ValueError, match=problem):
        transformer_config(config, family_of(config.architecture()), settings)
