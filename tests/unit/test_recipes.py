"""examples/my_project, a user's own code, in a folder outside the checkout."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from roll_async.agents.protocol import is_agent
from roll_async.algorithms.advantages import AdvantageInputs, estimator_function
from roll_async.algorithms.own_code import unusable_code
from roll_async.algorithms.policy_losses import PolicyLossInputs, policy_loss_function
from roll_async.config.api import ConfigError, load
from roll_async.config.user_code import search_beside
from roll_async.config.yaml.emit import dump
from roll_async.envs.registry import WorldSpec, build
from roll_async.launch.agents import check_agents
from roll_async.launch.checks.gate import check_supported, require_inputs
from roll_async.rewards.registry import create_reward

ROOT = Path(__file__).resolve().parents[2]
RLVR = "rlvr_config_async_cpu"
PROJECT = ROOT / "examples" / "my_project"
ANSWERS, WORLDS = (yaml.safe_load((PROJECT / name).read_text()) for name in ("answers.yaml", "worlds.yaml"))
OWN = ANSWERS["algorithm"]
LOSS = {key: value for key, value in OWN.items() if key.startswith("pg_")}


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """A config of the user's own with these lines, beside the files of the recipes; its path."""
    for path in PROJECT.glob("*.*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)

    def write(shipped, *recipes):
        config = {"defaults": [shipped]}
        for recipe in recipes:
            config |= recipe
        path = tmp_path / "my.yaml"
        path.write_text(yaml.safe_dump(config))
        search_beside(path)
        return path

    return write


def test_both_configs_of_the_project_pass_the_check(typed, tmp_path):
    typed(RLVR)
    own = check_supported(tmp_path / "answers.yaml").config
    assert own.rewards["addition"].type == "my_reward.score"
    assert own.algorithm.pg_options.given == {"width": 0.3} and own.algorithm.adv_options.given == {"scale": 2.0}
    played = check_supported(tmp_path / "worlds.yaml").config
    assert played.custom_envs.keys() == {"Guess", "Question"}
    check_agents(played)


def test_the_readme_names_every_file_of_the_project(typed):
    readme = (PROJECT / "README.md").read_text()
    assert {path.name for path in PROJECT.iterdir() if path.suffix != ".md" and path.is_file()} == set(
        re.findall(r"^\| \[(\S+)\]", readme, re.M)
    )


def test_a_config_with_own_code_is_written_as_it_is_read(typed, tmp_path):
    config = load(typed(RLVR, {"algorithm": OWN}))
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert load(again) == config and "width: 0.3" in dump(config)


def test_the_reward_scores_and_reports_its_number(typed):
    typed(RLVR)
    verdict = create_reward("my_reward.score")("so it is 18", "18", {})
    assert (verdict.score, verdict.metrics) == (1.0, {"words": 4.0})


def test_loss_and_estimator_pass_two_rows(typed):
    assert list(unusable_code(load(typed(RLVR, {"algorithm": OWN})).algorithm)) == []


def test_world_tool_and_agent_are_built_with_their_settings(typed):
    worlds = WORLDS["custom_envs"]
    typed(RLVR)
    spec = WorldSpec(env_type=worlds["Guess"]["env_type"], values=worlds["Guess"]["env_config"])
    world = build(spec)
    text, info = world.reset(seed=3)
    assert text == "Guess a number from 1 to 5." and info["instructions"]
    ends = [world.step(str(i)) for i in range(1, 6)]
    assert sorted(end[1] for end in ends) == [0, 0, 0, 0, 1]
    assert is_agent(worlds["Question"]["env_type"]) and not is_agent(worlds["Guess"]["env_type"])


def test_the_options_in_the_file_are_those_that_loss_and_estimator_compute_with(typed):
    def of(**changes):
        return load(typed(RLVR, {"algorithm": {**OWN, **changes}})).algorithm

    mask, ahead = torch.ones(2, 1, dtype=torch.bool), torch.full((2, 1), math.log(2.0))
    inputs = PolicyLossInputs(
        logprobs=ahead, proximal_logprobs=0 * ahead, behaviour_logprobs=0 * ahead, advantages=0 * ahead + 1, mask=mask,
        scores=torch.tensor([1.0, 0.0]),
    )  # fmt: skip
    for width in (0.1, 0.3):
        algorithm = of(pg_options={"width": width})
        loss, metrics = policy_loss_function(algorithm.pg_variant)(inputs, options=algorithm.pg_options)
        bent = 1 + width * math.tanh(1 / width)  # at a ratio of 2
        assert loss.flatten().tolist() == pytest.approx([-bent] * 2)
        assert float(metrics["policy/bent"]) == pytest.approx(2 * (2 - bent)), "a sum, over which the mean is taken"
    rows = AdvantageInputs(scores=inputs.scores, mask=mask, group_index=torch.zeros(2, dtype=torch.long))
    for scale in (1.0, 2.0):
        algorithm = of(adv_options={"scale": scale})
        advantages, _ = estimator_function(algorithm.adv_estimator)(rows, given=algorithm.adv_options.given)
        assert advantages.flatten().tolist() == pytest.approx([scale / 2, -scale / 2])


def test_an_own_loss_against_the_engines_logprobs_is_not_corrected_a_second_time(typed):
    plain = load(typed(RLVR, {"algorithm": LOSS})).algorithm
    carried = {**LOSS, "pg_options": {**LOSS["pg_options"], "ratio_base": "behaviour"}}
    against = load(typed(RLVR, {"algorithm": carried})).algorithm
    assert plain.correction.weight_level == "token" and against.correction.weight_level == "none"
    assert "ratio_base" not in against.pg_options.given


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return inputs.logprobs.sum(), {}", "has shape (); expected (2, 4)"),
        ("return inputs.advantages, {}", "has no gradient"),
        ("return inputs.logprobs / 0, {}", "is not finite"),
        ("return inputs.logprobs * inputs.nothing, {}", "has no attribute 'nothing'"),
        ("return inputs.logprobs, {'ratio_max': inputs.logprobs}", "metric ratio_max"),
        ("return inputs.logprobs", "must return (loss, metrics), not a Tensor"),
    ],
)
def test_a_loss_that_fails_on_two_rows_is_refused_with_its_key_before_anything_starts(typed, tmp_path, body, told):
    module = f"broken_{abs(hash(body))}"
    (tmp_path / f"{module}.py").write_text(f"def loss(inputs):\n    {body}\n")
    path = typed(RLVR, {"algorithm": {"pg_variant": f"{module}.loss"}})
    ((where, message),) = unusable_code(load(path).algorithm)
    assert where == "algorithm.pg_variant" and told in message
    with pytest.raises(ConfigError, match="C204: algorithm.pg_variant: "):
        require_inputs(check_supported(path))


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        ({"pg_variant": "my_loss.soft_clop"}, "did you mean 'my_loss.soft_clip'?"),
        (
            {"pg_variant": "my_loss.soft_clip", "pg_options": {"widht": 0.1}},
            "pg_options.widht: unknown key; did you mean",
        ),
        ({"pg_variant": "my_loss.soft_clip", "pg_options": {"width": "x"}}, "pg_options.width: expected float"),
        ({"adv_estimator": "my_estimator.ranked", "adv_options": {"scal": 1}}, "adv_options.scal: unknown key"),
        ({"pg_variant": "soft_clip"}, "is not one of vanilla"),
    ],
)
def test_a_wrong_name_or_option_of_own_code_is_refused_without_running_it(typed, tmp_path, algorithm, told):
    path = typed(RLVR, {"algorithm": algorithm})
    for name in ("my_loss.py", "my_estimator.py"):
        (tmp_path / name).write_text("raise SystemExit\n" + (tmp_path / name).read_text())
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_supported(path)
