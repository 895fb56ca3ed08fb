"""The dashboard: pages for operators, rendered by the server and updated by a stream of events."""

from taskqueue_server.dashboard.app import OPERATIONS, ROUTES, page_routes
from taskqueue_server.dashboard.poller import StatsPoller

__all__ = ["OPERATIONS", "ROUTES", "StatsPoller", "page_routes"]
