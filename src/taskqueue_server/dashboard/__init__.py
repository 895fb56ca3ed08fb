"""The dashboard: pages for operators, rendered here and kept up to date by one stream of events."""

from taskqueue_server.dashboard.app import OPERATIONS, ROUTES, page_routes
from taskqueue_server.dashboard.sampler import StatsPoller

__all__ = ["OPERATIONS", "ROUTES", "StatsPoller", "page_routes"]
