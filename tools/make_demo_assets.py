"""The assets of the demo, also larger ones: `python tools/make_demo_assets.py --help`. From a checkout, without an
installation; `roll-async demo` makes the usual ones.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.commands.demo.assets import main

if __name__ == "__main__":
    main()
