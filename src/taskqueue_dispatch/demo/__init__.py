"""The demonstration: a dispatcher, simulated servers, a crash and a lie, and an account at the end."""

from taskqueue_dispatch.demo.plan import DemoOptions
from taskqueue_dispatch.demo.report import DispatchDemoReport
from taskqueue_dispatch.demo.run import run_demo
from taskqueue_dispatch.demo.view import View, view_for

__all__ = ["DemoOptions", "DispatchDemoReport", "View", "run_demo", "view_for"]
