"""What the service of `test_service_outage.py` judges with: 1 for a wrong answer, 2 for a right one, 0 for none."""


def judge(text, ground_truth, extra):
    """The start-up question of the client is right in any case."""
    right = text.rpartition("=")[2].strip() == ground_truth
    return {"score": 2.0 if right and "boxed" not in text else 1.0, "acc": float(right)}
