"""Start a fully asynchronous run.

    python examples/fully_async_main.py [--config-path DIR --config-name NAME] [KEY=VALUE ...]

Without a config it runs configs/fully_async_cpu.yaml: the CPU demo, half a batch ahead, in streaming mode. It may be
typed in any folder; the output is there, what the demo needs (`make demo-assets`) in the repository.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from roll_async.commands.fully_async import FullyAsyncMain

    sys.exit(FullyAsyncMain().run(sys.argv[1:]))
