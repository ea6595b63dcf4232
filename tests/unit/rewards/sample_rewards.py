"""Rewards that misbehave, for the workers of `test_reward_pool.py` (imported by dotted path in another process)."""

import json
import os
import subprocess
import sys
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
            case "library":
                return json.loads("{")
            case "exit":
                sys.exit("as in a script")
            case "nothing":
                return None
            case "down":
                raise ConnectionRefusedError("refused")
            case "recurse":
                return self("recurse", ground_truth, extra)
            case "print":
                print("noise between the answers", flush=True)
                os.system("echo more noise")
                text = "1"
            case "fork":
                if os.fork() == 0:
                    raise ValueError("the child does not know that it is one")
                os.wait()
                return Verdict(score=7.0, acc=1.0)
            case "eat":
                return Verdict(score=float(len(bytearray(1 << 31))), acc=1.0)
        if text.startswith("spawn "):
            with open(text.removeprefix("spawn "), "w") as file:
                file.write(str(subprocess.Popen(["sleep", "60"]).pid))
            time.sleep(1000)
        return Verdict(
            score=float(text), acc=1.0, metrics={"length": float(len(ground_truth))}, reason=extra.get("why", "")
        )


def constant(text, ground_truth, extra):
    """A plain function is a reward, too."""
    return Verdict(score=0.5, acc=0.0)


class NeedsArguments:
    def __init__(self, path):
        self.path = path


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature and its dictionary."""
    return {
        "score": float(solution_str == ground_truth),
        "acc": solution_str == ground_truth,
        "pred": solution_str,
        "index": extra_info["index"],
        "from_gsm8k": data_source == "gsm8k",
    }


class OnlyHere:
    """Can be built in the process of the test, not in a worker."""

    def __init__(self):
        if os.environ.get("OMP_NUM_THREADS") == "1" and "pytest" not in sys.modules:
            raise OSError("not in this process")

    def __call__(self, text, ground_truth, extra):
        return 1.0


class BuiltAtTheSecondAttempt:
    """Its table is in a folder of the network that is away for a moment."""

    def __init__(self, mark):
        if not os.path.exists(mark):
            open(mark, "w").close()
            raise OSError(116, "Stale file handle")

    def __call__(self, text, ground_truth, extra):
        return 1.0


class NeverBuilt:
    def __init__(self):
        {}["key"]
