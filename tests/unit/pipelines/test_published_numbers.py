"""The numbers of the fully asynchronous mode by value: one run with a failed push, a quarantined group, stale groups
that are dropped, an aborted group and a lag, beside an account of it that the test keeps itself.
"""

import logging
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from roll_async.commands.fully_async import LOG_NAME
from roll_async.config.staleness import StalenessPolicy
from roll_async.observe.prometheus import exposition
from roll_async.observe.run_folder import RunFolder
from roll_async.pipelines.fully_async import FullyAsyncTrainer
from roll_async.pipelines.protocol import RunEnd
from roll_async.pipelines.wire import UserHooks
from roll_async.rollout.group_source import GroupFate, GroupOutcome
from roll_async.rollout.rollouter import Rollouter

ROOT = Path(__file__).resolve().parents[3]
GROUP_BYTES = 4 * 2 + 2 * 9 * 10
"""Two prompt tokens, and two answers of ten tokens."""
BOUND, PUSH_S, RETRY_DELAY_S = 1, 2.0, 1.0
BROKEN, ABORTED = "12", "5"
"""The reward of this prompt, of the third step, raises; the first attempt at this one is aborted."""


class AbortsOne(Rollouter):
    def _custom_generation_logic(self, batch):
        if batch.prompt.row_id == ABORTED and not batch.slot.attempt:
            return GroupOutcome(fate=GroupFate.REQUEUED, reason="aborted by the test")
        return None


class Account:
    """What the queue, the learner and the observer were given, counted by slow loops when a step is published."""

    def __init__(self, done):
        self.finished, self.trained, self.expected = [], {}, []
        learn, put, step_ended = done.learn, done.queue.put, done.step

        async def learn_and_note(groups, step):
            self.trained[step] = list(groups)
            return await learn(groups, step)

        async def put_and_note(group):
            kept = await put(group)
            self.finished += [group] if kept else []
            return kept

        def publish_and_count(step, metrics):
            self.expected.append(self.count(step))
            step_ended(step, metrics)

        done.learn, done.queue.put, done.step = learn_and_note, put_and_note, publish_and_count

    def count(self, step):
        """Samples, bytes and shares after this step; a group is of two samples, and stale when a token is."""
        used = {g.group_id for groups in self.trained.values() for g in groups}
        left = [g for g in self.finished if g.group_id not in used]
        dropped = [g for g in left if step - 1 - min(v for s in g.samples for v, _ in s.version_runs) > BOUND]
        ages = [
            [step - 1 - version for s in group.samples for version, count in s.version_runs for _ in range(count)]
            for group in self.trained[step]
        ]
        lags = Counter(age for group in ages for age in group)
        return {
            "dropped_stale_samples": 2 * len(dropped),
            "dropped_samples": 2 * len(dropped) + 2,  # and the one that was aborted
            "queue_size": 2 * (len(left) - len(dropped)),
            "queue_memory_bytes": GROUP_BYTES * (len(left) - len(dropped)),
            "stale_samples_ratio": sum(max(group) > 0 for group in ages) / len(ages),
            **{f"token_share_version_lag_{lag}": count / lags.total() for lag, count in lags.items()},
        }


