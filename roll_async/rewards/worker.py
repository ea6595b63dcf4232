"""A reward worker process: reads one JSON task per line, answers one JSON verdict per line, ends when its input ends.

Run as `python -m roll_async.rewards.worker REWARD MEMORY_MB`. The end of input comes also when the parent is killed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time

from roll_async.rewards.registry import create_reward


def _limit(memory_mb: int) -> None:
    """Memory is bounded, so that an exploding expression ends in MemoryError or a dead worker, never in a swapping
    host.
    """
    limit = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print; what they print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _limit(int(sys.argv[2]))
    reward = create_reward(sys.argv[1])
    for line in sys.stdin:
        task = json.loads(line)
        started = time.perf_counter()
        try:
            verdict = reward(task["text"], task["ground_truth"], task["extra"])
            answer = {
                "score": float(verdict.score),
                "metrics": {"acc": verdict.acc, "format": verdict.format, **verdict.metrics},
                "reason": verdict.reason,
                "status": "ok",
            }
        except Exception as error:  # the model's text or a user's reward: counted as an outage, never as a score
            answer = {
                "score": 0.0,
                "metrics": {},
                "reason": f"{type(error).__name__}: {error}"[:500],
                "status": "outage",
            }
        answer["scoring_s"] = time.perf_counter() - started
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
