"""The folder of a run across starts."""

import logging

from roll_async.config.secrets import is_secret
from roll_async.observe.run_folder import RunFolder


def test_a_start_with_another_config_keeps_the_old_file_and_logs_every_key_that_changed(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="roll_async")
    folder = RunFolder(str(tmp_path), "run")
    first = "seed: 1\nactor_train:\n  training_args: {learning_rate: 1.0e-6, devices: [0, 1]}\n"
    folder.write_config(first)
    folder.write_config(first)
    assert [p.name for p in folder.path.iterdir()] == ["config.yaml"] and not caplog.messages
    second = "seed: 1\nactor_train:\n  training_args: {learning_rate: 2.0e-6, devices: [0]}\nextra: {}\n"
    RunFolder(str(tmp_path), "run").write_config(second)
    keys = "actor_train.training_args.devices, actor_train.training_args.learning_rate, extra"
    assert caplog.messages[0] == f"the config of the last start differs in 3 keys ({keys}); it is kept as config.1.yaml"
    assert caplog.messages[1:] == [
        "config: actor_train.training_args.devices: [0, 1] -> [0]",
        "config: actor_train.training_args.learning_rate: 1e-06 -> 2e-06",
        "config: extra: (absent) -> {}",
    ]
    folder.write_config(first)
    texts = {p.name: p.read_text() for p in folder.path.iterdir()}
    assert texts == {"config.yaml": first, "config.1.yaml": first, "config.2.yaml": second}


def test_no_secret_of_the_last_start_is_in_the_log(tmp_path, caplog):
    """An older version may have left it in the file."""
    caplog.set_level(logging.INFO, logger="roll_async")
    folder = RunFolder(str(tmp_path), "run")
    folder.write_config("system_envs: {HF_TOKEN: s3cret}\nseed: 1\n")
    folder.write_config("system_envs: {HF_TOKEN: <hidden>}\nseed: 2\n", is_secret)
    assert caplog.messages[1:] == ["config: seed: 1 -> 2", "config: system_envs.HF_TOKEN: a secret"]


def test_a_restored_run_knows_which_step_has_no_validation(tmp_path):
    """That of step 4 came with step 6, which is to be repeated."""
    folder = RunFolder(str(tmp_path), "run")
    assert not folder.has_validation(2)
    for step, version in ((2, None), (3, 2), (4, None), (6, 4)):
        measured = {} if version is None else {"validation/version": float(version)}
        folder.append_metrics({"step": step, **measured})
    folder.truncate_metrics(4)
    assert folder.has_validation(2) and not folder.has_validation(4)
