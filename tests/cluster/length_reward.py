"""A reward any model earns now and then, however badly it is trained (imported by dotted path in another process)."""

from roll_async.rewards.verdict import Verdict


class LengthReward:
    """1 for texts whose length is a multiple of three."""

    def __call__(self, text, ground_truth, extra):
        right = float(len(text) % 3 == 0)
        return Verdict(score=right, acc=right)
