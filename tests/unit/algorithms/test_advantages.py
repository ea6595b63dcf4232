"""Every estimator against a loop over Python floats, and what holds for all of them."""

import dataclasses
import math
import statistics

import pytest
import torch

from roll_async.algorithms.advantages import ADVANTAGES, AdvantageInputs

CASES = [
    ("grpo", {}), ("grpo", {"normalise_std": False}), ("grpo", {"epsilon": 0.1}), ("dr_grpo", {}), ("rloo", {}),
    ("opo", {}), ("maxrl", {}), ("gdpo", {}), ("gdpo", {"rewards": ("a", "b"), "weights": (0.3, 2.0), "epsilon": 0.1}),
    ("rae", {}), ("optimal_token_baseline", {}), ("optimal_token_baseline", {"zero_tail": True}),
    ("gpg", {}), ("gpg", {"normalise_std": True}), ("grpo_passk", {}), ("grpo_passk", {"normalise_std": False}),
    ("lite_ppo", {}), ("reinforce", {}), ("reinforce", {"gamma": 0.7}), ("reinforce_plus_plus", {"gamma": 0.9}),
    ("reinforce_plus_plus_baseline", {}), ("remax", {}), ("gae", {}), ("gae", {"gamma": 0.8, "lam": 0.5}),
    ("agentic_reinforce", {}), ("agentic_reinforce", {"gamma": 0.6}), ("step_reinforce", {}),
    ("step_reinforce", {"mean": "group", "std": "none"}), ("step_reinforce", {"mean": "none", "std": "group"}),
    ("gigpo", {}), ("gigpo", {"normalise_std": False, "episode_reward_weight": 0.4, "step_reward_gamma": 0.5}),
]  # fmt: skip
IDS = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options in CASES]
ROW_FIELDS = [f.name for f in dataclasses.fields(AdvantageInputs)]


def make(seed, poison, rows=9, length=5, token_rewards=False, padding=True):
    """Groups in any order, an empty row, a padding row full of NaN, holes in the rows, several steps per trajectory."""
    g = torch.Generator().manual_seed(seed)

    def integers(high, size=(rows,)):
        return torch.randint(0, high, size, generator=g)

    mask = torch.rand(rows, length, generator=g) < 0.7
    mask[int(integers(rows, ()))] = False
    row_mask = torch.ones(rows).bool()
    row_mask[-1] = not padding
    valid = mask & row_mask[:, None]
    trajectory = integers(4)
    group = trajectory % 2 * 40 - 7  # a trajectory lies in one group
    step = torch.randperm(rows, generator=g)
    numbers, rewards = (torch.randn(rows, length, generator=g, dtype=torch.float64) for _ in range(2))
    scores = torch.where(row_mask, integers(3).double() / 3, torch.nan)
    return AdvantageInputs(
        scores=scores, mask=mask, group_index=group, row_mask=row_mask,
        token_rewards=poison(rewards, valid) if token_rewards else None,
        values=poison(numbers, valid), baseline_scores=torch.where(row_mask, integers(2).double(), torch.nan),
        segment_ids=torch.where(mask, integers(3, (rows, length)) * 50, -1), trajectory_index=trajectory,
        step_index=step,
        step_rewards=torch.where(row_mask, integers(4).double() / 4, torch.nan), state_index=integers(2),
        reward_parts=torch.where(row_mask[:, None], integers(3, (rows, 2)).double() / 2, torch.nan),
        role_baselines=torch.where(row_mask, integers(5).double() / 4, torch.nan),
        logprobs=poison(-numbers.abs(), valid), squares=poison(torch.exp(-numbers.abs()) ** 2 + 0.01, valid),
    )  # fmt: skip


