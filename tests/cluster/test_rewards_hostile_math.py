"""Expressions that hang, explode or attack, through real `math_rule` workers: each costs its own time-out and nothing
else.
"""

import asyncio
import os
import time

import pytest

from roll_async.rewards.sandbox.confine import missing
from roll_async.rewards.serving.pool import RewardPool, RewardPoolOptions
from roll_async.schema import RewardStatus
from tests.patience import patient

pytest.importorskip("math_verify")

TIMEOUT_S = 2.5
HOSTILE = {
    "power tower": r"\boxed{9**9**9**9}",
    "power tower in LaTeX": r"\boxed{9^{9^{9^{9}}}}",
    "factorial of a factorial": r"\boxed{((99999!)!)!}",
    "nested fractions, 1.9 kB": r"\boxed{" + r"\frac{1}{" * 150 + "1" + "}" * 150 + "}",
    "nested fractions, 100 kB": r"\boxed{" + r"\frac{1}{" * 10_000 + "1" + "}" * 10_000 + "}",
    "a huge product": r"\boxed{\prod_{k=1}^{10^{12}} k}",
    "a huge sum": r"\boxed{\sum_{n=1}^{10^{15}} \frac{1}{n}}",
    "digits": r"\boxed{" + "7" * 1900 + "^{" + "3" * 90 + "}}",
    "a hard integral": r"\boxed{\int_0^1 \frac{e^{-x^2} \ln(x+1)}{\sqrt{x^7+3}} dx}",
    "a matrix of sums": r"\boxed{\begin{pmatrix} 9^{9^{9}} & 1 \\ 1 & 9^{9^{9}} \end{pmatrix}^{99999}}",
    "catastrophic regex": "Answer: " + "(" * 900 + "1" + ")" * 899,
    "many equations": r"\boxed{" + "x=1," * 400 + "x=2}",
    "python": r"\boxed{__import__('os').system('touch ESCAPED')}",
    "python in the plain parser": "Answer: 1*(lambda: open('ESCAPED','w'))()",
    "no end": "\\boxed{" * 20_000,
}
GOOD = [(rf"\boxed{{{n}}}", str(n)) for n in range(40)]


@pytest.mark.slow
def test_hostile_expressions_cost_their_own_time_and_leave_their_neighbours_alone(tmp_path):
    escaped = tmp_path / "escaped"

    async def go():
        pool = RewardPool(RewardPoolOptions(reward="math_rule", num_workers=2, timeout_s=TIMEOUT_S, memory_mb=1024))
        await pool.start()
        started = time.monotonic()
        try:
            work = []
            for text, good in zip(HOSTILE.values(), [GOOD[i : i + 2] for i in range(0, 2 * len(HOSTILE), 2)]):
                work.append(pool.score(text.replace("ESCAPED", str(escaped)), "424242", {}))
                work += [pool.score(t, truth, {}) for t, truth in good]
            rewards = await asyncio.gather(*work)
        finally:
            await pool.close()
        return rewards, time.monotonic() - started, pool

    rewards, seconds, pool = asyncio.run(go())
    bad, good = rewards[::3], [r for i, r in enumerate(rewards) if i % 3]
    assert all(r.status is RewardStatus.OK and r.score == 1 for r in good)
    states = dict(zip(HOSTILE, bad, strict=True))
    for name, reward in states.items():
        assert reward.status in (RewardStatus.OK, RewardStatus.TIMEOUT), (name, reward)
        assert reward.status is RewardStatus.TIMEOUT or reward.score == 0, (name, reward)
        assert reward.reason, name
    assert pool.timeouts + pool.crashes >= 1, "none of them was hostile enough to prove anything"
    assert not escaped.exists()
    # Two workers: what is lost is at most each hostile one's own time-out, and twice for one that crashes.
    assert seconds < patient(2 * len(HOSTILE) * TIMEOUT_S)
    print({name: (r.status.value, r.reason[:60], round(r.scoring_s, 2)) for name, r in states.items()})


@pytest.mark.skipif(bool(missing()), reason=missing() or "confined here")
def test_a_rule_worker_has_no_files_network_or_processes_left(tmp_path, monkeypatch):
    """A reward that runs with the rights of `math_rule` and tries what an exploit of its parser would."""
    module = tmp_path / "exploit_reward.py"
    module.write_text(
        "import os, socket\n"
        "def attempt(text, ground_truth, extra):\n"
        "    tries = {'write': lambda: open(text + '/x', 'w'), 'read': lambda: open('/etc/passwd').read(),\n"
        "             'fork': lambda: os.fork() or os._exit(0), 'socket': socket.socket,\n"
        "             'signal': lambda: os.kill(os.getppid(), 0),\n"  # 0 only asks: the free worker's parent is pytest
        "             'key': lambda: os.environ['SECRET_KEY']}\n"
        "    done = []\n"
        "    for name, act in tries.items():\n"
        "        try:\n"
        "            act()\n"
        "            done.append(name)\n"
        "        except (OSError, KeyError):\n"
        "            pass\n"
        "    return {'score': float(len(done)), 'reason': ' '.join(done)}\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("SECRET_KEY", "sk")
    monkeypatch.syspath_prepend(str(tmp_path))
    from roll_async.rewards import registry

    async def go(reward):
        pool = RewardPool(RewardPoolOptions(reward=reward, timeout_s=20.0))
        await pool.start()
        try:
            return await pool.score(str(tmp_path), "", {})
        finally:
            await pool.close()

    free = asyncio.run(go("exploit_reward.attempt"))
    assert set(free.reason.split()) >= {"write", "read", "fork", "socket", "signal", "key"}, (
        free
    )  # a user's own reward keeps its rights
    assert registry.is_rule("math_rule") and not registry.is_rule("exploit_reward.attempt")
    code = (
        "import json, sys\n"
        "from roll_async.rewards.sandbox.confine import Confinement, confine\n"
        "import exploit_reward\n"
        "confine(Confinement(read=tuple(p for p in sys.path if p), write=()))\n"
        f"print(exploit_reward.attempt({str(tmp_path)!r}, '', {{}})['reason'])\n"
    )
    import subprocess
    import sys

    environment = {k: v for k, v in os.environ.items() if k != "SECRET_KEY"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=patient(60)
    )
    assert done.returncode == 0 and done.stdout.strip() == "", done
