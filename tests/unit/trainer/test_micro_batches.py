"""What the model reads, and its answers back to rows, against the plain definition: the answer for token t lies where
the token before it was read.
"""

from dataclasses import replace

import pytest
import torch

from roll_async.prompts.images import laid_out
from roll_async.schema import ExpertRows, Image
from roll_async.trainer.megatron.micro_batches import ContextShare, StepRows, cut, rows_of
from roll_async.trainer.megatron.settings import MegatronSettings, ParallelSizes

CPU = torch.device("cpu")
NUM_ROWS, WIDTH = 5, 23


def step():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([7, 23, 2, 15, 9])
    tokens = torch.randint(1, 1000, (NUM_ROWS, WIDTH), generator=generator)
    inside = torch.arange(WIDTH)[None] < lengths[:, None]
    mask = inside & (torch.arange(WIDTH)[None] >= 1) & (torch.rand(NUM_ROWS, WIDTH, generator=generator) < 0.8)
    fields = {"scores": torch.arange(NUM_ROWS).float(), "advantages": torch.randn(NUM_ROWS, WIDTH, generator=generator)}
    return StepRows(tokens=torch.where(inside, tokens, 0), lengths=lengths, mask=mask, fields=fields)


def alone(rows):
    """Each row a sequence of its own."""
    return [[row] for row in rows]


def feeds(rows, mode, context, feed_shape=None):
    """The micro-batch as each context rank cuts it."""
    settings = MegatronSettings(
        model_folder="",
        micro_batching=mode,
        max_tokens_per_microbatch=64,
        parallel=ParallelSizes(context=context),
    )
    shares = [ContextShare(rank=rank, size=context) for rank in range(context)]
    return [cut(alone(rows), step(), settings, device=CPU, context=share, feed_shape=feed_shape) for share in shares]


@pytest.mark.parametrize("mode", ["fixed", "packed"])
@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("rows", [[1], [0, 2, 4], [3, 1, 0, 4, 2]])
def test_answers_come_back_to_the_token_they_speak_of(mode, context, rows):
    whole, parts = step(), feeds(rows, mode, context)
    # A model whose answer at a position is a function of the token read there and its position in the row.
    answers = torch.cat([(part.feed.tokens * 100 + part.feed.positions).reshape(-1).float() for part in parts])
    width = int(whole.lengths[rows].max())
    expected = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        for t in range(1, int(whole.lengths[row])):
            if whole.mask[row, t]:
                expected[i, t] = whole.tokens[row, t - 1] * 100 + (t - 1)
    for part in parts:
        assert (rows_of(part, answers) == expected).all()
        assert (part.fields["scores"] == whole.fields["scores"][rows]).all()
        assert (part.fields["advantages"] == whole.fields["advantages"][rows][:, :width]).all()


@pytest.mark.parametrize("mode", ["fixed", "packed"])
@pytest.mark.parametrize("context", [1, 2])
def test_targets_are_the_next_tokens_where_they_are_wanted_and_padding_is_the_rest(mode, context):
    whole, rows = step(), [0, 1, 2, 3, 4]
    wanted = real = 0
    for part in feeds(rows, mode, context):
        feed = part.feed
        wanted += len(feed.asked)
        real += int((~feed.padding).sum())
        assert not feed.padding.flatten()[feed.asked].any()
        assert (feed.tokens[feed.padding] == 0).all()
    assert wanted == int(whole.mask.sum())
    assert real == int(whole.lengths.sum())
    part = feeds(rows, mode, 1)[0]
    asked = part.feed.asked
    pairs = zip(part.feed.tokens.flatten()[asked].tolist(), part.feed.targets.flatten()[asked].tolist(), strict=True)
    expected = [
        (int(whole.tokens[row, t - 1]), int(whole.tokens[row, t]))
        for row in rows
        for t in range(1, WIDTH)
        if whole.mask[row, t]
    ]
    assert list(pairs) == expected


