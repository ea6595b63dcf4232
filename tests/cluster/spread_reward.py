"""A reward with spread in every group, whatever the model can do (imported by dotted path in a reward worker)."""

from zlib import crc32


def checksum(text: str, ground_truth: str, extra: dict) -> float:
    """In [0, 1], another one for every other answer: in each group one is the best."""
    return crc32(text.encode()) / (2**32 - 1)


def digit_parity(text: str, ground_truth: str, extra: dict) -> float:
    """1.0 where the digits of the answer add up to an even number."""
    return float(sum(int(c) for c in text if c.isdigit()) % 2 == 0)


def two_or_three(text: str, ground_truth: str, extra: dict) -> dict:
    """3.0 where the digits of the answer add up to a multiple of three, else 2.0: no other reward says either."""
    right = sum(int(c) for c in text if c.isdigit()) % 3 == 0
    return {"score": 2.0 + right, "acc": right, "thirds": right}
