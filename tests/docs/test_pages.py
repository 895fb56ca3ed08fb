"""All documentation pages: their links have targets, tests run their commands, and their code works."""

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests.docs.programs import blocks, run

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")  # noqa: S108 - in memory, because a disk takes long to sync each step
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md")
    for page in ROOT.glob(pattern)
    if page.name != "coverage.md"
)
RUN_BY = {
    r"python3 dev\.py (run|test|check|docs|audit)": "tests/dev, and .ci/run",
    r"pip install '(taskqueue-backends|\.)\[": "tests/examples, with the libraries that are there",
    r"pip install \./examples/taskqueue_sqlite": "tests/examples",
    r"taskqueue serve --embedded-redis": "tests/redis/test_serving_embedded.py",
    r"taskqueue token |export TASKQUEUE_TOKENS_FILE=": "tests/security/test_page.py",
    r"TASKQUEUE_TLS_CERTIFICATE=.* taskqueue serve": "tests/security/test_served.py",
    r"taskqueue dispatch demo": "tests/dispatch/test_demo.py",
    r"taskqueue dispatch |python (receiver\.py|-m taskqueue_dispatch\.gpu)": "tests/docs/test_dispatcher_page.py",
    r"export SHOP_KEY=": "tests/docs/test_codecs_page.py",
    r"curl -sS localhost:8420/queue/submit": "tests/docs/test_dispatcher_page.py",
    r"taskqueue (serve|worker|result) |python publish\.py": "tests/docs/test_readme.py",
    r"python ask\.py": "tests/application/test_streaming_page.py",
    r"taskqueue (schedule|apply) ": "tests/docs/test_schedules_page.py",
    r"taskqueue (tasks list|status|erase|queue set mail) ": "tests/docs/test_finding_page.py",
    r"taskqueue (queue|publish|stats|tenant) |curl .*/v1/queues/resize/": "tests/docs/test_flow_page.py",
    r"curl -sS .*localhost:8420/v1/tasks/answer": "tests/application/test_streaming_page.py",
    r"curl -sS .*localhost:8420/v1/(tasks|queues)": "tests/docs/test_http_page.py",
    r"TASKQUEUE_BACKEND=redis .* taskqueue serve": "tests/docs/test_redis_page.py",
    r"python -c .*taskqueue_redis|curl -X PUT .*/settings|redis-cli ": "tests/docs/test_redis_page.py",
    r"TASKQUEUE_BACKEND=sqlite .* taskqueue serve": "tests/examples, by the main job",
    r"TASKQUEUE_BACKEND=redis TASKQUEUE_TOKENS_FILE=": "tests/docs/test_operating_page.py",
    r"TASKQUEUE_SERVER_URL=\S+ node .*worker\.mjs": "tests/redis/test_node_worker.py",
    r"taskqueue demo --journal ": "tests/spark/test_cli_demo.py",
    r"taskqueue pipeline .*--(master spark|remote sc):": "tests/spark, test_standalone.py and test_connect.py",
    r"taskqueue pipeline ": "tests/spark, test_docs.py and test_cli.py",
    r"PREFECT_API_URL=.* python (tasks|submit)\.py": "tests/prefect/test_real_worker.py",
    r"PREFECT_API_URL=.* python delay\.py|prefect server start ": "tests/prefect/test_page.py",
    r"export PREFECT_PLUGINS_ENABLED=true |redis-server --port ": "tests/prefect/test_page.py",
    r"curl -s .*127\.0\.0\.1:4200/api/task_runs/": "tests/prefect/test_page.py",
    r"pytest tests/test_conformance\.py": "test_the_kits_page, below",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Every link to a file of the project has an existing target."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_run(page: Path) -> None:
    """Every command on a page is on the list of commands that some test runs."""
    for command in re.findall(r"^\$ (.+)$", page.read_text(), flags=re.MULTILINE):
        assert any(re.match(known, f"{command} ") for known in RUN_BY), command


def _snippets() -> list[str]:
    return blocks((ROOT / "docs" / "writing-a-backend.md").read_text(), "python")


def _passes_the_kit(folder: Path, snippet: str, *only: str) -> None:
    """Run a part of the conformance kit; other tests prove that the backends pass all of it."""
    (folder / "tests").mkdir()
    (folder / "tests" / "test_conformance.py").write_text(snippet)
    source = ROOT / "examples" / "taskqueue_sqlite" / "src"
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as files:
        printed = run(
            *(sys.executable, "-m", "pytest", "-q", "tests/test_conformance.py"),
            *("-p", "no:schemathesis", "-k", " or ".join(only), f"--basetemp={files}/tests"),
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": f"{folder}{os.pathsep}{source}",
                "TASKQUEUE_KIT_EXAMPLES": "5",
                "TASKQUEUE_MINE_PATH": "of_the_environment",
            },
        )
    assert " passed" in printed


def test_the_kits_page(tmp_path: Path) -> None:
    """G6: the test class on the page for backend authors is enough to run the conformance kit."""
    _, snippet, _ = _snippets()
    (tmp_path / "my_package.py").write_text(
        "from taskqueue_memory import MemoryBackend as MyBackend\n"
    )
    _passes_the_kit(tmp_path, snippet, "capabilities", "resent", "close")


def test_the_pages_record_store(tmp_path: Path) -> None:
    """G3, G6: with a record store, the factory and the test class on the page make a durable backend complete."""
    factory, _, snippet = _snippets()
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text(factory)
    (package / "store.py").write_text("from taskqueue_sqlite.store import SQLiteStore as MyStore\n")
    own = """

def test_the_factory() -> None:
    from taskqueue_core.loading import load_backend

    backend = load_backend("my_package")
    assert str(backend._transitions.store._path) == "of_the_environment"
"""
    only = ("capabilities", "close", "surviv", "the_factory")
    _passes_the_kit(tmp_path, snippet + own, *only)
