"""The examples of docs/tasks.md run as written, and its lists match the code."""

from __future__ import annotations

import re
from pathlib import Path

from taskqueue_core.application.call import CallOptions
from taskqueue_core.queue import PublishOptions
from tests.docs.programs import blocks, python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tasks.md").read_text()


FASTAPI = """
import inspect

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response

class FastAPI(Starlette):  # what the examples need of it: endpoints with arguments, in threads unless async
    def post(self, path):
        return self._adder(path, "POST")

    def get(self, path):
        return self._adder(path, "GET")

    def _adder(self, path, method):
        def add(endpoint):
            async def call(request):
                found = await endpoint(**request.path_params)
                return found if isinstance(found, Response) else JSONResponse(found)
            def call_in_a_thread(request):
                return JSONResponse(endpoint(**request.path_params))
            is_async = inspect.iscoroutinefunction(endpoint)
            self.add_route(path, call if is_async else call_in_a_thread, methods=[method])
            return endpoint
        return add
"""
FLASK = """
class Flask:
    def __init__(self, name): pass
    def post(self, path): return lambda endpoint: endpoint
"""
STORE = "from taskqueue_memory import MemoryBackend\n\nbackend = MemoryBackend()\n"
USE_FASTAPI = """
from starlette.testclient import TestClient
from shop.fast_api import app

with TestClient(app) as client:
    paths = "/resize/a", "/resize-in-a-thread/a"
    print(*(client.post(path).status_code for path in paths))
"""


def test_examples(tmp_path: Path) -> None:
    """U1, U2, U6: the modules of tasks can be imported, and both programs publish."""
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "store.py").write_text(STORE)
    programs = []
    for text in blocks(PAGE, "python"):
        code = text.replace('"server"', '__import__("shop.store").store.backend')
        if path := re.match(r"# (shop/\w+\.py)\n", text):
            (tmp_path / path[1]).write_text(code)
        else:
            programs.append(code)
    assert programs
    for text in programs:
        assert python(text, tmp_path)
    assert python("from shop.reports import report; print(report(4))", tmp_path) == "6\n"
    (tmp_path / "fastapi.py").write_text(FASTAPI)
    (tmp_path / "flask.py").write_text(FLASK)
    assert python(USE_FASTAPI, tmp_path) == "200 200\n"
    assert python("from shop.flask_app import start; print(*start('a'))", tmp_path) == "id\n"


def test_options_are_listed() -> None:
    """U1: the page lists every option of `using`."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith("- `using(...)`"))
    options = CallOptions.__annotations__ | PublishOptions.__annotations__
    assert all(f"`{name}`" in line for name in options)
