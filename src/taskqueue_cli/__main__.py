"""Entry point of ``python -m taskqueue_cli``, which is the command ``taskqueue``."""

import sys

from taskqueue_cli import main

sys.exit(main())
