"""The parts of the demonstration that need no process."""

import hashlib
import os
import zlib
from pathlib import Path

import msgspec
import pytest

from taskqueue_cli.demo.check import compare
from taskqueue_cli.demo.job import measure
from taskqueue_cli.demo.plan import make_plan
from taskqueue_core.errors import InvalidInput


class Results:
    """A control interface with some known results."""

    def __init__(self, results: dict[str, bytes]) -> None:
        self.known = results

    async def results(self, _key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        """Return the known results."""
        return tuple(self.known.get(task_id) for task_id in task_ids)


@pytest.mark.parametrize(
    ("content", "lines"),
    [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n\n", 2), (b"line\n" * 200_000, 200_000)],
)
def test_measuring_in_pieces_is_measuring(content: bytes, lines: int, tmp_path: Path) -> None:
    """A file that is measured in chunks has the same measurements as one that is read at once."""
    path = tmp_path / "file"
    path.write_bytes(content)
    assert measure(str(path)) == {
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "lines": lines,
        "compressed": len(zlib.compress(content)),
    }


def test_a_file_that_cannot_be_read_has_a_result_too(tmp_path: Path) -> None:
    """A file that cannot be read has a result with an error, the same for the worker and the comparison."""
    assert measure(str(tmp_path / "missing")) == {"error": "FileNotFoundError"}
    assert measure(str(tmp_path)) == {"error": "IsADirectoryError"}


def test_a_plan_takes_regular_files_and_no_caches(tmp_path: Path) -> None:
    """A plan skips caches, compiled files, links, pipes and names that JSON cannot express."""
    for name in ("b.py", "a.py", "a.pyc", "__pycache__/c.py", "site-packages/d.py", "sub/e.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "link").symlink_to("a.py")
    os.mkfifo(tmp_path / "pipe")
    with Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).open("w"):
        pass
    plan = make_plan(tmp_path, None)
    names = [str(Path(file.path).relative_to(tmp_path)) for file in plan.files]
    assert names == ["a.py", "b.py", "sub/e.txt"]
    assert len(make_plan(tmp_path, 2).files) == 2
    assert len(make_plan(tmp_path / "a.py", None).files) == 1


def test_a_plan_fails_the_same_files_each_time_and_at_least_one(tmp_path: Path) -> None:
    """The files whose first attempt fails depend only on their paths; ids and queue name are new in each run."""
    for n in range(500):
        (tmp_path / f"{n}.txt").touch()
    first, second = make_plan(tmp_path, None), make_plan(tmp_path, None)
    assert first.failing == second.failing
    assert 1 <= len(first.failing) <= 15
    assert first.key != second.key
    tasks = list(first.tasks())
    assert len(tasks) == first.total == 501
    assert tasks[0].id == first.poison_id
    marked = {n for n, task in enumerate(tasks[1:]) if "fails_first" in task.value()}
    assert marked == first.failing
    assert len(make_plan(tmp_path / "7.txt", None).failing) == 1


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_plan_without_files_is_refused(name: str, tmp_path: Path) -> None:
    """A plan without any file is refused."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput):
        make_plan(tmp_path / name, None)


async def test_a_comparison_finds_what_is_wrong_or_absent(tmp_path: Path) -> None:
    """A wrong and a missing result are mismatches, but a file that has changed since its task ran is not."""
    for name in ("changed", "missing", "right", "wrong"):
        (tmp_path / name).write_text(name)
    plan = make_plan(tmp_path, None)
    known = {
        plan.task_id(n): msgspec.json.encode(measure(file.path))
        for n, file in enumerate(plan.files)
        if not file.path.endswith("missing")
    }
    known[plan.task_id(3)] = known[plan.task_id(2)]
    (tmp_path / "changed").write_text("changed since")
    seen: list[int] = []
    found = await compare(Results(known), plan, seen.append)  # type: ignore[arg-type]
    assert [Path(path).name for path in found.mismatches] == ["missing", "wrong"]
    assert (found.compared, found.changed, found.unreadable) == (4, 1, 0)
    assert seen == [4]
