"""Rewards that misbehave, for the workers of `test_reward_pool.py` (imported by dotted path in another process)."""

import os
import time

from roll_async.rewards.verdict import Verdict


class Misbehaving:
    """The text says what happens: hang, die, raise, print, eat, or the score as a number."""

    def __call__(self, text, ground_truth, extra):
        match text:
            case "hang":
                time.sleep(1000)
            case "die":
                os._exit(3)
            case "raise":
                raise KeyError("missing")
            case "print":
                print("noise between the answers", flush=True)
                os.system("echo more noise")
                text = "1"
            case "eat":
                return Verdict(score=float(len(bytearray(1 << 31))), acc=1.0)
        return Verdict(
            score=float(text), acc=1.0, metrics={"length": float(len(ground_truth))}, reason=extra.get("why", "")
        )


def constant(text, ground_truth, extra):
    """A plain function is a reward, too."""
    return Verdict(score=0.5, acc=0.0)


class NeedsArguments:
    def __init__(self, path):
        self.path = path
