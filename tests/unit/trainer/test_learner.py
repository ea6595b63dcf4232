"""One training step on fake ranks: what reaches the loss, and what the step says about itself."""

import asyncio
import json
from array import array
from dataclasses import fields, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from roll_async.config.api import load
from roll_async.config.options.advantage_options import advantage_options_class
from roll_async.config.options.policy_loss_options import KlCovOptions
from roll_async.config.schema_algorithm import AlgorithmConfig, OverlongBufferConfig
from roll_async.observe.sample_dump import EVERY_GROUP
from roll_async.pipelines.metrics import sample_rows
from roll_async.schema import ExpertRecord, FinishReason, Image, Outcome, Reward
from roll_async.simulator.clock import VirtualLoop, run_virtual
from roll_async.trainer.learner import Learner, LearnerOptions
from roll_async.trainer.roles import LearnerParts

ALGORITHM = {field.name for field in fields(AlgorithmConfig)}
"""What the learner reads of the config's section as it is."""


class FakeScoring:
    """Log-probs `shift` above the recorded ones, which are -0.5 everywhere in the mask."""

    def __init__(self, log, name, shift=0.0, scored=None):
        self.log, self.name, self.shift = log, name, shift
        self.scored = [] if scored is None else scored

    async def compute_logprobs(self, rows):
        self.scored.append(rows)
        self.log.append((self.name, "logprobs" if rows.experts is None else "logprobs, replayed"))
        return torch.where(rows.mask, -0.5 + self.shift, 0.0)


class FakeActor(FakeScoring):
    def __init__(self, log, shift=0.0, scored=None):
        super().__init__(log, "actor", shift, scored)
        self.rows, self.rate = [], 1e-3

    async def compute_squares(self, rows):
        self.log.append(("actor", "squares"))
        return torch.where(rows.mask, 0.75, 0.0)

    async def update_policy(self, rows, step):
        self.log.append(("actor", f"update {step}"))
        self.rows.append(rows)
        entropies = None if rows.kept is None else torch.where(rows.mask & rows.kept[:, None], 1.5, torch.nan)
        return {"trainer/loss": 0.25, "trainer/learning_rate": self.rate}, entropies


class FakeCritic:
    def __init__(self, log, scored=None):
        self.log, self.rows = log, []
        self.scored = [] if scored is None else scored

    async def compute_values(self, rows):
        self.scored.append(rows)
        self.log.append(("critic", "values"))
        return torch.where(rows.mask, 0.5, 0.0)

    async def update_values(self, rows, step):
        self.log.append(("critic", f"update {step}"))
        self.rows.append(rows)
        return {"critic/loss": 0.5}


class Trial:
    """A learner over fakes."""

    def __init__(self, *, shift=0.0, reference=None, teacher=None, critic=False, **options):
        self.log, self.scored = [], []
        self.actor = FakeActor(self.log, shift, self.scored)
        self.critic = FakeCritic(self.log, self.scored) if critic else None
        parts = LearnerParts(
            actor=self.actor,
            reference=None if reference is None else FakeScoring(self.log, "reference", reference, self.scored),
            teachers={} if teacher is None else {"teacher": FakeScoring(self.log, "teacher", teacher, self.scored)},
            critic=self.critic,
        )
        algorithm = {name: options.pop(name) for name in ALGORITHM & options.keys()}
        algorithm.setdefault("proximal_logprobs", "recompute")
        estimator = advantage_options_class(algorithm.get("adv_estimator", "grpo"))
        algorithm["adv_options"] = estimator(**algorithm.get("adv_options", {}))
        values = {"domains": ("math", "code"), "response_length": 8, "algorithm": AlgorithmConfig(**algorithm)}
        values["teachers"] = () if teacher is None else ("teacher",)
        self.learner = Learner(parts, LearnerOptions(**{**values, **options}))

    def step(self, groups, step=1):
        self.report = asyncio.run(self.learner.learn(groups, step))
        return self.actor.rows[-1] if self.actor.rows else None


def of_lengths(build, *pairs):
    """One group of samples with the given (length, score)."""
    prompt = build.prompt()
    samples = tuple(build.sample(prompt, range(n), ((0, n),), score) for n, score in pairs)
    return [build.group(0, prompt=prompt, samples=samples)]


