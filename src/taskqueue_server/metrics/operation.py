"""``/metrics``: for Prometheus. Not part of the API's description: its format is another's."""

from __future__ import annotations

from starlette.responses import Response

from taskqueue_server.auth.access import OPEN
from taskqueue_server.metrics.exporter import Metrics
from taskqueue_server.routing.operations import Call, Operation
from taskqueue_server.routing.operations import Scope as TokenScope

__all__ = ["OPERATIONS"]


async def metrics(call: Call) -> Response:
    """Return metrics as Prometheus' text, or as OpenMetrics where that is asked for."""
    known: Metrics = call.request.app.state.metrics
    accept = call.request.headers.get("accept", "")
    text, media_type = await known.render(call.identity or OPEN, accept)
    return Response(text, headers={"content-type": media_type})


OPERATIONS = (
    Operation(
        id="operation_metrics",
        method="GET",
        path="/metrics",
        handler=metrics,
        verb="admin",
        scope=TokenScope.HANDLER,
        answers={200: str},
    ),
)
