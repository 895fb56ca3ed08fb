"""Delay runs of a task of `background`, and print their ids: ``delay.py COUNT PREFIX [SECONDS] [TASK]``."""

import json
import sys

import background

count, prefix = int(sys.argv[1]), sys.argv[2]
seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
name = sys.argv[4] if len(sys.argv) > 4 else "work"
more = {"seconds": seconds} if name == "work" else {}
futures = [getattr(background, name).delay(f"{prefix}{n}", **more) for n in range(count)]
sys.stdout.write(json.dumps([str(future.task_run_id) for future in futures]))