class SlowAdvantage:
    def __init__(self, inputs, options):
        self.x, self.o = inputs, options
        self.rows = [b for b in range(len(inputs.mask)) if inputs.row_mask is None or inputs.row_mask[b]]
        self.valid = {b: [t for t, m in enumerate(inputs.mask[b].tolist()) if m] for b in self.rows}
        self.rewards = {b: self.reward_of_row(b) for b in self.rows}
        given = inputs.token_rewards is None
        self.score = {b: float(inputs.scores[b]) if given else math.fsum(self.rewards[b].values()) for b in self.rows}

    def reward_of_row(self, b):
        if self.x.token_rewards is not None:
            return {t: float(self.x.token_rewards[b, t]) for t in self.valid[b]}
        return {t: float(self.x.scores[b]) if t == self.valid[b][-1] else 0.0 for t in self.valid[b]}

    def peers(self, b):
        return [c for c in self.rows if self.x.group_index[c] == self.x.group_index[b]]

    def relative(self, value, members, values, normalise=True, epsilon=1e-6):
        if len(set(values)) == 1:
            return 0.0
        centred = value - sum(values) / len(members)
        return centred / (statistics.stdev(values) + epsilon) if normalise else centred

    def group_relative(self, b, normalise=True):
        members = self.peers(b)
        epsilon = self.o.get("epsilon", 1e-6)
        return self.relative(self.score[b], members, [self.score[c] for c in members], normalise, epsilon)

    def equal(self, b):
        return len({self.score[c] for c in self.peers(b)}) == 1

    def to_go(self, b, gamma):
        returns, running = {}, 0.0
        for t in reversed(self.valid[b]):
            running = self.rewards[b][t] + gamma * running
            returns[t] = running
        return returns

    def spread(self, per_row):
        return {(b, t): per_row[b] for b in self.rows for t in self.valid[b]}

    def whitened(self, per_token):
        values = list(per_token.values())
        mean, variance = sum(values) / len(values), statistics.variance(values)
        return {k: (v - mean) / math.sqrt(variance + 1e-8) for k, v in per_token.items()}

    def row_estimate(self, name, b):
        """Advantage of a row, for the estimators that give all its tokens the same."""
        score, peers = self.score[b], self.peers(b)
        normalise = self.o.get("normalise_std", name != "gpg")
        match name:
            case "grpo":
                return self.group_relative(b, normalise)
            case "dr_grpo" | "reinforce_plus_plus_baseline":
                return self.group_relative(b, False)
            case "rloo":
                others = [self.score[c] for c in peers if c != b]
                return 0.0 if self.equal(b) else score - sum(others) / len(others)
            case "opo":
                lengths = {c: len(self.valid[c]) for c in peers}
                baseline = sum(lengths[c] * self.score[c] for c in peers) / max(1, sum(lengths.values()))
                return 0.0 if self.equal(b) else score - baseline
            case "maxrl":
                mean = sum(self.score[c] for c in peers) / len(peers)
                return self.group_relative(b, False) / mean if mean > 0 else 0.0
            case "gpg":
                informative = sum(not self.equal(c) for c in self.rows)
                alpha = len(self.rows) / informative if informative else 1.0
                return alpha * self.group_relative(b, normalise)
            case "grpo_passk":
                ordered = sorted((self.score[c] for c in peers), reverse=True)
                if len(peers) < 2 or score < ordered[0] or ordered[0] == ordered[1]:
                    return 0.0
                gap = ordered[0] - ordered[1]
                return gap / (statistics.stdev(ordered) + 1e-6) if normalise else gap
            case "gdpo":
                return self.decoupled(b)
            case "rae":
                return score - float(self.x.role_baselines[b])
            case "lite_ppo":
                everything = list(self.score.values())
                if len(set(everything)) == 1:
                    return 0.0
                return self.group_relative(b, False) / (statistics.stdev(everything) + 1e-6)

    def decoupled(self, b):
        """A reward after the other, each in its group; then over the batch, mean and all, as the paper writes it."""
        weights, epsilon, sums = self.o.get("weights", (1.0, 1.0)), self.o.get("epsilon", 1e-6), {}
        for c in self.rows:
            parts = [[float(self.x.reward_parts[d, k]) for d in self.peers(c)] for k in (0, 1)]
            own = [float(self.x.reward_parts[c, k]) for k in (0, 1)]
            sums[c] = sum(
                w * self.relative(r, p, p, True, epsilon) for w, r, p in zip(weights, own, parts, strict=True)
            )
        if len(set(sums.values())) == 1:
            return 0.0
        return (sums[b] - statistics.mean(sums.values())) / (statistics.stdev(sums.values()) + epsilon)

    def token_baselines(self):
        returns, weights, result = {}, {}, {}
        for b in self.rows:
            spent = 0.0
            for place, t in enumerate(self.valid[b]):
                spent += 1 - 2 * math.exp(float(self.x.logprobs[b, t])) + float(self.x.squares[b, t])
                returns[b, place] = math.fsum(self.rewards[b][s] for s in self.valid[b][place:])
                weights[b, place] = spent
        for b in self.rows:
            for place, t in enumerate(self.valid[b]):
                there = [c for c in self.peers(b) if place < len(self.valid[c])]
                baseline = sum(weights[c, place] * returns[c, place] for c in there)
                baseline /= sum(weights[c, place] for c in there)
                alone = len(there) == 1 and sum(bool(self.valid[c]) for c in self.peers(b)) > 1
                result[b, t] = returns[b, place] - (0.0 if alone and self.o.get("zero_tail") else baseline)
        return result

    def gae(self, gamma, lam):
        advantages, returns = {}, {}
        for b in self.rows:
            following, following_value = 0.0, 0.0
            for t in reversed(self.valid[b]):
                value = float(self.x.values[b, t])
                following = self.rewards[b][t] + gamma * following_value - value + gamma * lam * following
                following_value = value
                advantages[b, t], returns[b, t] = following, following + value
        return advantages, returns

    def turns(self, gamma):
        result = {}
        for b in self.rows:
            ids, running = [int(self.x.segment_ids[b, t]) for t in self.valid[b]], 0.0
            for k in sorted(set(ids), reverse=True):
                members = [t for t, i in zip(self.valid[b], ids, strict=True) if i == k]
                running = math.fsum(self.rewards[b][t] for t in members) + gamma * running
                result |= {(b, t): running for t in members}
        return result

    def step_returns(self):
        gamma, result = self.o.get("step_reward_gamma", 0.95), {}
        for b in self.rows:
            later = sorted(
                (int(self.x.step_index[c]), c)
                for c in self.rows
                if self.x.trajectory_index[c] == self.x.trajectory_index[b]
            )
            rest = [float(self.x.step_rewards[c]) for s, c in later if s >= int(self.x.step_index[b])]
            result[b] = sum(gamma**i * r for i, r in enumerate(rest))
        return result

    def normalised(self, values, mean, std):
        result = {}
        for b in self.rows:
            pools = {"batch": list(values.values()), "group": [values[c] for c in self.peers(b)], "none": None}
            x = values[b]
            if pools[mean]:
                x = 0.0 if len(set(pools[mean])) == 1 else x - sum(pools[mean]) / len(pools[mean])
            if pools[std] and len(set(pools[std])) > 1:
                x /= statistics.stdev(pools[std]) + 1e-6
            result[b] = x
        return result

    def first_step(self, b):
        mates = [c for c in self.rows if self.x.trajectory_index[c] == self.x.trajectory_index[b]]
        return min(mates, key=lambda c: int(self.x.step_index[c]))

    def gigpo(self, returns):
        result, normalise = {}, self.o.get("normalise_std", True)
        for b in self.rows:
            firsts = sorted({self.first_step(c) for c in self.peers(b)})
            scores = {c: float(self.x.scores[c]) for c in firsts}  # also when token rewards are given
            episode = self.relative(scores[self.first_step(b)], firsts, list(scores.values()), normalise)
            anchors = [c for c in self.peers(b) if self.x.state_index[c] == self.x.state_index[b]]
            step = self.relative(returns[b], anchors, [returns[c] for c in anchors], normalise)
            result[b] = self.o.get("episode_reward_weight", 1.0) * episode + step
        return result

    def estimate(self, name):
        gamma = self.o.get("gamma", 1.0)
        to_go = {(b, t): g for b in self.rows for t, g in self.to_go(b, gamma).items()}
        match name:
            case "reinforce":
                return to_go, to_go
            case "reinforce_plus_plus":
                return self.whitened(to_go), to_go
            case "remax":
                return {(b, t): g - float(self.x.baseline_scores[b]) for (b, t), g in to_go.items()}, to_go
            case "optimal_token_baseline":
                return self.token_baselines(), to_go
            case "gae":
                return self.gae(gamma, self.o.get("lam", 0.95))
            case "agentic_reinforce":
                turns = self.turns(gamma)
                return turns, turns
            case "step_reinforce":
                returns = self.step_returns()
                normed = self.normalised(returns, self.o.get("mean", "batch"), self.o.get("std", "batch"))
                return self.spread(normed), self.spread(returns)
            case "gigpo":
                returns = self.step_returns()
                return self.spread(self.gigpo(returns)), self.spread(returns)
        rows = self.spread({b: self.row_estimate(name, b) for b in self.rows})
        return self.whitened(rows) if name == "reinforce_plus_plus_baseline" else rows, self.spread(self.score)


