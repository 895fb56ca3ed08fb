"""Print a task run as JSON. For each input line, a JSON string, print 1 if Prefect accepts it as a task run, else 0."""

import json
import sys

from prefect.client.schemas.objects import TaskRun
from prefect.states import Scheduled

run = TaskRun(task_key="add-1a2b3c4d", dynamic_key="0", state=Scheduled())
sys.stdout.write(json.dumps(run.model_dump(mode="json")) + "\n")
sys.stdout.flush()
for line in sys.stdin:
    try:
        TaskRun.model_validate_json(json.loads(line))
    except ValueError:
        sys.stdout.write("0\n")
    else:
        sys.stdout.write("1\n")
