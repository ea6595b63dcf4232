"""Several teachers: each scores its own rows, and a row is distilled from its own teacher."""

import asyncio
import random
from array import array
from dataclasses import replace

import pytest
import torch

from roll_async.config.options.advantage_options import advantage_options_class
from roll_async.config.schema_algorithm import AlgorithmConfig
from roll_async.schema import TrainBatch
from roll_async.trainer.collate import collate
from roll_async.trainer.distillation import merged_logprobs, taught_by, teacher_metrics
from roll_async.trainer.learner import Learner, LearnerOptions
from roll_async.trainer.roles import LearnerParts

NAMES = ("maths", "code", "far")


class Ranks:
    """Scores that tell who gave them: -token / `divisor`. Notes the rows it was given."""

    def __init__(self, divisor):
        self.divisor, self.rows = divisor, []

    async def compute_logprobs(self, rows):
        self.rows.append(rows)
        return torch.where(rows.mask, -rows.tokens / self.divisor, 0.0)


class Actor:
    rows = None

    async def update_policy(self, rows, step):
        self.rows = rows
        return {}, None


def batch_of(build, seed):
    """Rows of the three teachers and of none, of any lengths, in any order; those of `far` came with log-probs."""
    draw, groups = random.Random(seed), []
    for number in range(draw.randint(2, 6)):
        name = draw.choice(NAMES)
        domain = draw.choice(["math", "demos"])
        prompt = build.prompt(
            row_id=str(number), ids=range(1, 1 + draw.randint(1, 4)), domain=domain, extra={"teacher": name}
        )
        samples = []
        for _ in range(2):
            n = draw.randint(1, 5)
            came = array("f", [-0.25 * (i + 1) for i in range(n)]) if name == "far" and domain == "math" else None
            ids = [draw.randint(5, 90) for _ in range(n)]
            mask = bytes([1, *(draw.randint(0, 1) for _ in range(n - 1))])
            samples.append(build.sample(prompt, ids, ((0, n),), draw.random(), loss_mask=mask, teacher_logprobs=came))
        groups.append(build.group(number, prompt=prompt, samples=tuple(samples)))
    return groups, collate(groups, step=1, domains=("math", "demos"), unscored={"demos"}, teachers=NAMES)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_has_the_log_prob_of_its_rows_own_teacher(build, seed):
    groups, batch = batch_of(build, seed)
    divisors = {"maths": 10.0, "code": 1000.0}
    scored = []
    for name, divisor in divisors.items():
        own = taught_by(batch, name)
        scored.append((own, torch.where(batch.mask[own], -batch.tokens[own] / divisor, 0.0)))
    merged = merged_logprobs(batch, scored)
    distance = torch.where(batch.mask, batch.behaviour_logprobs - merged, 0.0)
    policy = batch.mask & torch.tensor([bool(name) for name in batch.teachers])[:, None]
    metrics = teacher_metrics(batch, distance, policy, NAMES)
    # The slow reference: one token after another.
    sums, counts, row = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0), 0
    for group in groups:
        for sample in group.samples:
            start, name = len(sample.prompt_token_ids), group.prompt.extra["teacher"]
            for place in range(batch.tokens.shape[1]):
                i = place - start
                expected = 0.0
                if 0 <= i < len(sample.loss_mask) and sample.loss_mask[i] and group.prompt.domain == "math":
                    token = sample.response_token_ids[i]
                    expected = sample.teacher_logprobs[i] if name == "far" else -token / divisors[name]
                    sums[name] += sample.behaviour_logprobs[i] - expected
                    counts[name] += 1
                assert float(merged[row, place]) == pytest.approx(expected, rel=1e-6), (row, place)
            row += 1
    total = max(1, sum(counts.values()))
    for name in NAMES:
        assert metrics[f"distill/{name}/token_share"] == pytest.approx(counts[name] / total)
        assert metrics.get(f"distill/{name}/kl") == (
            pytest.approx(sums[name] / counts[name], rel=1e-5) if counts[name] else None
        )


def learner_of(**parts):
    actor = Actor()
    plain = advantage_options_class("reinforce")()
    algorithm = AlgorithmConfig(
        adv_estimator="reinforce", adv_options=plain, distill_coef=2.0, proximal_logprobs="behaviour"
    )
    options = LearnerOptions(
        algorithm=algorithm, domains=("math", "demos"), loss_parts={"demos": "cross_entropy"}, response_length=8,
        teachers=NAMES,
    )  # fmt: skip
    return actor, Learner(LearnerParts(actor=actor, teachers=parts), options)


def test_ranks_score_their_own_rows_alone_and_a_teacher_without_rows_is_not_asked(build):
    def group(number, name, score=0.0, domain="math", **fields):
        prompt = build.prompt(row_id=name, domain=domain, extra={"teacher": name})
        return build.group(number, prompt=prompt, samples=(build.sample(prompt, (7, 8), score=score, **fields),))

    maths, code = Ranks(10.0), Ranks(1000.0)
    actor, learner = learner_of(**{"teachers.maths": maths, "teachers.code": code})
    rows = [
        group(0, "maths"),
        group(1, "far", teacher_logprobs=array("f", [-1.5, -2.5])),
        group(2, "code", domain="demos"),
    ]
    report = asyncio.run(learner.learn([*rows, group(3, "maths", score=1.0)], 1))
    (asked,) = maths.rows
    assert asked.tokens.tolist() == [[5, 6, 7, 8]] * 2 and asked.lengths.tolist() == [4, 4]
    assert code.rows == [], "its one row feeds the cross-entropy"
    found = [actor.rows.advantages[i, 2:].tolist() for i in (0, 1, 3)]
    # By hand: 2 * (teacher + 0.5) per token, and the score of the last row.
    assert found[0] == pytest.approx([-0.4, -0.6])
    assert found[1] == pytest.approx([-2.0, -4.0])
    assert found[2] == pytest.approx([0.6, 0.4])
    shares = {name: report.metrics[f"distill/{name}/token_share"] for name in NAMES}
    assert shares == pytest.approx({"maths": 2 / 3, "code": 0.0, "far": 1 / 3})
    assert report.metrics["distill/far/kl"] == pytest.approx(1.5) and "distill/code/kl" not in report.metrics


def test_a_row_of_a_ledger_without_its_teacher_is_refused_with_the_remedy(build):
    prompt = build.prompt(extra={"teacher": "far"})
    group = build.group(0, prompt=prompt, samples=(build.sample(prompt),))
    actor, learner = learner_of()
    with pytest.raises(
        RuntimeError, match="1 rows have no log-probs of their teacher far; if the ledger is that of a run"
    ):
        asyncio.run(learner.learn([group], 1))
    assert actor.rows is None


def test_log_probs_of_ranks_that_are_not_finite_are_not_blamed_on_the_ledger(build):
    groups, batch = batch_of(build, 0)
    batch = replace(batch, teachers=("maths",) * len(batch.teachers))
    everything = taught_by(batch, "maths")
    assert isinstance(batch, TrainBatch) and len(groups) * 2 == len(everything)
    assert merged_logprobs(batch, [(everything, torch.full(batch.mask.shape, torch.nan))]).isnan().any()