def dense(per_token, mask):
    result = torch.zeros(mask.shape, dtype=torch.float64)
    for (b, t), value in per_token.items():
        result[b, t] = value
    return result


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("token_rewards", [False, True], ids=["scores", "token-rewards"])
def test_estimators_match_a_loop(name, options, token_rewards, poisoned):
    for seed in range(6):
        inputs = make(seed, poisoned, token_rewards=token_rewards)
        advantages, returns = ADVANTAGES[name](inputs, **options)
        expected = SlowAdvantage(inputs, options).estimate(name)
        for actual, slow in zip((advantages, returns), expected, strict=True):
            torch.testing.assert_close(actual, dense(slow, inputs.mask), rtol=1e-9, atol=1e-11)


def changed(inputs, change):
    return dataclasses.replace(inputs, **{f: change(v) for f in ROW_FIELDS if (v := getattr(inputs, f)) is not None})


@pytest.mark.parametrize("name", ADVANTAGES)
def test_row_order_does_not_matter(name, poisoned):
    inputs = make(11, poisoned)
    order = torch.randperm(len(inputs.scores), generator=torch.Generator().manual_seed(1))
    before, after = ADVANTAGES[name](inputs), ADVANTAGES[name](changed(inputs, lambda x: x[order]))
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(b, a[order], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_padding_rows_and_columns_do_not_matter(name, poisoned):
    inputs = make(12, poisoned, padding=False)
    rows, width = inputs.mask.shape

    def pad(x):
        fill = torch.nan if x.is_floating_point() else 0
        wide = torch.nn.functional.pad(x, (2, 1), value=fill) if x.shape[1:] == (width,) else x
        return torch.cat([wide, torch.full((2, *wide.shape[1:]), fill).to(wide.dtype)])

    for a, b in zip(ADVANTAGES[name](inputs), ADVANTAGES[name](changed(inputs, pad)), strict=True):
        torch.testing.assert_close(b[:rows, 2 : 2 + width], a, rtol=1e-12, atol=1e-13)
        assert float(b.abs().sum()) == pytest.approx(float(a.abs().sum()))


RELATIVE = ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "gpg", "grpo_passk", "lite_ppo"]
RELATIVE += ["reinforce_plus_plus_baseline", "gdpo", "optimal_token_baseline"]


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("groups", [[4, 4, 4, 4, 4, 4, 4], list(range(7))], ids=["all-equal", "single-members"])
def test_no_relative_information_gives_exactly_zero(name, groups):
    # The float32 mean of seven 0.1s is not 0.1: a division by that rounding error would train on nothing.
    scores = torch.full((7,), 0.1) if len(set(groups)) == 1 else torch.rand(7)
    inputs = AdvantageInputs(
        scores=scores, mask=torch.ones(7, 3).bool(), group_index=torch.tensor(groups),
        reward_parts=scores[:, None].expand(7, 2), logprobs=-torch.rand(7, 3), squares=torch.rand(7, 3),
    )  # fmt: skip
    advantages, _ = ADVANTAGES[name](inputs)
    assert torch.equal(advantages, torch.zeros(7, 3))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("shape", [(4, 3), (0, 3), (3, 0)], ids=["all-masked", "no-rows", "no-tokens"])
