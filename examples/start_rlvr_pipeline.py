"""Start an RLVR run.

    python examples/start_rlvr_pipeline.py --config rlvr_config_async_cpu.yaml [KEY=VALUE ...]

The config is looked up in the working directory, then in `configs/`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from roll_async.commands.run import launch

    sys.exit(launch("start_rlvr_pipeline.py", sys.argv[1:], pipeline="rlvr"))
