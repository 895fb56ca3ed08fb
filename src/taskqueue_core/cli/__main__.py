"""``python -m taskqueue_core.cli`` is ``taskqueue``."""

import sys

from taskqueue_core.cli import main

sys.exit(main())