def test_a_step_scores_first_and_then_trains_on_the_whole_batch(build):
    trial = Trial(reference=0.0, kl_loss_coef=0.1)
    rows = trial.step([build.group(0), build.group(1, scores=(0.0, 1.0))], step=3)
    assert trial.log == [("actor", "logprobs"), ("reference", "logprobs"), ("actor", "update 3")]
    assert rows.tokens.shape == (4, 4) and rows.mask.sum() == 8 and rows.ref_logprobs is not None
    assert (trial.report.num_samples, trial.report.num_tokens) == (4, 16)
    assert trial.report.metrics["trainer/loss"] == 0.25


def test_the_seconds_in_which_no_rank_has_work_are_those_of_collation_and_advantages(build):
    """The calls of ranks take 0.2 and 0.4 s; what a step prepares before the second of them takes 0.3 s."""
    loop = VirtualLoop(threads_inline=True)

    class Slow(Learner):
        def _signal(self, *args):
            loop.spend(0.3)
            return super()._signal(*args)

    class SlowActor(FakeActor):
        async def compute_logprobs(self, rows):
            await asyncio.sleep(0.2)
            return await super().compute_logprobs(rows)

        async def update_policy(self, rows, step):
            await asyncio.sleep(0.4)
            return await super().update_policy(rows, step)

    learner = Slow(LearnerParts(actor=SlowActor([])), Trial().learner._options)
    report = run_virtual(learner.learn([build.group(0)], 1), loop)
    assert report.collation_s == pytest.approx(0.3)
    assert report.logprobs_s == pytest.approx(0.2) and report.train_s == pytest.approx(0.3 + 0.4)


class OfASecond:
    """Ranks whose every call takes a second."""

    def __init__(self, ranks):
        self._ranks = ranks

    def __getattr__(self, name):
        async def call(*args):
            await asyncio.sleep(1.0)
            return await getattr(self._ranks, name)(*args)

        return call


def step_of_all_roles(build, sharing, options):
    """(report of a step on the virtual clock, tensors that the actor trained on, calls in the order of their ends)."""
    trial = Trial(critic=True, adv_estimator="gae", kl_loss_coef=0.1, teacher=0.7, distill_coef=0.5, **options)
    parts = LearnerParts(
        actor=OfASecond(trial.actor),
        reference=OfASecond(FakeScoring(trial.log, "reference", 0.4)),
        teachers={"teacher": OfASecond(FakeScoring(trial.log, "teacher", 0.7))},
        critic=OfASecond(trial.critic),
        sharing=[frozenset(names.split()) for names in sharing],
    )
    learner = Learner(parts, trial.learner._options)
    report = run_virtual(learner.learn([build.group(0)], 1), VirtualLoop(threads_inline=True))
    told = [(f.name, getattr(rows, f.name)) for rows in trial.actor.rows for f in fields(rows)]
    return report, {name: x for name, x in told if isinstance(x, torch.Tensor)}, trial.log


@pytest.mark.parametrize(
    ("sharing", "options", "seconds"),
    [
        ((), {}, (1, 1, 0)),
        (["actor_train reference teacher critic"], {}, (4, 2, 0)),
        (["actor_train critic"], {}, (2, 2, 0)),
        (["reference critic teacher"], {}, (3, 1, 2)),
        (["actor_train reference", "critic teacher"], {}, (2, 1, 0)),
        ((), {"proximal_logprobs": "reuse", "mini_batch_rows": 2}, (1, 1, 1)),
        (["actor_train reference"], {"proximal_logprobs": "reuse", "mini_batch_rows": 2}, (1, 1, 0)),
        ((), {"critic_warmup": 1}, (1, 1, 1)),
        (["actor_train critic"], {"critic_warmup": 1}, (2, 1, 0)),
    ],
)
def test_roles_with_devices_of_their_own_work_side_by_side_and_those_that_share_some_in_turn(
    build, sharing, options, seconds
):
    """Seconds: of the scores, of the updates, and without a call on the actor's devices."""
    report, rows, log = step_of_all_roles(build, sharing, options)
    assert (report.logprobs_s, report.train_s, report.roles_s) == pytest.approx(seconds)
    expected, in_turn, calls = step_of_all_roles(build, ["actor_train reference teacher critic"], options)
    assert report.metrics == expected.metrics and sorted(log) == sorted(calls)
    assert rows.keys() == in_turn.keys() and all(torch.equal(rows[name], in_turn[name]) for name in rows)