def test_nothing_valid_gives_zeros(name, shape):
    rows = shape[0]
    index, ones = torch.zeros(rows).long(), torch.ones(rows)
    inputs = AdvantageInputs(
        scores=ones, mask=torch.zeros(shape).bool(), group_index=index, values=torch.full(shape, torch.nan),
        baseline_scores=ones, trajectory_index=torch.arange(rows), step_index=index, step_rewards=ones,
        state_index=index, reward_parts=ones[:, None], role_baselines=ones, logprobs=torch.full(shape, torch.nan),
        squares=torch.full(shape, torch.nan),
    )  # fmt: skip
    for result in ADVANTAGES[name](inputs):
        assert torch.equal(result, torch.zeros(shape))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_constants_of_the_widest_input(name, poisoned):
    inputs = make(3, poisoned)
    single = changed(inputs, lambda x: x.float() if x.is_floating_point() else x)
    half = changed(inputs, lambda x: x.bfloat16() if x.is_floating_point() else x)
    leaves = changed(inputs, lambda x: x.clone().requires_grad_() if x.is_floating_point() else x)
    for given, dtype in (
        (inputs, torch.float64),
        (single, torch.float32),
        (half, torch.float32),
        (leaves, torch.float64),
    ):
        for result in ADVANTAGES[name](given):
            assert result.dtype == dtype and not result.requires_grad


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("remax", "baseline_scores"), ("gae", "values"), ("gdpo", "reward_parts"), ("rae", "role_baselines"),
        ("optimal_token_baseline", "logprobs"), ("optimal_token_baseline", "squares"),
        *[("step_reinforce", f) for f in ("trajectory_index", "step_index", "step_rewards")],
        *[("gigpo", f) for f in ("trajectory_index", "step_index", "step_rewards", "state_index")],
    ],
)  # fmt: skip
def test_a_missing_field_is_named(name, field, poisoned):
    with pytest.raises(ValueError, match=field):
        ADVANTAGES[name](dataclasses.replace(make(0, poisoned), **{field: None}))


