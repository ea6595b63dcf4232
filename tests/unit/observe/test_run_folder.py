"""The folder of a run across starts."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_async.commands.command_line import EXIT_ROLE_FAILED
from roll_async.commands.run import exit_code, origin
from roll_async.config.secrets import is_secret
from roll_async.observe.disk import Unwritable, writing
from roll_async.observe.recorder import KEYS_WITHOUT_ENGINES
from roll_async.observe.report import summary_without_engines
from roll_async.observe.run_folder import RunFolder, log_to
from roll_async.observe.run_record import RunRecord


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
    folder.write_config("system_envs: {HF_TOKEN: s3cret}\njudge: http://me:s3cret@host\nseed: 1\n")
    folder.write_config("system_envs: {HF_TOKEN: <hidden>}\njudge: <hidden>\nseed: 2\n", is_secret)
    assert caplog.messages[1:] == [
        "config: judge: a secret", "config: seed: 1 -> 2", "config: system_envs.HF_TOKEN: a secret",
    ]  # fmt: skip


@pytest.mark.parametrize(("exported", "left"), [(6, 0), (0, 0), (2, 2)])
def test_a_model_that_may_be_of_a_later_step_is_left_behind_with_its_adapter(tmp_path, exported, left):
    """0: it was being replaced when the process was killed."""
    folder = RunFolder(str(tmp_path), "run", RunRecord(exported_step=exported))
    for name in ("hf", "hf_adapter"):
        (folder.path / name).mkdir()
    folder.leave_behind(2, tmp_path / "aside")
    there = folder.path if left else tmp_path / "aside"
    assert (there / "hf").is_dir() and (there / "hf_adapter").is_dir() and folder.record.exported_step == left


def test_the_closing_table_says_the_time_of_all_starts_of_the_run():
    clocks = (4.0, 9.0, 12.0, 30.0, 2.0)  # of three processes, the second of which has a long first step
    metrics = [
        dict.fromkeys([*KEYS_WITHOUT_ENGINES, "trainer/loss", "data/epoch"], 1.0) | {"step": step, "time_s": clock}
        for step, clock in enumerate(clocks, 1)
    ]
    for step in (1, 2):  # all roles of the first process started again before its second step
        metrics[step] |= {"start/total_s": 7.0, "run/restarts": 1.0 if step == 1 else 0.0}
    assert "steps 5 in 41 s, 1.00 epochs" in " ".join(summary_without_engines(metrics, []).split())


def test_a_restored_run_knows_which_step_has_no_validation(tmp_path):
    """That of step 4 came with step 6, which is to be repeated."""
    folder = RunFolder(str(tmp_path), "run")
    assert not folder.has_validation(2)
    for step, version in ((2, None), (3, 2), (4, None), (6, 4)):
        measured = {} if version is None else {"validation/version": float(version)}
        folder.append_metrics({"step": step, **measured})
    folder.truncate_metrics(4)
    assert folder.has_validation(2) and not folder.has_validation(4)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_log_on_a_full_disk_says_nothing_on_the_console(capfd):
    logger = log_to(["/dev/full"])
    try:
        for _ in range(3):
            logger.info("lost")
    finally:
        logger.handlers.clear()
    out, err = capfd.readouterr()
    assert out == err == ""


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "No space left on device; make room there, or choose another output_dir"),
        (errno.EROFS, "Read-only file system; choose another output_dir"),
    ],
)
def test_what_a_disk_does_not_take_is_one_line_with_its_remedy(tmp_path, number, said):
    with pytest.raises(Unwritable) as raised, writing(tmp_path / "metrics.jsonl"):
        raise OSError(number, os.strerror(number))
    assert str(raised.value) == f"cannot write {tmp_path}/metrics.jsonl: {said}"


def test_metrics_that_a_full_disk_does_not_take_end_the_run_with_code_3(tmp_path):
    folder = RunFolder(str(tmp_path), "run")
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(Unwritable, match="metrics.jsonl: No space left on device") as raised:
        folder.append_metrics({"step": 1})
    assert exit_code(raised.value) == EXIT_ROLE_FAILED and origin(raised.value) == ""


def test_a_config_that_cannot_be_written_leaves_that_of_the_last_start(tmp_path):
    folder = RunFolder(str(tmp_path), "run")
    folder.write_config("seed: 1\n")
    (folder.path / "config.partial").symlink_to("/dev/full")
    with pytest.raises(Unwritable, match="config.yaml: No space left"):
        folder.write_config("seed: 2\n")
    assert {p.name: p.read_text() for p in folder.path.iterdir()} == {"config.yaml": "seed: 1\n"}


MONITORED = """\
import logging, sys
from roll_async.pipelines.wire import UserHooks
from roll_async.observe.run_folder import RunFolder

logger = logging.getLogger(__name__)

def calculate_custom_metric(trainer_stats):
    return trainer_stats["samples"] / 4

def custom_monitor(trainer_stats, rollouter_stats):
    custom_metric = calculate_custom_metric(trainer_stats)
    logger.info(f"Custom metric: {custom_metric}")

logging.basicConfig()
classes = UserHooks(custom_monitor=custom_monitor, log_name="fully_async_training.log")
RunFolder(sys.argv[1], "run").open_log(*classes.log_names, modules=classes.modules)
classes.custom_monitor({"samples": 10}, {})
logging.getLogger("roll_async.rollout").info("in the files alone")
"""


def test_what_the_monitor_of_a_users_script_logs_is_in_the_logs_and_on_the_console_once(tmp_path):
    script = tmp_path / "monitored.py"
    script.write_text(MONITORED)
    ended = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "INFO: Custom metric: 2.5\n")
    for name in ("run.log", "fully_async_training.log"):
        lines = (tmp_path / "run" / name).read_text().splitlines()
        assert [line.partition(" INFO ")[2] for line in lines] == [
            "__main__: Custom metric: 2.5",
            "roll_async.rollout: in the files alone",
        ]


OTHERS = """\
import logging, sys, warnings
from roll_async.observe.run_folder import RunFolder

RunFolder(sys.argv[1], "run").open_log()
RunFolder(sys.argv[1], "run").open_log()
warnings.warn("old argument")
logging.getLogger("transformers.models").warning("a library warns")
logging.getLogger("roll_async.x").warning("we warn")
"""


def test_what_other_libraries_warn_of_is_in_the_log_once_and_not_on_the_screen(tmp_path):
    script = tmp_path / "others.py"
    script.write_text(OTHERS)
    ended = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "WARNING: we warn\n")
    log = (tmp_path / "run" / "run.log").read_text()
    assert [log.count(text) for text in ("UserWarning: old argument", "a library warns", "we warn")] == [1, 1, 1]


def test_a_line_without_its_end_is_cut_off_before_the_next_one(tmp_path):
    """A full disk or a power loss leaves it."""
    folder = RunFolder(str(tmp_path), "run")
    for left in ('{"step": 1, "rewa', '{"step": 2, "rewa', "\0\0"):
        with open(folder.path / "metrics.jsonl", "a") as file:
            file.write(left)
        folder.append_metrics({"step": folder.last_step + 1})
    assert folder.read_metrics() == [{"step": 1}, {"step": 2}, {"step": 3}]
