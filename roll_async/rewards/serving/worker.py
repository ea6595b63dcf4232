"""A reward worker process: reads one JSON task per line, answers one JSON verdict per line, ends when its input ends.

    python -m roll_async.rewards.serving.worker '{"reward": "math_rule", "memory_mb": 4096, "options": {}, ...}'

With `fork` the process is a template: it builds the reward and warms it up, and every worker is a fork of it. The end
of input comes also when the parent ends; when the parent is killed while a reward computes, the kernel ends the worker
(Linux).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from functools import partial

from roll_async.config.user_code import place_of, traceback_of
from roll_async.observe.outside import message_of, text_of
from roll_async.processes.child import connect, say, serve_forks
from roll_async.rewards.registry import Judge, create_reward, is_rule
from roll_async.rewards.sandbox.confine import Confinement, confine, die_with_parent, limit_memory

_WARM_UP = {
    "math_rule": (
        ("12", "13"), (r"\frac{1}{2}", "0.5"), ("1,234.50", "1234.5"), (r"\sqrt{2}", r"2^{1/2}"), ("x^2+1", "1+x^2"),
        (r"\{1,2\}", r"\{2,1\}"), ("(1,2)", "[1,2)"), (r"\frac{\pi}{3}", r"60^\circ"), (r"5\text{ cm}", "5"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "7"), ("x=3", "3"), (r"12\%", "0.12"), ("2/3", r"\dfrac{4}{6}"),
        (r"x \le 3", r"(-\infty,3]"), (r"\log_2 8", "3"), ("-7", r"\frac{-14}{2}"),
    ),
    **dict.fromkeys(
        ("ifeval", "ifeval_strict"), (("a word", '{"kind": "language:response_language", "language": "en"}'),)
    ),
}  # fmt: skip
"""First calls, (stated, reference): they load what is loaded late and fill the caches of the LaTeX parser, seconds that
must not count against a sample.
"""
_LONGEST_REASON = 500


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends its processes itself
    settings, channel = connect()
    die_with_parent(settings["parent"])
    try:
        limit_memory(settings["memory_mb"] << 20)
        reward = create_reward(settings["reward"], settings["options"])
        for stated, reference in _WARM_UP.get(settings["reward"], ()):
            reward(rf"\boxed{{{stated}}}", reference, {})
    except Exception as error:  # a user's module may raise anything; the pool reports it
        say(channel, {"error": f"{type(error).__name__}: {error}"[:2000]})
        return
    if settings["fork"]:
        assert is_rule(settings["reward"]), "a fork breaks what a user's reward may hold"
        serve_forks(channel, partial(_serve_confined, reward, os.getpid()))
    else:
        _serve(reward, channel)


def _serve(reward: Judge, channel: socket.socket) -> None:
    me = os.getpid()
    say(channel, {"ready": True})
    for line in channel.makefile("rb"):
        answer = _judge(reward, json.loads(line))
        if os.getpid() != me:
            os._exit(0)  # a child that the reward has forked and lost: the parent answers, and goes on reading
        say(channel, answer)


def _serve_confined(reward: Judge, template: int, channel: socket.socket) -> None:
    """In the fork, which gives up every right that a rule does not need. `template`: the process it is a fork of."""
    die_with_parent(template)
    try:
        # Libraries are read: what a rule needs may be imported with a sample.
        confine(Confinement(read=tuple(p for p in sys.path if p), write=()))
    except OSError as error:
        say(channel, {"error": f"it cannot be confined: {error}"})
    else:
        _serve(reward, channel)


def _judge(reward: Judge, task: dict) -> dict:
    started = time.perf_counter()
    try:
        verdict = reward(task["text"], task["ground_truth"], task["extra"])
        answer = {
            "score": float(verdict.score),
            "metrics": {
                str(name): float(value)
                for name, value in {"acc": verdict.acc, "format": verdict.format, **verdict.metrics}.items()
            },
            "reason": text_of(verdict.reason, _LONGEST_REASON),
            "status": "ok",
        }
    except ConnectionError as error:
        answer = _no_score("outage", error)
    except MemoryError as error:  # what holds the memory is in its traceback
        answer = _no_score("timeout", error)
    except BaseException as error:  # the model's text or a user's reward: a state of its own, never a score
        answer = _no_score("timeout" if isinstance(error, RecursionError) else "error", error)
        answer |= {"place": place_of(error) or reward.place, "traceback": traceback_of(error)}
    return {**answer, "scoring_s": time.perf_counter() - started}


def _no_score(status: str, error: BaseException) -> dict:
    reason = " ".join(f"{type(error).__name__}: {message_of(error)}".split())
    return {"score": 0.0, "metrics": {}, "reason": reason, "status": status}


if __name__ == "__main__":
    main()
