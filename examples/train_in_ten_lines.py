"""A run in ten lines of Python, on the demo's assets (`make demo-assets`): a tiny model learns to add.

python examples/train_in_ten_lines.py [STEPS]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async import train

ASSETS = "output/demo_assets"


def reward(text, ground_truth, extra):
    return float(text.rstrip().endswith(f"={ground_truth}"))


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    run = train(f"{ASSETS}/model", f"{ASSETS}/train.jsonl", reward, steps=steps, gpus=0, response_length=96)
    print(f"reward {run.metrics[0]['reward/mean']:.2f} -> {run.metrics[-1]['reward/mean']:.2f}; model in {run.hf}")