def test_turns_default_to_runs_of_the_mask():
    mask = torch.tensor([[1, 1, 0, 1, 0, 1]]).bool()
    rewards = torch.tensor([[1.0, 2, torch.nan, 4, torch.nan, 8]])
    inputs = AdvantageInputs(scores=torch.zeros(1), mask=mask, group_index=torch.zeros(1).long(), token_rewards=rewards)
    advantages, _ = ADVANTAGES["agentic_reinforce"](inputs, gamma=0.5)
    assert advantages.tolist() == [[7.0, 7.0, 0.0, 8.0, 0.0, 8.0]]


def test_bad_choices(poisoned):
    with pytest.raises(ValueError, match=r"none \| batch \| group"):
        ADVANTAGES["step_reinforce"](make(0, poisoned), mean="running")
    with pytest.raises(ValueError, match="bool"):
        AdvantageInputs(scores=torch.ones(1), mask=torch.ones(1, 1), group_index=torch.zeros(1).long())


def test_gdpo_keeps_apart_what_the_sum_of_rewards_makes_equal():
    # The paper's example: an answer that earns one of two rewards and one that earns both, each against one that earns
    # none, have the same advantage once their rewards are summed.
    def estimate(parts):
        parts = torch.tensor(parts, dtype=torch.float64)
        inputs = AdvantageInputs(
            scores=parts.sum(-1), mask=torch.ones(len(parts), 1).bool(), group_index=torch.tensor([0, 0, 1, 1]),
            reward_parts=parts,
        )  # fmt: skip
        return [ADVANTAGES[name](inputs)[0][:, 0] for name in ("gdpo", "grpo")]

    decoupled, summed = estimate([[0, 0], [0, 1], [0, 0], [1, 1]])
    assert decoupled[3] == pytest.approx(2 * decoupled[1]) and summed[3] == pytest.approx(summed[1])
    with pytest.raises(ValueError, match="weights"):
        ADVANTAGES["gdpo"](make(0, lambda x, _: x), rewards=("a",), weights=(1.0, 2.0))


def test_a_group_with_the_optimal_token_baseline_has_the_least_variance_of_all_baselines():
    # One token each; the gradient of token i is g_i (R_i - b): the b that makes sum g_i^2 (R_i - b)^2 least.
    probability = torch.tensor([[0.9], [0.4], [0.1]], dtype=torch.float64)
    squares, scores = probability**2 + (1 - probability) ** 2, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    inputs = AdvantageInputs(
        scores=scores, mask=torch.ones(3, 1).bool(), group_index=torch.zeros(3).long(), logprobs=probability.log(),
        squares=squares,
    )  # fmt: skip
    advantages, _ = ADVANTAGES["optimal_token_baseline"](inputs)
    norms = (1 - 2 * probability + squares)[:, 0]
    found = float(scores[0] - advantages[0, 0])
    grid = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    best = grid[(norms * (scores - grid[:, None]) ** 2).sum(-1).argmin()]
    assert found == pytest.approx(float(best), abs=1e-5)


def test_estimators_match_a_loop_on_drawn_batches(poisoned):
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
    @hypothesis.given(
        st.sampled_from(CASES), st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 6), st.booleans()
    )
    def search(case, seed, rows, length, token_rewards):
        name, options = case
        inputs = make(seed, poisoned, rows, length, token_rewards)
        hypothesis.assume(int((inputs.mask & inputs.row_mask[:, None]).sum()) >= 2)
        for actual, slow in zip(
            ADVANTAGES[name](inputs, **options), SlowAdvantage(inputs, options).estimate(name), strict=True
        ):
            torch.testing.assert_close(actual, dense(slow, inputs.mask), rtol=1e-6, atol=1e-8)

    search()
