"""Secrets of a config stay out of its dump, and come back."""

import pytest

from roll_async.config.api import ConfigError, dump, load
from roll_async.config.secrets import HIDDEN, shown_override, shown_text, with_secrets, without_secrets

SECRETS = {
    "system_envs.HF_TOKEN": "s3cret-1",
    "actor_infer.system_envs.MY_CLOUD": "s3cret-2",
    "tracking.tracker_kwargs.settings.api_key": "s3cret-3",
    "custom_envs.Mine.env_config.env.PASSPHRASE": "s3cret-4",
    "custom_envs.Mine.env_config.apiKey": "s3cret-5",
    "custom_envs.Mine.tools": [{"tool_id": "mcp", "tool_args": {"env": {"SEARCH_KEY": "s3cret-6"}, "command": ["x"]}}],
}
HARMLESS = {
    "tracking.tracker_kwargs.project": "addition",
    "custom_envs.Mine.env_config.max_tokens": 7,
    "custom_envs.Mine.env_config.tokenizer": "mine",
    "custom_envs.Mine.env_config.env.EMPTY": "",
    "custom_envs.Mine.env_type": "my_module.Mine",
}


@pytest.fixture
def config(files):
    return load(files.agentic({**HARMLESS, **SECRETS}))


def test_no_secret_is_in_the_dump_and_everything_else_is(config, files):
    text = dump(without_secrets(config))
    assert "s3cret" not in text and text.count(HIDDEN) == 6
    for told in ("project: addition", "max_tokens: 7", "tokenizer: mine", 'EMPTY: ""', "tool_id: mcp"):
        assert told in text
    assert "s3cret-4" in dump(config), "the config itself still has it"


def test_a_config_without_secrets_is_the_same_object(files):
    config = load(files.rlvr({"tracking.tracker_kwargs.project": "addition"}))
    assert without_secrets(config) is config and with_secrets(config, {}) is config


def test_a_start_from_the_dump_takes_secrets_from_the_environment(config, files):
    dumped = load(files.text(dump(without_secrets(config)), "dumped.yaml"))
    environment = {
        "HF_TOKEN": "s3cret-1", "MY_CLOUD": "s3cret-2", "api_key": "s3cret-3", "PASSPHRASE": "s3cret-4",
        "apiKey": "s3cret-5", "SEARCH_KEY": "s3cret-6",
    }  # fmt: skip
    assert with_secrets(dumped, environment) == config
    del environment["MY_CLOUD"], environment["apiKey"]
    with pytest.raises(ValueError) as refused:
        with_secrets(dumped, environment)
    assert str(refused.value) == (
        "actor_infer.system_envs.MY_CLOUD, custom_envs.Mine.env_config.apiKey: <hidden> stands for a secret, which no "
        "file of a run holds; write its value into the config, or set the environment variable MY_CLOUD, apiKey"
    )


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("system_envs.A=s3cret", "system_envs.A=<hidden>"),
        ("actor_infer.system_envs={A: s3cret}", "actor_infer.system_envs=<hidden>"),
        ("tracking.tracker_kwargs={token: s3cret}", "tracking.tracker_kwargs=<hidden>"),
        ("max_steps=3", "max_steps=3"),
        ("no override", "no override"),
    ],
)
def test_an_override_is_shown_without_its_secret(override, shown):
    assert shown_override(override) == shown


def test_a_refusal_does_not_show_the_secret_of_an_override(files):
    with pytest.raises(ConfigError) as refused:
        load(files.rlvr(), ["system_envs={A: s3cret, B: [1]}"])
    assert "system_envs.B" in str(refused.value) and "s3cret" not in str(refused.value)


def test_what_others_say_is_shown_without_the_secrets_they_were_handed():
    handed = {"project": "p", "login_kwargs": {"api_key": "s3cret"}, "settings": {"token": "s3cret-2", "pwd": None}}
    said = "p: neither s3cret nor 's3cret-2' is a key"
    assert shown_text(said, handed) == f"p: neither {HIDDEN} nor '{HIDDEN}' is a key"
    assert shown_text("system_envs.A=other", handed) == f"system_envs.A={HIDDEN}"
    assert shown_text("max_steps=3", handed) == "max_steps=3"


def judged(files, *users):
    """A config with a judge of each of these users."""
    rewards = {
        f"j-{i}": {
            "type": "llm_judge",
            "tag_included": [f"t{i}"],
            "judge": {"api_url": f"http://{user}@host{i}/v1", "model": "j"},
        }
        for i, user in enumerate(users)
    }
    return load(files.rlvr({"rewards": rewards}))


def test_user_and_password_of_an_address_are_a_secret_wherever_it_is_and_its_host_is_none(files):
    config = judged(files, "bob:s3cret", "eve:s3@cret")
    hidden = without_secrets(config)
    assert dump(hidden).count(HIDDEN) == 2 and "s3" not in dump(hidden)
    assert hidden.rewards["j-0"].judge.api_url == f"http://{HIDDEN}@host0/v1"
    given = {"rewards_j_0_judge_api_url": "bob:s3cret", "rewards_j_1_judge_api_url": "eve:s3@cret"}
    assert with_secrets(hidden, given) == config
    with pytest.raises(ValueError, match=r"^rewards.j-1.judge.api_url: .* environment variable rewards_j_1_judge_api"):
        with_secrets(hidden, {"rewards_j_0_judge_api_url": "bob:s3cret", "api_url": "eve:s3@cret"})
    assert with_secrets(config, {}) is config, "a resume with the user's own config needs no variable"


def test_a_printed_command_is_refused_until_its_hidden_password_is_written(files):
    shown = shown_override("rewards.maths.judge={api_url: http://bob:s3cret@judge.corp/v1}")
    assert shown == f"rewards.maths.judge={{api_url: http://{HIDDEN}@judge.corp/v1}}"
    with pytest.raises(ValueError, match="rewards.j-0.judge.api_url: <hidden> stands for a secret"):
        with_secrets(judged(files, HIDDEN), {})
    assert shown_override("rewards.maths.judge.api_url=http://judge.corp:80/a@b").endswith("=http://judge.corp:80/a@b")
    assert shown_override("a=https://user:p@ss@host") == f"a=https://{HIDDEN}@host"
