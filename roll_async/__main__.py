import sys

from roll_async.cli import main

sys.exit(main())