def test_every_number_is_that_of_what_happened(run, a_run, scorer_class):
    done = a_run(
        hooks=UserHooks(trainer=FullyAsyncTrainer, rollouter=AbortsOne),
        steps=8,
        ratio=1.5,
        speeds=(1.0, 2.0),
        staleness={"policy": StalenessPolicy.DROP, "max_versions": BOUND},
        scorer=lambda: scorer_class(lambda prompt, _: ValueError("broken") if prompt.row_id == BROKEN else 1.0),
    )
    done.push_s, export, pushes = PUSH_S, done.export_weights, []

    async def wrong_once(plan):
        """The third version is sent with a digest that no engine can prove, then again."""
        pushes.append(plan.version)
        async for part in export(plan):
            yield "of other bytes" if part == "digest" and pushes.count(3) == 1 and plan.version == 3 else part

    done.export_weights = wrong_once
    account = Account(done)
    assert run(done.go()) is RunEnd.FINISHED
    for step, (metrics, counted) in enumerate(zip(done.published, account.expected, strict=True), start=1):
        failed = {"generation_errors": int(step >= 3), "sync_failures": int(step >= 3)}
        failed["sync_s"] = 2 * PUSH_S + RETRY_DELAY_S if step == 3 else PUSH_S
        published = {name: metrics.get(f"fully_async/{name}") for name in (counted | failed)}
        assert published == pytest.approx(counted | failed), f"step {step}"
        lags = [value for key, value in metrics.items() if "token_share_version_lag" in key]
        assert sum(lags) == pytest.approx(1), "and no lag beside them"
    varied = {name: len({m.get(f"fully_async/{name}") for m in done.published}) for name in account.expected[0]}
    assert min(varied.values()) > 1, f"some number never changed: {varied}"


def test_a_faster_trainer_leaves_fewer_samples_in_the_queue(run, a_run):
    slow, fast = (a_run(hooks=UserHooks(trainer=FullyAsyncTrainer), steps=6) for _ in range(2))
    slow.learn_s, fast.learn_s = 100.0, 0.5
    assert [run(done.go()) for done in (slow, fast)] == [RunEnd.FINISHED] * 2
    waiting = [[m["fully_async/queue_size"] for m in done.published] for done in (slow, fast)]
    assert min(waiting[0][:-1]) > max(waiting[1][:-1]), waiting


def test_the_rules_of_the_alert_file_are_about_metrics_that_a_run_exports(run, a_run):
    done = a_run(hooks=UserHooks(trainer=FullyAsyncTrainer))
    run(done.go())
    exported = set(re.findall(r"^(\w+)\{", exposition(done.published[-1], run="r"), re.M))
    (group,) = yaml.safe_load((ROOT / "docs_roll" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        names = set(re.findall(r"roll_async_\w+", rule["expr"]))
        assert names and names <= exported, rule["alert"]


@pytest.fixture
def log(tmp_path):
    """The folder with the log files of a run, and the logger as it was afterwards."""
    logger = logging.getLogger("roll_async")
    before = list(logger.handlers), logger.level, logger.propagate
    RunFolder(str(tmp_path), "run").open_log(LOG_NAME)
    yield tmp_path / "run"
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


GREPS = {
    'grep "ERROR" fully_async_training.log': (f"group {BROKEN} (prompt {BROKEN}) failed: broken",),
    'grep "Component Statistics" fully_async_training.log': (
        "Trainer ", "Rollouter ", "MessageQueue ", "ParameterSynchronizer ",
    ),
    'grep "Parameter sync" fully_async_training.log': ("version 1 on 2 replicas", "version 3 attempt 1 failed"),
}  # fmt: skip
"""Command of the fully asynchronous document to what its lines say in this run."""


@pytest.mark.skipif(shutil.which("grep") is None, reason="no grep")
def test_the_greps_of_the_document_find_errors_statistics_and_weight_pushes_in_the_log(run, a_run, scorer_class, log):
    done = a_run(
        hooks=UserHooks(trainer=FullyAsyncTrainer, custom_monitor=lambda trainer, rollouter: None),
        scorer=lambda: scorer_class(lambda prompt, _: ValueError("broken") if prompt.row_id == BROKEN else 1.0),
    )
    export, torn = done.export_weights, []

    async def wrong_once(plan):
        async for part in export(plan):
            yield "of other bytes" if part == "digest" and plan.version == 3 and not torn else part
        torn.extend([plan] if plan.version == 3 else [])

    done.export_weights = wrong_once
    assert run(done.go()) is RunEnd.FINISHED
    for command, said in GREPS.items():
        found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=log)
        assert found.returncode == 0, command
        lines = found.stdout.splitlines()
        assert all(any(part in line for line in lines) for part in said), f"{command}: {found.stdout}"
    assert len(subprocess.run(["grep", "ERROR", LOG_NAME], capture_output=True, cwd=log).stdout.splitlines()) == 1
