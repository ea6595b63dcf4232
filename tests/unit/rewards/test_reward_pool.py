"""Workers that hang, die or talk too much cost their own task and nothing else."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from roll_async.config.user_code import FOLDERS_VARIABLE, search_beside
from roll_async.processes.pool import ProcessPool
from roll_async.rewards.sandbox.confine import missing
from roll_async.rewards.serving.pool import RewardPool, RewardPoolOptions, program_of
from roll_async.schema import RewardStatus
from tests.patience import patient

HERE = str(Path(__file__).parent)
MISBEHAVING = "sample_rewards.Misbehaving"
PATIENCE_S = round(patient(2.0), 1)
"""Time limit of a reward: what a worker that does not hang may take on a machine that does four things at once."""


@pytest.fixture
def scoring(monkeypatch):
    """Run `work(pool)` against a pool of real worker processes."""
    monkeypatch.syspath_prepend(HERE)
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (HERE, root, os.environ.get("PYTHONPATH")))))

    def run(work, reward=MISBEHAVING, **options):
        async def go():
            pool = RewardPool(RewardPoolOptions(reward=reward, **{"num_workers": 1, "timeout_s": 20.0, **options}))
            await pool.start()
            try:
                async with asyncio.timeout(patient(30) + 6 * PATIENCE_S):
                    return await work(pool)
            finally:
                await pool.close()

        return asyncio.run(go())

    return run


def ask(pool, *texts):
    return asyncio.gather(*(pool.score(text, "42", {}) for text in texts))


def test_answers_come_back_to_the_sample_that_asked(scoring):
    async def work(pool):
        return await ask(pool, *map(str, range(200)))

    rewards = scoring(work, num_workers=2)
    assert [r.score for r in rewards] == list(range(200))
    assert all(r.status is RewardStatus.OK and r.scoring_s >= 0 for r in rewards)
    assert rewards[0].metrics == {"acc": 1.0, "format": 1.0, "length": 2.0}


def test_the_child_of_a_reward_that_forks_answers_nobody(scoring):
    async def work(pool):
        return await ask(pool, "fork", *map(str, range(50)))

    assert [reward.score for reward in scoring(work)] == [7, *range(50)]


@pytest.mark.slow
def test_a_hanging_reward_is_a_time_out_and_its_neighbours_are_unharmed(scoring):
    async def work(pool):
        started = time.monotonic()
        rewards = await ask(pool, "1", "hang", "2", "3", "hang", "4")
        return rewards, time.monotonic() - started, pool.timeouts, pool.crashes

    rewards, seconds, timeouts, crashes = scoring(work, timeout_s=PATIENCE_S)
    ok, late = RewardStatus.OK, RewardStatus.TIMEOUT
    assert [r.status for r in rewards] == [ok, late, ok, ok, late, ok]
    assert [r.score for r in rewards if r.status is ok] == [1, 2, 3, 4]
    assert f"no verdict within {PATIENCE_S:g} s" in rewards[1].reason
    assert (timeouts, crashes) == (2, 0) and seconds < patient(12) + 2 * PATIENCE_S


def test_a_hanging_reward_delays_only_its_own_worker(scoring):
    async def work(pool):
        hanging = asyncio.ensure_future(pool.score("hang", "42", {}))
        await asyncio.sleep(0.05)
        rewards = await ask(pool, *"123456789")
        return [r.score for r in rewards], hanging.done()

    scores, hanging_done = scoring(work, num_workers=2, timeout_s=10.0)
    assert scores == list(range(1, 10)) and not hanging_done


@pytest.mark.slow
def test_two_workers_that_hang_at_once_get_a_spare_each(scoring):
    async def work(pool):
        return await ask(pool, "hang", "hang", *"1234")

    rewards = scoring(work, num_workers=2, timeout_s=PATIENCE_S)
    assert [r.status for r in rewards] == [RewardStatus.TIMEOUT] * 2 + [RewardStatus.OK] * 4
    assert [r.score for r in rewards[2:]] == [1, 2, 3, 4]


@pytest.mark.slow
def test_long_texts_behind_a_hanging_one_do_not_suspend_its_time_out(scoring):
    async def work(pool):
        long = [pool.score("1", "x" * 400_000, {}) for _ in range(3)]
        return await asyncio.gather(pool.score("hang", "42", {}), *long)

    first, *rest = scoring(work, timeout_s=PATIENCE_S)
    assert first.status is RewardStatus.TIMEOUT and {r.metrics["length"] for r in rest} == {400_000}


@pytest.mark.slow
def test_workers_that_hang_at_the_same_moment_are_each_replaced_by_one_of_their_own(scoring):
    async def work(pool):
        rewards = await ask(pool, *["hang"] * 6, *map(str, range(12)))
        return rewards, pool.timeouts

    rewards, timeouts = scoring(work, num_workers=3, timeout_s=PATIENCE_S)
    assert timeouts == 6 and [r.score for r in rewards[6:]] == list(range(12))
    assert all(r.status is RewardStatus.OK for r in rewards[6:]) and not _workers()


def test_a_worker_that_is_ready_when_its_caller_is_cancelled_is_ended_with_the_others():
    """Both may happen in one turn of a busy machine's loop."""

    class Ready(ProcessPool):
        async def _start(self):
            process = await super()._start()
            for caller in callers:
                caller.cancel()  # it learns of its worker and of its end at the same time
            return process

    async def work():
        pool = Ready(program_of(RewardPoolOptions(reward="exact_match", memory_mb=512)), spare=True)
        first = await pool.start()  # and from now on there is a spare
        await first.stop()
        callers.append(asyncio.ensure_future(pool.start()))
        with pytest.raises(asyncio.CancelledError):
            await callers[0]
        running = _workers()
        await pool.close()
        return running

    callers = []
    assert asyncio.run(work()) and not _workers()