def test_a_pack_names_where_its_sequences_begin_and_fills_up_to_a_multiple_of_eight():
    feed = feeds([0, 2, 4], "packed", 1)[0].feed
    assert feed.bounds == (0, 7, 9, 18, 24)
    assert feed.tokens.shape == (1, 24)
    assert feed.positions[0, 7:9].tolist() == [0, 1]


def test_context_ranks_hold_an_early_and_a_late_block_of_each_sequence():
    first, second = (part.feed.positions[0].tolist() for part in feeds([1], "fixed", 2))
    assert first == [0, 1, 2, 3, 4, 5, 18, 19, 20, 21, 22, 0]
    assert second == list(range(6, 18))


@pytest.mark.parametrize("mode", ["fixed", "packed"])
def test_a_common_shape_is_filled_up_and_changes_no_answer(mode):
    shape = (4, 32) if mode == "fixed" else (1, 64)
    (part,) = feeds([2, 4], mode, 1, feed_shape=shape)
    assert part.feed.tokens.shape == shape
    (plain,) = feeds([2, 4], mode, 1)
    big = rows_of(part, part.feed.tokens.reshape(-1).float())
    assert (big == rows_of(plain, plain.feed.tokens.reshape(-1).float())).all()


@pytest.mark.parametrize("mode", ["fixed", "packed"])
def test_filler_feeds_padding_only(mode):
    (part,) = feeds([], mode, 1)
    assert len(part.rows) == 0 and part.feed.padding.all() and not len(part.feed.asked)
    assert part.feed.tokens.shape[1] == 8


@pytest.mark.parametrize("mode", ["fixed", "packed"])
@pytest.mark.parametrize("context", [1, 2])
def test_recorded_experts_lie_where_their_tokens_are_fed(mode, context):
    whole, rows, shape = step(), [3, 1, 0], None if mode == "packed" else (4, 32)
    counts = [6, 20, 0, 14, 9]  # row 2 has no record, the others lack their last tokens
    ids = torch.tensor([[[b, t, 0], [7, b, t]] for b, n in enumerate(counts) for t in range(n)], dtype=torch.uint8)
    experts = ExpertRows(ids=ids, num_positions=torch.tensor(counts))
    settings = MegatronSettings(
        model_folder="", micro_batching=mode, max_tokens_per_microbatch=64, parallel=ParallelSizes(context=context)
    )
    seen = 0
    for rank in range(context):
        share = ContextShare(rank=rank, size=context)
        step_rows = replace(whole, experts=experts)
        feed = cut(alone(rows), step_rows, settings, device=CPU, context=share, feed_shape=shape).feed
        assert feed.experts.shape == (*feed.tokens.shape, 2, 3) and feed.experts.dtype == torch.int16
        for token, position, padding, found in zip(
            *(x.reshape(-1).tolist() for x in (feed.tokens, feed.positions, feed.padding)),
            feed.experts.view(-1, 2, 3).tolist(),
            strict=True,
        ):
            b = found[0][0]
            if b < 0:
                assert found == [[-1] * 3] * 2
                continue
            assert not padding and found == [[b, position, 0], [7, b, position]]
            assert position < counts[b] and token == whole.tokens[b, position]
            seen += 1
    assert seen == sum(counts[b] for b in rows)


