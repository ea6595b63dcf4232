"""Start an agentic run: trajectories of many turns in worlds, or of agents of your own.

    python examples/start_agentic_pipeline.py --config agentic_frozen_lake_async_cpu.yaml [KEY=VALUE ...]

The config is looked up in the working directory, then in `configs/`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from roll_async.commands.run import launch

    sys.exit(launch("start_agentic_pipeline.py", sys.argv[1:], pipeline="agentic"))
