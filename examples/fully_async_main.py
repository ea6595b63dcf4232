"""Start a fully asynchronous run.

    python examples/fully_async_main.py [--config-path DIR --config-name NAME] [KEY=VALUE ...]

Without a config it runs configs/fully_async_cpu.yaml: the CPU demo, half a batch ahead, in streaming mode.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    if not any(arg.startswith("--config") for arg in sys.argv):
        os.chdir(ROOT)  # the demo's assets and output are in the repository, wherever it is started from
    from roll_async.commands.fully_async import FullyAsyncMain

    sys.exit(FullyAsyncMain().run(sys.argv[1:]))
