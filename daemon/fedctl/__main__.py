"""``python -m daemon.fedctl``: the same as ``fedctl``."""

import sys

from daemon.fedctl.main import main

sys.exit(main())