@pytest.mark.parametrize("mode", ["fixed", "packed"])
@pytest.mark.parametrize("context", [1, 2])
def test_copies_are_fed_once_and_each_takes_its_answers_and_gives_its_gradient(mode, context):
    index = torch.tensor([0, 3, 0, 3, 4, 3])
    whole = replace(step().taken(index), fields={"advantages": torch.arange(6.0)})
    settings = MegatronSettings(
        model_folder="", micro_batching=mode, max_tokens_per_microbatch=64, parallel=ParallelSizes(context=context)
    )
    copies = [[1, 3, 5], [4], [0, 2]]
    parts = [
        cut(copies, whole, settings, device=CPU, context=ContextShare(rank=rank, size=context))
        for rank in range(context)
    ]
    fed = [tokens for part in parts for tokens in part.feed.tokens[~part.feed.padding].tolist()]
    assert sorted(fed) == sorted(whole.tokens[[0, 1, 4]][whole.tokens[[0, 1, 4]] != 0].tolist())
    answers = torch.cat([(part.feed.tokens * 100 + part.feed.positions).reshape(-1).double() for part in parts])
    answers.requires_grad_()
    rows = [1, 3, 5, 4, 0, 2]
    assert parts[0].rows.tolist() == rows and parts[0].fields["advantages"].tolist() == rows
    found = rows_of(parts[0], answers)
    for i, row in enumerate(rows):
        for t in range(1, int(whole.lengths[row])):
            expected = whole.tokens[row, t - 1] * 100 + t - 1 if whole.mask[row, t] else 0
            assert found[i, t] == expected
    (found * parts[0].fields["advantages"][:, None]).sum().backward()
    # 9 = 1 + 3 + 5, 2 = 0 + 2: each position of a fed row is given what its copies give together.
    assert answers.grad.sum() == 9 * whole.mask[1].sum() + 4 * whole.mask[4].sum() + 2 * whole.mask[0].sum()
    assert set(answers.grad.tolist()) == {0.0, 9.0, 4.0, 2.0}


IMAGE_TOKEN = 1000
LARGE, SMALL = Image(data=b"large", grid=(2, 3)), Image(data=b"small", grid=(1, 2))


def step_with_images():
    """Rows 1, 3 and 4 have images, the last two the same one."""
    images, plain = ((), (SMALL, LARGE), (), (LARGE,), (LARGE,)), step()
    for row, seen in enumerate(images):
        start = 2
        for image in seen:
            plain.tokens[row, start : start + image.num_tokens] = IMAGE_TOKEN
            start += image.num_tokens + 1
    return replace(plain, images=images)


@pytest.mark.parametrize("context", [1, 2])
def test_image_tokens_carry_their_axes_and_the_output_that_takes_their_place(context):
    whole, rows = step_with_images(), [3, 1, 0, 4]
    settings = MegatronSettings(
        model_folder="", micro_batching="packed", max_tokens_per_microbatch=64, parallel=ParallelSizes(context=context)
    )
    found = {}
    for rank in range(context):
        share = ContextShare(rank=rank, size=context)
        feed = cut(alone(rows), whole, settings, device=CPU, context=share, image_token=IMAGE_TOKEN).feed
        # An image that two rows see is seen once.
        assert feed.images == (LARGE, SMALL)
        first = {LARGE: 0, SMALL: LARGE.num_tokens}
        for s in range(feed.tokens.shape[1]):
            told = feed.axes[:, 0, s].tolist(), int(feed.slots[0, s])
            found[rank, s] = told
            if feed.padding[0, s]:
                assert told == ([0, 0, 0], -1)
    # Every token of every row is on one rank, with what the row alone gives it.
    every = sorted((axes, slot) for axes, slot in found.values())
    expected = []
    for row in rows:
        length, seen = int(whole.lengths[row]), whole.images[row]
        axes, own = laid_out(whole.tokens[row, :length], seen, IMAGE_TOKEN)
        outputs = [first[image] + i for image in seen for i in range(image.num_tokens)]
        expected += [(axes[:, t].tolist(), outputs[own[t]] if own[t] >= 0 else -1) for t in range(length)]
    filler = [([0, 0, 0], -1)] * (len(every) - len(expected))
    assert every == sorted(expected + filler)


def test_rows_keep_their_images_when_some_are_taken_and_text_has_no_axes():
    whole = step_with_images()
    assert whole.taken(torch.tensor([4, 0])).images == ((LARGE,), ())
    assert step().taken(torch.tensor([4, 0])).images == ()
    (part,) = feeds([0, 1], "packed", 1)
    assert part.feed.axes is None and part.feed.slots is None and part.feed.images == ()


def test_filler_of_a_batch_with_images_sees_none():
    settings = MegatronSettings(model_folder="", micro_batching="packed", max_tokens_per_microbatch=64)
    whole = step_with_images()
    feed = cut([], whole, settings, device=CPU, context=ContextShare(), image_token=IMAGE_TOKEN).feed
    assert feed.images == () and (feed.slots == -1).all() and feed.axes.shape == (3, *feed.tokens.shape)
