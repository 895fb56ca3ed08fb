"""Create a run as usual with Prefect, which works with any Prefect server. Usage: ``python delay.py``."""

import sys
import time

from tasks import count

PATIENCE = 60.0

if __name__ == "__main__":
    future = count.delay("total", times=3)
    # The state is asked for: `future.wait()` would need servers that share their events, too.
    end = time.monotonic() + PATIENCE
    while not future.state.is_final():
        if time.monotonic() > end:
            sys.exit(f"still {future.state.name} after {PATIENCE:.0f} s: is a worker connected?")
        time.sleep(0.2)
    print(future.state.name)
