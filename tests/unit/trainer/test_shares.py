"""Shares of a batch: every row is sent to one data-parallel rank with all that belongs to it, the counts to all."""

import pickle
from dataclasses import replace

import pytest
import torch

from roll_async.algorithms.objective import LossSettings
from roll_async.config.options.policy_loss_options import PpoOptions
from roll_async.schema import ExpertRows, Image
from roll_async.trainer.megatron.model.model_flops import ModelFlops
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.megatron.shares import BatchSplitter, ModelTraits
from roll_async.trainer.protocol import GivenRows, PolicyRows, TokenRows, ValueRows

NUM_ROWS, WIDTH = 64, 200
FLOPS = ModelFlops(per_token=24 * 64 * 64, per_pair=4 * 64, backward=2)
MODES = {
    "fixed": {},
    "dynamic": {"micro_batching": "dynamic", "max_tokens_per_microbatch": 500},
    "packed": {"micro_batching": "packed", "max_tokens_per_microbatch": 500},
}


def rows():
    """(to score, to train on); both carry experts, the second row none, and masks with gaps as of several turns."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, WIDTH + 1, (NUM_ROWS,), generator=generator)
    inside = torch.arange(WIDTH)[None] < lengths[:, None]
    tokens = torch.where(inside, torch.randint(1, 99, (NUM_ROWS, WIDTH), generator=generator), 0)
    mask = inside & (torch.rand(NUM_ROWS, WIDTH, generator=generator) < 0.7)
    mask[:, 0] = False
    counts = torch.where(torch.arange(NUM_ROWS) == 1, 0, lengths - 1)
    ids = torch.cat([100 * b + torch.arange(n) for b, n in enumerate(counts.tolist())])
    experts = ExpertRows(ids=ids[:, None, None].expand(-1, 2, 3).short().contiguous(), num_positions=counts)
    policy = PolicyRows(
        tokens=tokens,
        lengths=lengths,
        mask=mask,
        advantages=torch.randn(NUM_ROWS, 1, generator=generator).expand(-1, WIDTH).contiguous(),
        behaviour_logprobs=torch.randn(NUM_ROWS, WIDTH, generator=generator),
        proximal_logprobs=None,
        correction_weights=None,
        scores=torch.arange(NUM_ROWS).float(),
        version_lag=torch.ones(NUM_ROWS, WIDTH, dtype=torch.int64),
        experts=experts,
    )
    return TokenRows(tokens=tokens, lengths=lengths, mask=mask, experts=experts), policy


def splitter(num_ranks, mode="fixed", *, common_shape=False, has_experts=False, **fields):
    settings = MegatronSettings(
        model_folder="",
        loss=LossSettings(pg_variant="ppo", pg_options=PpoOptions(), normalizer_length=77),
        micro_batch_rows=4,
        mini_batch_rows=NUM_ROWS // 2,
        **{"router_replay": True, **MODES[mode], **fields},
    )
    model = ModelTraits(flops=FLOPS, has_experts=has_experts, common_shape=common_shape)
    return BatchSplitter(settings, model, num_ranks)


def of_each_call(num_ranks, mode="fixed"):
    """The shares of every kind of call."""
    split, (scored, policy) = splitter(num_ranks, mode), rows()
    values = ValueRows(
        tokens=policy.tokens,
        lengths=policy.lengths,
        mask=policy.mask,
        old_values=policy.behaviour_logprobs,
        returns=policy.advantages,
    )
    return {
        "scoring": split.scoring(scored),
        "policy": split.policy(policy),
        "values": split.values(values),
        "supervised": split.given(GivenRows(tokens=scored.tokens, lengths=scored.lengths, mask=scored.mask)),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_every_row_is_computed_once_by_the_one_rank_it_is_sent_to(mode, num_ranks):
    for shares in of_each_call(num_ranks, mode).values():
        assert len(shares) == num_ranks
        assert sorted(row for share in shares for row in share.numbers.tolist()) == list(range(NUM_ROWS))
        for share in shares:
            computed = [
                i for part in share.mini_batches for batch in part.micro_batches for rows in batch for i in rows
            ]
            assert sorted(computed) == list(range(len(share.numbers)))
            assert (share.numbers.diff() > 0).all()
        for parts in zip(*(share.mini_batches for share in shares), strict=True):
            assert len({len(part.micro_batches) for part in parts}) == 1
            assert len({(part.feed_shape, part.num_tokens) for part in parts}) == 1
            assert all(part.denominators == parts[0].denominators for part in parts)


def test_a_row_brings_along_all_that_belongs_to_it():
    scored, policy = rows()
    first = (scored.experts.num_positions.cumsum(0) - scored.experts.num_positions).tolist()
    for share in splitter(8).policy(policy):
        begin, width = 0, int(share.rows.lengths.max())
        for i, row in enumerate(share.numbers.tolist()):
            assert share.rows.lengths[i] == policy.lengths[row]
            for name in ("tokens", "mask"):
                assert torch.equal(getattr(share.rows, name)[i], getattr(policy, name)[row, :width])
            assert share.rows.fields.keys() == {"advantages", "behaviour_logprobs", "scores", "version_lag"}
            for name, values in share.rows.fields.items():
                own = getattr(policy, name)[row]
                assert torch.equal(values[i], own[:width] if own.dim() else own)
            count = int(share.rows.experts.num_positions[i])
            assert count == (0 if row == 1 else policy.lengths[row] - 1)
            own = policy.experts.ids[first[row] : first[row] + count]
            assert torch.equal(share.rows.experts.ids[begin : begin + count], own)
            begin += count
        assert begin == len(share.rows.experts.ids)
    assert splitter(8, router_replay=False).policy(policy)[0].rows.experts is None


@pytest.mark.parametrize("call", ["scoring", "policy", "values", "supervised"])
def test_the_bytes_a_rank_is_sent_fall_with_the_number_of_ranks(call):
    sizes = {n: [len(pickle.dumps(share)) for share in of_each_call(n)[call]] for n in (1, 2, 8)}
    (whole,) = sizes[1]
    for num_ranks in (2, 8):
        # Counts and plan are below 3 kB. A rank of long rows has more of the experts' records than one of short ones.
        assert max(sizes[num_ranks]) < 1.25 * whole / num_ranks + 3000, sizes
        assert sum(sizes[num_ranks]) < whole + 3000 * num_ranks, sizes


def test_a_loss_is_divided_by_the_counts_of_all_ranks_and_of_rows_that_none_computes():
    _, policy = rows()
    policy.advantages[::2] = 0
    for share in splitter(4).policy(policy):
        assert set(share.numbers.tolist()) <= set(range(1, NUM_ROWS, 2)), "a row without a gradient is sent to no rank"
        for i, part in enumerate(share.mini_batches):
            half = slice(32 * i, 32 * (i + 1))
            assert part.zero_gradient_rows_share == 0.5
            assert part.denominators["policy"].global_tokens == policy.mask[half].sum()
            assert part.denominators["policy"].normalizer_length == 77
            assert part.computed["policy"].global_tokens == policy.mask[half][1::2].sum()
            assert part.num_tokens == policy.lengths[half][1::2].sum()


def test_a_common_shape_holds_the_largest_micro_batch_of_all_ranks():
    scored, _ = rows()
    shapes = {part.feed_shape for s in splitter(4, common_shape=True).scoring(scored) for part in s.mini_batches}
    assert shapes == {(16, 200)}
    (shape,) = {
        part.feed_shape for s in splitter(4, "packed", common_shape=True).scoring(scored) for part in s.mini_batches
    }
    assert shape[0] == 1 and int(scored.lengths.max()) <= shape[1] <= 500


def test_more_ranks_than_rows_leave_some_without_any():
    scored, _ = rows()
    few = TokenRows(tokens=scored.tokens[:2], lengths=scored.lengths[:2], mask=scored.mask[:2])
    shares = splitter(4).scoring(few)
    assert [len(share.numbers) for share in shares] == [1, 1, 0, 0]
    assert shares[3].rows.tokens.shape == (0, 0) and shares[3].mini_batches[0].micro_batches == [[]]


def with_copies():
    """The rows to train on, of which each second one has the tokens of the one before it; row 5 is asked elsewhere, and
    row 7 ends with another token.
    """
    _, policy = rows()
    for values in (policy.tokens, policy.lengths, policy.mask):
        values[1::2] = values[::2]
    policy.mask[5, 2] ^= True
    policy.tokens[7, policy.lengths[7] - 1] += 1
    return replace(policy, experts=None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_copies_stay_together_and_count_once_where_work_is_planned(mode, num_ranks):
    policy, seen = with_copies(), []
    for share in splitter(num_ranks, mode).policy(policy):
        for part in share.mini_batches:
            for batch in part.micro_batches:
                seen += [tuple(share.numbers[rows].tolist()) for rows in batch]
                widths = [int(share.rows.lengths[rows[0]]) for rows in batch]
                assert mode == "fixed" or len(batch) == 1 or sum(widths) <= 500
                assert mode != "fixed" or len(batch) <= 4
    pairs = [(row, row + 1) for row in range(0, NUM_ROWS, 2) if row not in (4, 6)]
    assert [part.copied_rows_share for part in share.mini_batches] == [14 / 32, 16 / 32]
    assert sorted(seen) == sorted([*pairs, (4,), (5,), (6,), (7,)])


@pytest.mark.parametrize(
    "fields",
    [
        {"has_experts": True},
        {"lora_dropout": 0.1},
        {"extra": {"hidden_dropout": 0.1}},
        {"extra": {"attention_dropout": 0.1}},
    ],
)
def test_copies_are_all_fed_where_they_are_not_answered_alike(fields):
    (share,) = splitter(1, **fields).policy(with_copies())
    assert all(len(rows) == 1 for part in share.mini_batches for batch in part.micro_batches for rows in batch)
    assert [part.copied_rows_share for part in share.mini_batches] == [0, 0]


def test_rows_that_see_other_images_are_no_copies_and_each_share_has_its_own():
    (scored, policy), one, other = rows(), Image(data=b"1", grid=(1, 1)), Image(data=b"2", grid=(1, 1))
    alike = {"tokens": scored.tokens[:1].expand(4, -1), "lengths": scored.lengths[:1].expand(4)}
    images = ((one,), (other,), (one,), (other,))
    few = TokenRows(**alike, mask=scored.mask[:1].expand(4, -1), images=images)
    shares = splitter(2, "packed").scoring(few)
    assert [share.mini_batches[0].copied_rows_share for share in shares] == [0.5, 0.5]
    for share in shares:
        fed = [copies for batch in share.mini_batches[0].micro_batches for copies in batch]
        assert [{share.rows.images[row] for row in copies} for copies in fed] in ([{(one,)}], [{(other,)}])
    with pytest.raises(ValueError, match="micro_batching=fixed .* have images, .* set micro_batching: packed"):
        splitter(1).policy(replace(policy, images=((one,),) * NUM_ROWS))