def test_a_reward_that_kills_its_worker_twice_gets_no_score_and_the_next_one_does(scoring):
    async def work(pool):
        rewards = await ask(pool, "die", "7", "die", "8")
        return rewards, pool.crashes

    rewards, crashes = scoring(work)
    assert [r.status.value for r in rewards] == ["timeout", "ok", "timeout", "ok"]
    assert "killed the worker twice (exit status 3)" in rewards[0].reason and crashes == 4


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        ("raise", RewardStatus.ERROR, "KeyError"),
        ("nan", RewardStatus.ERROR, "finite"),
        ("recurse", RewardStatus.TIMEOUT, "RecursionError"),
        ("down", RewardStatus.OUTAGE, "refused"),
    ],
)
def test_what_went_wrong_is_a_state_with_its_reason_and_not_a_score(scoring, text, status, reason):
    rewards = scoring(lambda pool: ask(pool, text, "1"))
    assert rewards[0].status is status and reason in rewards[0].reason
    assert rewards[1].score == 1


@pytest.mark.parametrize(
    ("text", "error", "line", "function"),
    [
        ("raise", "KeyError: 'missing'", 'raise KeyError("missing")', "__call__"),
        ("library", "JSONDecodeError: Expecting property name", 'json.loads("{")', "__call__"),
        ("exit", "SystemExit: as in a script", 'sys.exit("as in a script")', "__call__"),
        ("recurse", "RecursionError", 'return self("recurse", ground_truth, extra)', "__call__"),
        ("nothing", "TypeError: a reward returns", "def __call__(self, text, ground_truth, extra):", "__call__"),
    ],
)
def test_a_reward_that_raised_says_which_of_its_own_lines_it_was(scoring, text, error, line, function):
    rewards = scoring(lambda pool: ask(pool, text, "1"))
    file = Path(HERE) / "sample_rewards.py"
    number = next(n for n, found in enumerate(file.read_text().splitlines(), 1) if line in found)
    assert rewards[0].place == f"{file}:{number}, in {function}"
    assert error in rewards[0].reason and error in rewards[0].traceback and "Traceback" in rewards[0].traceback
    assert rewards[1].score == 1 and not rewards[1].place


def test_a_reward_whose_files_cannot_be_read_at_once_is_built_again(scoring, tmp_path):
    made = {"reward": "sample_rewards.BuiltAtTheSecondAttempt", "arguments": {"mark": str(tmp_path / "mark")}}
    assert scoring(lambda pool: pool.score("x", "y", {}), **made).score == 1.0


