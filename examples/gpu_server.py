"""A model server that shares its GPU between a dispatcher and clients that call it directly.

    python examples/gpu_server.py 9000

Register http://127.0.0.1:9000/generate with the dispatcher as an endpoint with 2 slots, or call it directly:

    curl http://127.0.0.1:9000/generate -d '{"prompt": "a sunset"}'
    curl http://127.0.0.1:9000/status/<job_id of the response>
"""

import sys
import time

import uvicorn

from taskqueue_dispatch.gpu_server.component import GpuServer
from taskqueue_dispatch.gpu_server.jobs import GpuJob, JobRefused

SLOTS = 2
STEPS = 4


def generate(job: GpuJob) -> dict[str, object]:
    """Run the model. This plain function runs in a thread; an async function would run in the event loop."""
    prompt = job.payload.get("prompt") if isinstance(job.payload, dict) else None
    if not isinstance(prompt, str):
        raise JobRefused("prompt: a text is wanted")  # another attempt would fail too
    for step in range(STEPS):
        time.sleep(0.01)  # stands for the work of the GPU
        job.progress = (step + 1) / STEPS
    return {"prompt": prompt, "image": f"https://images.example/{job.id}.png"}


app = GpuServer(generate, max_concurrent=SLOTS)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if sys.argv[1:] else 9000)