def test_the_better_answer_of_a_group_is_pushed_up_and_the_other_down(build):
    rows = Trial().step([build.group(0, scores=(1.0, 0.0)), build.group(1, scores=(0.5, 0.5))])
    per_row = [rows.advantages[i][rows.mask[i]] for i in range(4)]
    assert (per_row[0] > 0).all() and (per_row[1] < 0).all()
    assert torch.allclose(per_row[0], -per_row[1]) and per_row[2].abs().max() == per_row[3].abs().max() == 0


def test_a_step_reports_the_advantages_that_it_trained_with_row_by_row(build):
    prompt = build.prompt(ids=(5, 6))
    called = build.sample(prompt, (7, 8, 9), ((0, 3),), 1.0, loss_mask=bytes((1, 0, 1)))
    trial = Trial(advantage_clip=0.25)
    rows = trial.step([build.group(0, prompt=prompt, samples=(called, build.sample(prompt, (7,), ((0, 1),), 0.0)))])
    found = [found.tolist() for found in trial.report.advantages]
    assert [len(row) for row in found] == [3, 1], "one for each token of a response"
    assert found == [rows.advantages[0, 2:5].tolist(), rows.advantages[1, 2:3].tolist()]
    assert (found[0][0], found[0][2], found[1][0]) == (0.25, 0.25, -0.25), "as the loss gets them"


def test_a_step_reports_the_log_probs_of_the_trainer_where_it_has_made_some(build):
    trial = Trial(shift=0.25)
    rows = trial.step(of_lengths(build, (3, 1.0), (1, 0.0)))
    found = [found.tolist() for found in trial.report.trainer_logprobs]
    assert found == [rows.proximal_logprobs[0, 2:5].tolist(), rows.proximal_logprobs[1, 2:3].tolist()]
    for source in ("reuse", "behaviour"):
        trial = Trial(proximal_logprobs=source, mini_batch_rows=2)
        trial.step(of_lengths(build, (3, 1.0), (1, 0.0)))
        assert trial.report.trainer_logprobs == ()


def test_a_step_asks_for_the_entropies_of_the_groups_whose_samples_are_kept(build):
    groups = [build.group(number, scores=scores) for number, scores in enumerate([(0.5, 0.0), (1.0, 0.5), (0.0, 0.25)])]
    for kept_groups, kept in ((2, [False, False, True, True, True, True]), (1 << 60, [True] * 6)):
        trial = Trial(kept_groups=kept_groups)
        assert trial.step(groups).kept.tolist() == kept
        asked = [row["entropies"] for row in sample_rows(groups, entropies=trial.report.entropies)]
        assert asked == [[1.5, 1.5] if one else None for one in kept]
        told = sample_rows(groups, entropies=trial.report.entropies, num_groups=kept_groups)
        assert all(row["entropies"] for row in told), "what is written has them"
    trial = Trial()
    assert trial.step(groups).kept is None and trial.report.entropies == ()


def test_the_number_of_kept_groups_is_that_of_the_folder_that_gets_the_most():
    config = Path(__file__).resolve().parents[3] / "configs" / "rlvr_config_async_cpu.yaml"
    for overrides, expected in (
        ([], 4),
        (["tracking.samples_per_step=0"], 0),
        (["tracking.samples_per_step=0", "tracking.rollout_dump_dir=dump"], EVERY_GROUP),
    ):
        assert LearnerOptions.of(load(config, overrides)).kept_groups == expected


def test_the_actor_replays_the_engines_experts_and_the_reference_does_not(build):
    prompt = build.prompt(ids=(5, 6))
    record = ExpertRecord(ids=array("B", [0, 1, 1, 2]), num_layers=1, top_k=2)
    group = build.group(
        prompt=prompt, samples=tuple(build.sample(prompt, (7,), experts=record, score=x) for x in (0.0, 1.0))
    )
    trial = Trial(reference=0.0, kl_loss_coef=0.1, router_replay=True)
    rows = trial.step([group])
    assert trial.log == [("actor", "logprobs, replayed"), ("reference", "logprobs"), ("actor", "update 1")]
    assert rows.experts.ids.tolist() == [[[0, 1]], [[1, 2]]] * 2
    assert Trial().step([group]).experts is None
    with pytest.raises(RuntimeError, match="no sample of the batch has a record of its experts"):
        trial.step([build.group(0)])


