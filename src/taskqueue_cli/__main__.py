"""``python -m taskqueue_cli`` is ``taskqueue``."""

import sys

from taskqueue_cli import main

sys.exit(main())