def test_a_module_beside_the_config_is_found_by_workers_in_another_folder(scoring, tmp_path, monkeypatch):
    """The file that is called like a library replaces no library."""
    for folder in ("project", "work"):
        (tmp_path / folder).mkdir()
    (tmp_path / "project" / "beside_the_config.py").write_text("import helps\ndef score(*_): return helps.SCORE\n")
    (tmp_path / "work" / "helps.py").write_text("SCORE = 0.25\n")
    (tmp_path / "work" / "json.py").write_text("raise ImportError('not the library')\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(FOLDERS_VARIABLE, "")
    monkeypatch.chdir(tmp_path / "work")
    search_beside(Path("../project/mine.yaml"))
    assert scoring(lambda pool: pool.score("x", "y", {}), reward="beside_the_config.score").score == 0.25
    with pytest.raises(ValueError, match=f"no_such_module.*looked.*{tmp_path}/project and {tmp_path}/work"):
        scoring(lambda pool: ask(pool, "1"), reward="no_such_module.score")


def test_a_reward_that_eats_the_memory_does_not_eat_the_host(scoring):
    rewards = scoring(lambda pool: ask(pool, "eat", "1"), memory_mb=1024)
    assert rewards[0].status is RewardStatus.TIMEOUT and "MemoryError" in rewards[0].reason
    assert rewards[1].status is RewardStatus.OK


def test_what_a_reward_prints_does_not_get_between_the_answers(scoring):
    rewards = scoring(lambda pool: ask(pool, "print", "2", "print"))
    assert [r.score for r in rewards] == [1, 2, 1]


def test_text_of_any_kind_reaches_the_reward_unchanged(scoring):
    async def work(pool):
        return await pool.score("1.5", "x\n\u2028\U0001f600\x00" + "y" * 200_000, {"why": "line\nbreak"})

    reward = scoring(work)
    assert reward.score == 1.5 and reward.metrics["length"] == 200_005 and reward.reason == "line\nbreak"


def test_a_plain_function_by_dotted_path_is_a_reward(scoring):
    assert scoring(lambda pool: pool.score("x", "y", {}), reward="sample_rewards.constant").score == 0.5


def test_a_function_written_for_verl_is_a_reward_as_it_is(scoring):
    extra = {"data_source": "gsm8k", "extra_info": '{"index": 3}'}
    reward = scoring(lambda pool: pool.score("7", "7", extra), reward="sample_rewards.compute_score")
    assert (reward.score, reward.metrics) == (1.0, {"acc": 1.0, "format": 1.0, "index": 3.0, "from_gsm8k": 1.0})


@pytest.mark.slow
def test_a_reward_that_nobody_waits_for_any_more_is_not_computed(scoring):
    async def work(pool):
        behind = [asyncio.ensure_future(pool.score("hang", "", {})) for _ in range(4)]
        await asyncio.sleep(0.05)
        for task in behind[1:]:  # one is with the worker already
            task.cancel()
        started = time.monotonic()
        await pool.score("1", "", {})
        return time.monotonic() - started

    assert scoring(work, timeout_s=0.5) < patient(3.5)


def test_a_reward_that_only_a_worker_cannot_build_is_refused_with_its_reason(scoring):
    with pytest.raises(ValueError, match="not in this process"):
        scoring(lambda pool: ask(pool, "1"), reward="sample_rewards.OnlyHere")


@pytest.mark.slow
def test_what_a_reward_started_ends_with_its_worker(scoring, tmp_path):
    async def work(pool):
        reward = await pool.score(f"spawn {tmp_path / 'pid'}", "", {})
        return reward.status, int((tmp_path / "pid").read_text())

    status, child = scoring(work, timeout_s=PATIENCE_S)
    assert status is RewardStatus.TIMEOUT
    deadline = time.monotonic() + patient(5)
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid):
    try:
        return (
            "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path("/proc").is_dir() else os.kill(pid, 0)
        )
    except OSError:
        return False


def test_closing_leaves_no_process_and_nobody_waiting(scoring):
    async def work(pool):
        waiting = [asyncio.ensure_future(pool.score("hang", "", {})) for _ in range(5)]
        await asyncio.sleep(0.3)
        processes = len(_workers())
        await pool.close()
        await asyncio.sleep(0)
        return processes, [w.cancelled() for w in waiting]

    processes, cancelled = scoring(work)
    assert processes >= 1 and all(cancelled)
    assert not _workers()


