"""A reward with spread in every group, whatever the model can do (imported by dotted path in a reward worker)."""


def digit_parity(text: str, ground_truth: str, extra: dict) -> float:
    """1.0 where the digits of the answer add up to an even number."""
    return float(sum(int(c) for c in text if c.isdigit()) % 2 == 0)