@pytest.mark.parametrize(
    ("mode", "calls"),
    [("recompute", ["logprobs", "update 1"]), ("behaviour", ["update 1"]), ("interpolate", ["update 1"])],
)
def test_the_proximal_logprobs_come_from_where_they_are_said_to(build, mode, calls):
    trial = Trial(shift=0.1, proximal_logprobs=mode)
    rows = trial.step([build.group(0)])
    assert [call for _, call in trial.log] == calls
    if mode == "interpolate":
        assert rows.proximal_logprobs is None and rows.correction_weights is None
    else:
        wanted = -0.4 if mode == "recompute" else -0.5
        assert rows.proximal_logprobs[rows.mask].tolist() == pytest.approx([wanted] * 4)


@pytest.mark.parametrize(("mini_batch_rows", "calls"), [(2, ["update 1"]), (1, ["logprobs", "update 1"])])
def test_the_steps_own_forward_is_the_proximal_policy_when_it_is_the_only_one(build, mini_batch_rows, calls):
    """Rows of trajectories vary in number: a batch of more mini-batches than one is scored first."""
    trial = Trial(shift=0.1, proximal_logprobs="reuse", mini_batch_rows=mini_batch_rows)
    rows = trial.step([build.group(0)])
    assert [call for _, call in trial.log] == calls
    reused = len(calls) == 1
    assert (rows.proximal_logprobs is None, rows.correction_weights is None) == (reused, reused)
    assert trial.report.metrics["trainer/proximal_reused"] == float(reused)
    assert ("correction/kl" in trial.report.metrics) is not reused, "the ranks measure what they correct"


@pytest.mark.parametrize(("shift", "weight"), [(0.0, 1.0), (0.2, 1.2214028), (3.0, 2.0)])
def test_the_correction_weighs_tokens_by_the_mismatch_and_truncates(build, shift, weight):
    rows = Trial(shift=shift).step([build.group(0)])
    assert rows.correction_weights[rows.mask].tolist() == pytest.approx([weight] * 4)


def test_a_correction_before_the_step_is_measured_on_rows_without_a_gradient_too(build):
    trial = Trial(shift=0.2)
    rows = trial.step([build.group(0, scores=(1.0, 0.0)), build.group(1, scores=(1.0, 1.0))])
    assert not rows.advantages[2:].any() and trial.report.metrics["correction/num_tokens"] == 8


def test_the_lag_of_a_token_counts_from_the_freshest_weights_of_the_step(build):
    prompt = build.prompt()
    mixed = build.sample(prompt, (7, 8, 9), ((2, 1), (3, 1), (4, 1)), 1.0)
    group = build.group(0, samples=(mixed, build.sample(prompt, (7, 8, 9), ((4, 3),), 0.0)), prompt=prompt)
    assert Trial().step([group], step=5).version_lag.tolist() == [[0, 0, 2, 1, 0], [0, 0, 0, 0, 0]]
    masked = Trial(mask_older_than=1)
    rows = masked.step([group], step=5)
    assert rows.mask.tolist() == [[False, False, False, True, True], [False, False, True, True, True]]
    assert masked.report.metrics["staleness/masked_fraction"] == pytest.approx(1 / 6)


def of_which_one_is_cut(build):
    """One group: answers of 8 tokens, whose tokens ran out, and of 3."""
    (group,) = of_lengths(build, (8, 0.0), (3, 1.0))
    return [replace(group, samples=(replace(group.samples[0], finish_reason=FinishReason.LENGTH), group.samples[1]))]


def test_answers_cut_at_the_length_limit_leave_the_loss_but_stay_in_the_baseline(build):
    trial = Trial(max_len_mask=True, response_length=9)
    rows = trial.step(of_which_one_is_cut(build))
    assert rows.mask.sum(-1).tolist() == [0, 3] and (rows.advantages[1][rows.mask[1]] > 0).all()
    assert trial.report.metrics["staleness/masked_fraction"] == pytest.approx(8 / 11)
    assert Trial(max_len_mask=True).step(of_lengths(build, (8, 0.0), (3, 1.0))).mask.sum() == 11, "both had ended"


def test_the_end_of_a_trajectory_says_for_all_of_its_rows_whether_it_was_cut(build):
    """a: in its last turn; b: in one after which it went on; c: before a turn that had no room."""
    prompt = build.prompt()
    ends = [("a", {}), ("a", {"finish_reason": FinishReason.LENGTH}), ("b", {"finish_reason": FinishReason.LENGTH}),
            ("b", {}), ("c", {"outcome": Outcome.TRUNCATED_TOKENS})]  # fmt: skip
    samples = tuple(build.sample(prompt, sample_id=str(i), trajectory=t, **end) for i, (t, end) in enumerate(ends))
    rows = Trial(max_len_mask=True).step([build.group(0, prompt=prompt, samples=samples)])
    assert rows.mask.any(-1).tolist() == [False, False, True, True, False]


