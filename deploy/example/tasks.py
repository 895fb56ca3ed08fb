"""The tasks of the example in compose.yaml and kubernetes.yaml."""

from taskqueue_worker import Worker

worker = Worker()


@worker.task("resize")
async def resize(url: str) -> str:
    """Say what would be done."""
    return f"resized {url}"
