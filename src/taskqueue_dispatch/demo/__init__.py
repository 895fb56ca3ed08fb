"""The demo of the dispatcher: simulated GPU servers, a crash and a false report, and a report at the end."""

from taskqueue_dispatch.demo.plan import DemoOptions
from taskqueue_dispatch.demo.run import run_demo

__all__ = ["DemoOptions", "run_demo"]