def test_a_loss_that_selects_tokens_selects_among_those_it_trains(build):
    trial = Trial(max_len_mask=True, pg_variant="kl_cov", pg_options=KlCovOptions(cov_ratio=1.0))
    rows = trial.step(of_which_one_is_cut(build))
    assert torch.equal(rows.selection, rows.mask) and rows.mask.sum() == 3


def test_too_easy_and_too_hard_groups_leave_the_loss(build):
    groups = [build.group(0, scores=(1.0, 1.0)), build.group(1, scores=(1.0, 0.0)), build.group(2, scores=(0.0, 0.0))]
    rows = Trial(difficulty_low=0.1, difficulty_high=0.9).step(groups)
    assert rows.mask.any(-1).tolist() == [False, False, True, True, False, False]
    prompt = build.prompt()
    many = [build.sample(prompt, score=0.0, sample_id=f"a#{row}", trajectory="a") for row in range(3)]
    group = build.group(0, prompt=prompt, samples=(*many, build.sample(prompt, score=1.0)))
    assert Trial(difficulty_low=0.3).step([group]).mask.any(-1).all(), "each trajectory counts once"


def test_long_answers_are_punished_before_the_group_is_compared(build):
    trial = Trial(overlong_buffer=OverlongBufferConfig(enable=True, len=4))
    rows = trial.step(of_lengths(build, (4, 1.0), (8, 1.0)))
    assert (rows.advantages[0][rows.mask[0]] > 0).all() and (rows.advantages[1][rows.mask[1]] < 0).all()
    assert trial.report.metrics["reward/overlong_share"] == 0.5
    assert rows.scores.tolist() == [1.0, 1.0], "the loss that reads scores gets the raw ones"


def test_the_overlong_penalty_is_on_the_scale_of_the_shifted_reward(build):
    trial = Trial(
        overlong_buffer=OverlongBufferConfig(enable=True, len=4),
        reward_shift=-0.5,
        reward_scale=2.0,
        adv_estimator="reinforce",
    )
    rows = trial.step(of_lengths(build, (4, 1.0), (8, 1.0), (4, 0.0), (8, 0.0)))
    totals = [float(advantages[mask][0]) for advantages, mask in zip(rows.advantages, rows.mask, strict=True)]
    assert totals == [1.0, 0.0, -1.0, -2.0]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # scores 1 and 0 with a greedy answer of 0.5; scores 3 and 1 with one of 4
        ({}, [0.5, -0.5, -1.0, -3.0]),
        ({"reward_shift": -0.5, "reward_scale": 2.0}, [1.0, -1.0, -2.0, -6.0]),
        ({"reward_clip": 2.0}, [0.5, -0.5, 0.0, -1.0]),
        ({"reward_scale": 10.0, "reward_clip": 20.0}, [5.0, -5.0, 0.0, -10.0]),
        # A mean is taken from both alike and changes nothing, as long as it is that of the scores for both.
        ({"norm_mean_type": "group"}, [0.5, -0.5, -1.0, -3.0]),
        ({"norm_mean_type": "batch"}, [0.5, -0.5, -1.0, -3.0]),
        ({"norm_std_type": "group"}, [0.5 / 0.5**0.5, -0.5 / 0.5**0.5, -1.0 / 2**0.5, -3.0 / 2**0.5]),
        ({"norm_mean_type": "running", "norm_std_type": "running", "reward_scale": 4.0}, [0.5, -0.5, -1.0, -3.0]),
        # Minus the group's mean the scores are 0.5, -0.5 and 1, -1; the greedy answers 0 and 2, which is cut to 0.75.
        ({"norm_mean_type": "group", "reward_clip": 0.75}, [0.5, -0.5, 0.0, -1.5]),
        ({"advantage_clip": 0.75}, [0.5, -0.5, -0.75, -0.75]),
    ],
)
def test_a_greedy_baseline_is_subtracted_on_the_scale_of_the_shaped_scores(build, options, wanted):
    """remax: what the actor gets is shaped(score) - shaped(greedy score)."""
    groups = [
        replace(build.group(i, scores=scores), baseline_score=greedy)
        for i, (scores, greedy) in enumerate([((1.0, 0.0), 0.5), ((3.0, 1.0), 4.0)])
    ]
    rows = Trial(adv_estimator="remax", **options).step(groups)
    found = [sorted(set(a[mask].tolist())) for a, mask in zip(rows.advantages, rows.mask, strict=True)]
    assert all(len(of_row) == 1 for of_row in found), "one value for all tokens of a row"
    if options.get("norm_std_type") == "running":  # scores of 4, 0, 12 and 4, their unbiased deviation
        wanted = [4 * value / (((1 + 25 + 49 + 1) / 3) ** 0.5) for value in wanted]
    assert [of_row[0] for of_row in found] == pytest.approx(wanted, rel=1e-5)


