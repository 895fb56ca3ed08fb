"""The demonstration: a server, workers and a real job, with failures on purpose and an account at the end."""

from taskqueue_core.demo.cluster import DemoFailed
from taskqueue_core.demo.options import DemoOptions
from taskqueue_core.demo.report import Report
from taskqueue_core.demo.run import run_demo
from taskqueue_core.demo.view import View, view_for

__all__ = ["DemoFailed", "DemoOptions", "Report", "View", "run_demo", "view_for"]
