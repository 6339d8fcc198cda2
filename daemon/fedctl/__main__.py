"""``python -m daemon.fedctl``: the same as ``fedctl``."""

import sys

from daemon.fedctl import main

sys.exit(main())