def test_the_overlong_penalty_is_the_samples_own_and_leaves_the_greedy_baseline_alone(build):
    (group,) = of_lengths(build, (4, 1.0), (8, 1.0))
    trial = Trial(adv_estimator="remax", overlong_buffer=OverlongBufferConfig(enable=True, len=4), reward_scale=2.0)
    rows = trial.step([replace(group, baseline_score=0.5)])
    assert [float(a[mask][0]) for a, mask in zip(rows.advantages, rows.mask, strict=True)] == [1.0, 0.0]


def test_running_moments_and_the_kl_coefficient_survive_a_restart(build):
    options = {"norm_mean_type": "running", "norm_std_type": "running", "adv_estimator": "reinforce"}
    options |= {"token_kl_coef": 0.2, "target_kl": 0.1, "reference": 0.3}
    groups = [[build.group(i, scores=(float(i), 1.0))] for i in range(4)]
    whole, first, second = Trial(**options), Trial(**options), Trial(**options)
    for step, batch in enumerate(groups, 1):
        wanted = whole.step(batch, step)
    for step, batch in enumerate(groups[:2], 1):
        first.step(batch, step)
    assert first.learner.state.moments["math"].count == 4 and first.learner.state.moments["math"].mean == 0.75
    second.learner.restore_state(first.learner.export_state())
    for step, batch in enumerate(groups[2:], 3):
        found = second.step(batch, step)
    assert torch.equal(found.advantages, wanted.advantages)
    assert second.learner.state == whole.learner.state and whole.learner.state.token_kl_coef != 0.2


@pytest.mark.parametrize(("target", "before", "after"), [(None, 0.2, 0.5), (0.1, 0.2, 0.2), (0.1, 0.0, 0.5)])
def test_a_restart_keeps_a_kl_coefficient_that_was_adapted_and_takes_that_of_the_config_otherwise(
    target, before, after
):
    second = Trial(token_kl_coef=0.5, target_kl=target, reference=0.3)
    second.learner.restore_state(Trial(token_kl_coef=before).learner.export_state())
    assert second.learner.state.token_kl_coef == after


def reporting(build, *rows):
    """One group of samples with the given (score, reported numbers)."""
    prompt = build.prompt()
    samples = tuple(build.sample(prompt, reward=Reward(score=score, metrics=reported)) for score, reported in rows)
    return [build.group(0, prompt=prompt, samples=samples)]


def per_row(rows):
    return [float(a[mask][0]) for a, mask in zip(rows.advantages, rows.mask, strict=True)]


def test_gdpo_reads_the_shaped_score_and_the_numbers_the_reward_reports(build):
    groups = reporting(build, (1.0, {"format": 0.0}), (0.0, {"format": 3.0}), (0.0, {"format": 0.0}))
    options = {"adv_estimator": "gdpo", "adv_options": {"rewards": ("format", "score"), "weights": (2.0, 1.0)}}
    found = per_row(Trial(**options).step(groups))
    # Normalised: format -1 2 -1 and score 2 -1 -1, each over sqrt(3); weighted sums 0 3 -3 over sqrt(3).
    assert found == pytest.approx([0.0, 1.0, -1.0], abs=1e-5)
    with pytest.raises(ValueError, match="reports no 'speed'.*it reports format"):
        Trial(adv_estimator="gdpo", adv_options={"rewards": ("speed",)}).step(groups)


def test_rae_compares_with_the_average_of_the_role_and_goes_on_after_a_restart(build):
    options = {"adv_estimator": "rae", "adv_options": {"decay": 0.5}}
    first, white = Trial(**options), build.prompt(extra={"role": "white"})
    groups = [
        build.group(0, scores=(1.0, 0.0)),
        build.group(1, prompt=white, samples=(build.sample(white, score=4.0),)),
    ]
    assert per_row(first.step(groups)) == pytest.approx([0.5, -0.25, 2.0])
    assert first.learner.state.role_averages == {"math": 0.25, "math/white": 2.0}
    second = Trial(**options)
    second.learner.restore_state(json.loads(json.dumps(first.learner.export_state())))
    assert per_row(second.step([build.group(2, scores=(1.0,))], 2)) == pytest.approx([1 - 0.625])


