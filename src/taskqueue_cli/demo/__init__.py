"""The demonstration: a server, workers and a real job, with failures on purpose and an account at the end."""

from taskqueue_cli.demo.cluster import DemoFailed
from taskqueue_cli.demo.plan import DemoOptions
from taskqueue_cli.demo.report import Report
from taskqueue_cli.demo.run import run_demo
from taskqueue_cli.demo.view import View, view_for

__all__ = ["DemoFailed", "DemoOptions", "Report", "View", "run_demo", "view_for"]
