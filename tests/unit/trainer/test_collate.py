"""Groups to tensors, against a loop over tokens."""

from array import array
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from roll_async.schema import ExpertRecord, Image
from roll_async.trainer.collate import collate


def mixed_groups(build):
    prompt = build.prompt(ids=(5, 6), domain="math")
    tool = build.sample(
        prompt,
        (7, 8, 9, 10),
        ((3, 1), (4, 3)),
        0.25,
        loss_mask=b"\x01\x00\x00\x01",
        behaviour_logprobs=array("f", [-0.1, -9.0, -9.0, -0.4]),
    )
    empty = build.sample(prompt, (), (), -1.0)
    other = build.prompt(ids=(1, 2, 3, 4, 5), domain="code")
    return [
        build.group(11, 3, prompt=prompt, samples=(tool, empty), baseline_score=0.5),
        build.group(4, 2, prompt=other, samples=(build.sample(other, (9,), ((2, 1),), 1.0),), baseline_score=0.0),
    ]


def test_records_of_experts_stand_one_after_another_and_rows_without_one_hold_nothing(build):
    prompt = build.prompt(ids=(5, 6))
    ids = array("B", [0, 3, 1, 2, 2, 3, 0, 1])
    with_record = build.sample(prompt, (7,), ((0, 1),), 1.0, experts=ExpertRecord(ids=ids, num_layers=2, top_k=2))
    samples = (with_record, build.sample(prompt, (7, 8), ((0, 2),), 1.0), with_record)
    found = collate([build.group(0, 0, prompt=prompt, samples=samples)], step=1, domains=(prompt.domain,)).experts
    assert found.num_positions.tolist() == [2, 0, 2] and found.ids.dtype == torch.uint8
    assert found.ids.tolist() == [[[0, 3], [1, 2]], [[2, 3], [0, 1]]] * 2
    other = build.sample(prompt, (7,), ((0, 1),), 1.0, experts=ExpertRecord(ids=ids, num_layers=1, top_k=4))
    with pytest.raises(ValueError, match="experts of different models"):
        collate([build.group(samples=(with_record, other))], step=1, domains=(prompt.domain,))


def test_the_worked_example_of_the_docstring(build):
    batch = collate([build.group(0, 3, scores=(1.0,))], step=5, domains=("math",))
    assert batch.tokens.tolist() == [[5, 6, 7, 8]] and batch.mask.tolist() == [[False, False, True, True]]
    assert batch.versions.tolist() == [[-1, -1, 3, 3]] and batch.step == 5


def test_every_cell_is_what_a_loop_over_tokens_gives(build):
    groups = mixed_groups(build)
    batch = collate(groups, step=6, domains=("code", "math"))
    samples = [(g, s) for g in groups for s in g.samples]
    width = max(len(s.prompt_token_ids) + len(s.response_token_ids) for _, s in samples)
    assert batch.tokens.shape == batch.mask.shape == batch.versions.shape == (3, width)
    for row, (group, sample) in enumerate(samples):
        start, versions = len(sample.prompt_token_ids), [v for v, n in sample.version_runs for _ in range(n)]
        for t in range(width):
            i = t - start
            inside = 0 <= i < len(sample.response_token_ids)
            sampled = inside and sample.loss_mask[i] == 1
            token = sample.prompt_token_ids[t] if i < 0 else sample.response_token_ids[i] if inside else 0
            assert batch.tokens[row, t] == token
            assert batch.mask[row, t] == sampled
            assert batch.versions[row, t] == (versions[i] if sampled else -1)
            wanted = sample.behaviour_logprobs[i] if sampled else 0.0
            assert float(batch.behaviour_logprobs[row, t]) == pytest.approx(wanted)
        assert batch.lengths[row] == start + len(sample.response_token_ids) and batch.prompt_lengths[row] == start
        assert batch.scores[row] == sample.reward.score and batch.group_index[row] == group.group_id
        assert batch.domains[batch.domain_index[row]] == group.prompt.domain
    assert batch.baseline_scores.tolist() == [0.5, 0.5, 0.0]
    assert batch.response_lengths.tolist() == [2, 0, 1], "tool tokens are not generated"


def test_without_baselines_there_are_none(build):
    assert collate([build.group(0)], step=1, domains=("math",)).baseline_scores is None


def test_a_sample_without_a_reward_is_refused_by_name(build):
    with pytest.raises(ValueError, match="sample 0/1 has no reward"):
        collate([build.group(0, scores=(1.0, None))], step=1, domains=("math",))


def test_the_arrays_of_the_groups_are_not_changed_by_what_the_trainer_does(build):
    group = build.group(0)
    batch = collate([group], step=1, domains=("math",))
    batch.tokens.zero_()
    batch.behaviour_logprobs.zero_()
    assert group.samples[0].response_token_ids.tolist() == [7, 8]
    assert group.samples[0].behaviour_logprobs.tolist() == [-0.5, -0.5]


def test_rows_have_the_images_of_their_prompt(build):
    image = Image(data=b"a file", grid=(1, 2))
    seen, plain = replace(build.prompt(ids=(5, 6)), images=(image,)), build.prompt(ids=(1, 2))
    groups = [build.group(0, 0, prompt=plain, scores=(1.0,)), build.group(1, 0, prompt=seen, scores=(1.0, 0.0))]
    assert collate(groups, step=1, domains=(seen.domain,)).images == ((), (image,), (image,))
    assert collate(groups[:1], step=1, domains=(seen.domain,)).images == ()