def test_supervised_and_distilled_rows_ride_in_the_batch_and_touch_no_statistic_of_the_others(build):
    shown, imitated = build.prompt(domain="demos"), build.prompt(domain="imitate")
    given = build.sample(shown, (9, 9, 9), score=0.0, behaviour_logprobs=array("f", [0.0] * 3))
    others = [
        build.group(1, prompt=shown, samples=(given,)),
        build.group(2, prompt=imitated, samples=(build.sample(imitated, (8,), score=0.0),)),
    ]
    groups = [build.group(0, scores=(1.0, 0.0)), build.group(3, scores=(1.0, 1.0))]
    domains = ("math", "demos", "imitate")
    parts = {"demos": "cross_entropy", "imitate": "reference_kl"}
    for options in (
        {"adv_estimator": "lite_ppo"},
        {"whiten_advantages": True},
        {"adv_estimator": "reinforce_plus_plus"},
    ):
        alone = Trial(reference=0.0, kl_loss_coef=0.1, **options).step(groups)
        rows = Trial(reference=0.0, kl_loss_coef=0.1, domains=domains, loss_parts=parts, **options).step(
            [groups[0], *others, groups[1]]
        )
        policy = torch.tensor([0, 1, 4, 5])
        width = alone.tokens.shape[1]
        assert torch.equal(rows.advantages[policy, :width], alone.advantages)
        assert rows.mask.sum(-1).tolist() == [2, 2, 3, 1, 2, 2]
        assert rows.policy_mask.sum(-1).tolist() == [2, 2, 0, 0, 2, 2]
        assert rows.cross_entropy_mask.sum(-1).tolist() == [0, 0, 3, 0, 0, 0]
        assert rows.reference_kl_mask.sum(-1).tolist() == [0, 0, 0, 1, 0, 0]
        assert not rows.advantages[[2, 3]].any() and not rows.correction_weights[[2, 3]].any()
        assert alone.policy_mask is alone.cross_entropy_mask is alone.reference_kl_mask is None


def test_the_optimal_token_baseline_asks_the_actor_for_squares(build):
    trial = Trial(adv_estimator="optimal_token_baseline")
    rows = trial.step([build.group(0, scores=(1.0, 0.0))])
    assert trial.log == [("actor", "logprobs"), ("actor", "squares"), ("actor", "update 1")]
    assert per_row(rows) == pytest.approx([0.5, -0.5]), "equal weights: the plain mean"


def test_a_teacher_lifts_the_tokens_it_finds_more_likely(build):
    trial = Trial(teacher=0.3, distill_coef=2.0)
    rows = trial.step([build.group(0, scores=(0.5, 0.5))])
    assert ("teacher", "logprobs") in trial.log
    assert rows.advantages[rows.mask].tolist() == pytest.approx([0.6] * 4)


def test_with_a_critic_values_are_the_baseline_and_are_trained_too(build):
    trial = Trial(critic=True, adv_estimator="gae")
    trial.step([build.group(0, scores=(1.0, 0.0))])
    assert trial.log == [("actor", "logprobs"), ("critic", "values"), ("critic", "update 1"), ("actor", "update 1")]
    (values,) = trial.critic.rows
    assert values.old_values[values.mask].tolist() == [0.5] * 4
    advantages = trial.actor.rows[0].advantages
    assert torch.allclose(values.returns[values.mask], (advantages + values.old_values)[values.mask])
    assert trial.report.metrics["critic/loss"] == 0.5


def test_supervised_rows_have_no_value_to_learn_and_no_distance_from_the_reference_to_report(build):
    shown = build.prompt(domain="demos")
    given = build.group(1, prompt=shown, samples=(build.sample(shown, (9, 9, 9), score=0.0),))
    away = torch.tensor([[-0.1], [-0.1], [-9.0]])
    trial = Trial(critic=True, adv_estimator="gae", reference=away, token_kl_coef=0.1, domains=("math", "demos"),
                  loss_parts={"demos": "cross_entropy"})  # fmt: skip
    trial.step([build.group(0, scores=(1.0, 0.0)), given])
    assert trial.critic.rows[0].mask.sum(-1).tolist() == [2, 2, 0]
    assert trial.report.metrics["kl/reference"] == pytest.approx(0.1)


