"""A reward worker process: reads one JSON task per line, answers one JSON verdict per line, ends when its input ends.

    python -m roll_async.rewards.worker '{"reward": "math_rule", "memory_mb": 4096, "options": {}}'

The first line says that it is ready, or why it cannot be. The end of input comes also when the parent ends; when the
parent is killed while a reward computes, the kernel ends the worker (Linux).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import TextIO

from roll_async.rewards.registry import create_reward, is_rule
from roll_async.rewards.sandbox.confine import Confinement, confine, die_with_parent, limit_memory
from roll_async.rewards.verdict import RewardFunction

_WARM_UP = {
    "math_rule": (
        ("12", "13"), (r"\frac{1}{2}", "0.5"), ("1,234.50", "1234.5"), (r"\sqrt{2}", r"2^{1/2}"), ("x^2+1", "1+x^2"),
        (r"\{1,2\}", r"\{2,1\}"), ("(1,2)", "[1,2)"), (r"\frac{\pi}{3}", r"60^\circ"), (r"5\text{ cm}", "5"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "7"), ("x=3", "3"), (r"12\%", "0.12"), ("2/3", r"\dfrac{4}{6}"),
        (r"x \le 3", r"(-\infty,3]"), (r"\log_2 8", "3"), ("-7", r"\frac{-14}{2}"),
    )
}  # fmt: skip
"""First calls, (stated, reference): they import what is imported late and fill the caches of the LaTeX parser, seconds
that must not count against a sample.
"""


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    # Libraries print; what they print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    die_with_parent(settings["parent"])
    try:
        reward = _prepare(settings)
    except Exception as error:  # a user's module may raise anything; the pool reports it
        _say(answers, {"error": f"{type(error).__name__}: {error}"[:2000]})
        return
    _say(answers, {"ready": True})
    for line in sys.stdin:
        _say(answers, _judge(reward, json.loads(line)))


def _prepare(settings: dict) -> RewardFunction:
    """Build the reward and give up every right it does not need."""
    limit_memory(settings["memory_mb"] << 20)
    reward = create_reward(settings["reward"], settings["options"])
    if is_rule(settings["reward"]):
        for stated, reference in _WARM_UP.get(settings["reward"], ()):
            reward(rf"\boxed{{{stated}}}", reference, {})
        confine(Confinement(read=tuple(p for p in sys.path if p), write=()))
    return reward


def _judge(reward: RewardFunction, task: dict) -> dict:
    started = time.perf_counter()
    try:
        verdict = reward(task["text"], task["ground_truth"], task["extra"])
        answer = {
            "score": verdict.score,
            "metrics": {"acc": verdict.acc, "format": verdict.format, **verdict.metrics},
            "reason": verdict.reason,
            "status": "ok",
        }
    except ConnectionError as error:
        answer = _no_score("outage", error)
    except (MemoryError, RecursionError) as error:
        answer = _no_score("timeout", error)
    except Exception as error:  # the model's text or a user's reward: a state of its own, never a score
        answer = _no_score("error", error)
    return {**answer, "scoring_s": time.perf_counter() - started}


def _no_score(status: str, error: Exception) -> dict:
    return {"score": 0.0, "metrics": {}, "reason": f"{type(error).__name__}: {error}"[:500], "status": status}


def _say(answers: TextIO, answer: dict) -> None:
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