@pytest.mark.skipif(bool(missing()), reason=missing() or "confined here")
@pytest.mark.parametrize(("reward", "filtered"), [("exact_match", "2"), (MISBEHAVING, "0")])
def test_the_kernel_says_that_our_rules_are_confined_and_a_users_code_is_not(scoring, monkeypatch, reward, filtered):
    monkeypatch.setenv("SECRET_KEY", "sk-1")

    async def work(pool):
        await pool.score("1", "=1", {})
        pid = max(map(int, _workers()))  # the youngest: a fork of the template, where there is one
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
        return status, "SECRET_KEY" in Path(f"/proc/{pid}/environ").read_text()

    status, secret_known = scoring(work, reward=reward)
    assert status["Seccomp"] == filtered and status["NoNewPrivs"] == ("1" if filtered == "2" else "0")
    assert filtered == "0" or int(status["CapEff"], 16) == 0
    assert secret_known == (filtered == "0")


def test_a_rules_worker_that_is_killed_is_replaced_and_so_is_the_process_it_was_forked_from(scoring):
    others = _workers()

    async def work(pool):
        before = {int(pid) for pid in _workers() - others}
        for victim in (max(before), min(before)):  # a worker, then the template of all
            os.kill(victim, signal.SIGKILL)
            rewards = await asyncio.gather(*(pool.score(f"={n}", "1", {}) for n in range(20)))
            assert [r.score for r in rewards] == [n == 1 for n in range(20)]
        deadline = time.monotonic() + patient(5)
        while (left := before & {int(pid) for pid in _workers()}) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return left

    assert not scoring(work, reward="exact_match", num_workers=2)


@pytest.mark.slow
def test_behind_a_hanging_expression_nobody_waits_for_its_time_out_and_two_more_only_fill_the_places_aside(scoring):
    pytest.importorskip("math_verify")

    async def work(pool):
        order = []

        async def ask_one(name, text):
            reward = await pool.score(text, "7", {})
            order.append(name)
            return reward

        bad, good = r"\boxed{9^{9^{9^9}}}", r"\boxed{\frac{14}{2}}"
        asked = [("bad", bad), *[("good", good)] * 10, ("bad", bad), ("bad", bad), *[("late", good)] * 10]
        rewards = await asyncio.gather(*(ask_one(name, text) for name, text in asked))
        return [(name, r) for (name, _), r in zip(asked, rewards, strict=True)], order, pool.timeouts, pool.crashes

    rewards, order, timeouts, crashes = scoring(work, reward="math_rule", timeout_s=1.5)
    assert all(r.status is RewardStatus.TIMEOUT if name == "bad" else r.score == 1 for name, r in rewards)
    assert order.index("bad") >= 10, "the samples behind the first one waited for it"
    assert (timeouts, crashes) == (3, 0)


@pytest.mark.slow
def test_a_spare_that_died_while_it_waited_does_not_take_a_sample_with_it(scoring):
    async def work(pool):
        while len(_workers()) < 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)  # the spare is ready
        for pid in sorted(map(int, _workers()), reverse=True):  # the spare first
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.05)
        return await pool.score("7", "", {})

    assert scoring(work, timeout_s=5.0).score == 7


@pytest.mark.slow
def test_a_confined_worker_can_tell_languages(scoring):
    pytest.importorskip("py3langid")
    truth = '{"kind": "language:response_language", "language": "fr"}'

    async def work(pool):
        return [
            (await pool.score(text, truth, {})).score for text in ("Il fait beau aujourd'hui.", "It is fine today.")
        ]

    assert scoring(work, reward="ifeval") == [1.0, 0.0]


def _workers():
    """Numbers of all processes below this one that judge, or that those are forked from."""
    parents = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            command = (entry / "cmdline").read_text()
        except (OSError, NotADirectoryError):
            continue
        if "roll_async.rewards.serving.worker" in command:
            parents[entry.name] = parent
    mine = {pid for pid, parent in parents.items() if parent == str(os.getpid())}
    return mine | {pid for pid, parent in parents.items() if parent in mine}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("exact_mach", "'exact_mach' is not one of math_rule | exact_match"),
        ("no_such_module.Reward", "no_such_module"),
        ("sample_rewards.Missing", "Missing"),
        ("sample_rewards.NeverBuilt", r"KeyError: 'key' \[.*sample_rewards.py:\d+, in __init__\]"),
    ],
)
def test_a_reward_that_cannot_be_built_is_refused_before_any_process_starts(scoring, reward, message):
    with pytest.raises(ValueError, match=message):
        scoring(lambda pool: ask(pool, "1"), reward=reward)