def test_supervised_rows_do_not_move_the_coefficient_that_follows_the_policy(build):
    def adapted(*groups):
        away = torch.full((sum(len(group.samples) for group in groups), 1), -9.0)
        trial = Trial(reference=away, token_kl_coef=0.1, target_kl=100.0, kl_horizon=100, domains=("math", "demos"),
                      loss_parts={"demos": "cross_entropy"})  # fmt: skip
        trial.step(list(groups))
        assert ("kl/reference" in trial.report.metrics) == (own in groups)
        return trial.learner.state.token_kl_coef

    own, shown = build.group(0, scores=(1.0, 0.0)), build.prompt(domain="demos")
    given = [build.sample(shown, (9, 9, 9), score=0.0, sample_id=str(i)) for i in range(20)]
    given = build.group(1, prompt=shown, samples=tuple(given))
    assert adapted(own, given) == adapted(own) < 0.1 == adapted(given)


def test_every_role_is_given_the_images_of_each_row(build):
    image = Image(data=b"a file", grid=(1, 2))
    seen = replace(build.prompt(ids=(5, 6)), images=(image,))
    groups = [build.group(0, prompt=seen, scores=(1.0, 0.0)), build.group(1, scores=(1.0, 0.0))]
    trial = Trial(critic=True, adv_estimator="gae", kl_loss_coef=0.1, reference=0.0, teacher=0.0, distill_coef=0.5)
    trial.step(groups)
    given = [*trial.scored, *trial.actor.rows, *trial.critic.rows]
    assert len(given) == 6 and {rows.images for rows in given} == {((image,), (image,), (), ())}


def test_while_the_critic_warms_up_the_actor_is_not_trained(build):
    trial = Trial(critic=True, adv_estimator="gae", critic_warmup=2, proximal_logprobs="reuse", mini_batch_rows=2)
    for step, reused in ((1, None), (2, None), (3, 1.0)):
        trial.step([build.group(0)], step)
        assert trial.report.metrics.get("trainer/proximal_reused") == reused, "no forward pass, no answer"
    assert [call for who, call in trial.log if who == "actor" and "update" in call] == ["update 3"]
    assert len(trial.critic.rows) == 3


def test_a_learning_rate_of_zero_is_an_alarm_of_every_step_and_said_once(build, caplog):
    trial = Trial()
    found = []
    for step, rate in ((1, 1e-9), (2, 0.0), (3, 0.0)):
        trial.actor.rate = rate
        trial.step([build.group(0)], step)
        found.append(trial.report.metrics["trainer/learning_rate_alarm"])
    assert found == [0, 1, 1]
    assert [r.message for r in caplog.records] == [
        "step 2: the learning rate of the trainer is 0, nothing is learned any more"
    ]


def test_an_unscored_sample_stops_the_step_before_any_call_to_a_rank(build):
    trial = Trial()
    with pytest.raises(ValueError, match="has no reward"):
        trial.step([build.group(0, scores=(1.0, None))])
    assert trial.log == []


def test_an_unknown_source_of_proximal_logprobs_is_named(build):
    with pytest.raises(ValueError, match="proximal_logprobs 'guess'"):
        Trial(proximal_logprobs="guess").step([build.group(0)])


def test_every_log_prob_is_of_the_policy_it_is_said_to_be_of(build):
    """Engine -0.5, trainer -0.3, reference -0.1, teacher +0.2: no two distances are equal."""
    options = {"adv_estimator": "reinforce", "kl_estimator": "k1", "token_kl_coef": 0.1, "kl_loss_coef": 0.1}
    trial = Trial(shift=0.2, reference=0.4, teacher=0.7, distill_coef=1.0, **options)
    rows = trial.step([build.group(0, scores=(1.0, 0.0))])
    prompt = int(rows.lengths[0]) - 2
    for name, value in (("behaviour_logprobs", -0.5), ("proximal_logprobs", -0.3), ("ref_logprobs", -0.1)):
        assert getattr(rows, name)[0, prompt:].tolist() == pytest.approx([value] * 2), name
    # By hand: 0.1 * 0.2 per token for being below the reference, and 0.5 for being below the teacher.
    for row, score in ((0, 1.0), (1, 0.0)):
        assert rows.advantages[row, prompt:].tolist() == pytest.approx([score + 0.04 + 0.5, score + 0.02 + 0.5])
    assert trial.report.metrics["kl/reference"] == pytest.approx(-0.2)
