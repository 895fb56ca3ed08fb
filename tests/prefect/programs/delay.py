"""Call ``.delay()`` on tasks of `background`, and print the runs' ids.

Usage: ``delay.py COUNT PREFIX [SECONDS [TASK COUNT PREFIX]…]``. The first COUNT runs are of `work`, and sleep for
SECONDS.
"""

import json
import sys

import background

count, prefix, *more = sys.argv[1:]
seconds = float(more.pop(0)) if more else 0.0
futures = [background.work.delay(f"{prefix}{n}", seconds=seconds) for n in range(int(count))]
for task, count, prefix in zip(more[::3], more[1::3], more[2::3], strict=True):
    futures += [getattr(background, task).delay(f"{prefix}{n}") for n in range(int(count))]
sys.stdout.write(json.dumps([str(future.task_run_id) for future in futures]))
