"""A reward worker process: reads one JSON task per line, answers one JSON verdict per line, ends when its input ends.

    python -m roll_async.rewards.worker '{"reward": "math_rule", "memory_mb": 4096, "options": {}, "fd": 3, ...}'

The first line says that it is ready, or why it cannot be. With `fork` the process is a template: it builds the reward
and warms it up, and every worker is a fork of it. The end of input comes also when the parent ends; when the parent is
killed while a reward computes, the kernel ends the worker (Linux).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time

from roll_async.config.user_code import place_of, traceback_of
from roll_async.observe.outside import message_of, text_of
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    os.set_inheritable(settings["fd"], False)  # what a user's reward starts must not keep it open
    channel = socket.socket(fileno=settings["fd"])
    die_with_parent(settings["parent"])
    try:
        limit_memory(settings["memory_mb"] << 20)
        reward = create_reward(settings["reward"], settings["options"])
        for stated, reference in _WARM_UP.get(settings["reward"], ()):
            reward(rf"\boxed{{{stated}}}", reference, {})
    except Exception as error:  # a user's module may raise anything; the pool reports it
        _say(channel, {"error": f"{type(error).__name__}: {error}"[:2000]})
        return
    if settings["fork"]:
        assert is_rule(settings["reward"]), "a fork breaks what a user's reward may hold"
        _say(channel, {"ready": True})
        _serve_forks(channel, reward)
    else:
        _serve(channel, reward)


def _serve(channel: socket.socket, reward: Judge) -> None:
    _say(channel, {"ready": True})
    for line in channel.makefile("rb"):
        _say(channel, _judge(reward, json.loads(line)))


def _serve_forks(control: socket.socket, reward: Judge) -> None:
    """`fork` with a socket: a worker behind it, the answer is its number. A number: its exit status, once it ended."""
    template = os.getpid()
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages it shares with all others
    while True:
        message, ends, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            return
        if message != b"fork":
            control.sendall(b"%d" % _exit_status(int(message)))
            continue
        try:
            pid = os.fork()
        except OSError as error:
            control.sendall(f"!fork: {error}".encode())
            pid = -1
        if pid == 0:
            control.close()
            _become_worker(socket.socket(fileno=ends[0]), reward, template)
        os.close(ends[0])
        if pid > 0:
            control.sendall(b"%d" % pid)


def _exit_status(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # of a template that ended
        return -signal.SIGKILL


def _become_worker(channel: socket.socket, reward: Judge, template: int) -> None:
    """In the fork; never returns. It gives up every right that a rule does not need."""
    status = 1
    try:
        die_with_parent(template)
        try:
            confine(Confinement(read=tuple(p for p in sys.path if p), write=()))
        except OSError as error:
            _say(channel, {"error": f"it cannot be confined: {error}"})
        else:
            _serve(channel, reward)
            status = 0
    finally:
        os._exit(status)


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


def _say(channel: socket.socket, answer: dict) -> None:
    channel.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
