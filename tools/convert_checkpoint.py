"""Hugging Face checkpoints to Megatron's torch_dist format and back; `roll-async convert` from a checkout.

python tools/convert_checkpoint.py SOURCE TARGET [--dtype bf16] [--adapter-path DIR] [--like DIR] [--verify]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.commands.convert import run_convert

if __name__ == "__main__":
    sys.exit(run_convert(sys.argv[1:]))
