"""Tests of the developer commands in dev.py; pip and Python are stubs, and nothing is installed."""

import ast
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import dev

Script = Callable[[str, str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """A function that writes an executable shell script into the folder of the test."""

    def write(place: str, body: str) -> Path:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout with a lock file and a project file, in which dev.py works."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "requirements.lock").write_text("a lock")
    (root / "pyproject.toml").write_text("a project")
    (root / "tests/core").mkdir(parents=True)
    monkeypatch.setattr(dev, "ROOT", str(root))
    return root


@pytest.fixture
def installs(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was installed into the environments of the checkout, as the last word of each install command."""
    done: list[str] = []

    def create(wanted: str | None) -> str:
        folder = checkout / ".venv" / (wanted or "3.13")
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").write_text("an interpreter")
        (folder / "stamp").unlink(missing_ok=True)
        done.append("new")
        return str(folder)

    def install(_folder: str, *arguments: str) -> None:
        done.append(Path(arguments[-1]).name or ".")

    monkeypatch.setattr(dev, "create", create)
    monkeypatch.setattr(dev, "install", install)
    return done


WHOLE = ["new", "uv.txt", "requirements.lock", "."]


def test_a_failing_shim_proves_nothing(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python shim that fails is skipped, and the Python that is installed next to the shims is found."""
    script("shims/python3.13", "echo 'command not found' >&2; exit 127")
    older = script("shims/python3", "echo 3.12 venv ensurepip")
    real = script("versions/3.13.0/bin/python3", "echo 3.13 venv ensurepip")
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    assert dev.pythons(None) == [
        dev.Python(str(real), "3.13", ("venv", "ensurepip")),
        dev.Python(str(older), "3.12", ("venv", "ensurepip")),
    ]
    assert [python.path for python in dev.pythons("3.12")] == [str(older)]


def test_a_hanging_shim_is_given_up(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that hangs is killed together with its children after a timeout."""
    monkeypatch.setattr(dev, "PROBE_SECONDS", 0.2)
    start = time.monotonic()
    assert dev.probe(str(script("python3", "sleep 60; echo 3.13"))) is None
    assert time.monotonic() - start < 30


def test_the_running_python_is_probed_truly() -> None:
    """A working Python is reported with its version and the modules that it has."""
    python = dev.probe(sys.executable)
    assert python is not None
    assert python.version == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert "venv" in python.modules


def test_an_old_python_can_read_the_file() -> None:
    """dev.py has the syntax of Python 3.6, so that an old Python can print the error about its version."""
    ast.parse(Path(dev.__file__).read_text(), feature_version=(3, 6))


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        (None, "No working Python 3.13, 3.12 or 3.11 was found: install the package"),
        ("venv", "Python 3.11 cannot create an environment: install the package python3.11-venv."),
    ],
)
@pytest.mark.usefixtures("checkout")
def test_what_to_install_is_said_in_one_sentence(
    modules: str | None,
    sentence: str,
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If no Python can create an environment, one sentence names the package to install; the exit code is 2."""
    release = tmp_path / "os-release"
    release.write_text("ID=ubuntu\nID_LIKE=debian\n")
    named = dev.package
    monkeypatch.setattr(dev, "package", lambda version: named(version, str(release)))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if modules:
        script("bin/python3", f"echo 3.11 {modules}")
    assert dev.main(["test"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"dev.py: {sentence}")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("platform", "release", "package"),
    [
        ("linux", "ID=debian\n", "the package python3.12-venv"),
        ("linux", 'ID="rocky"\nID_LIKE="rhel centos fedora"\n', "the package python3.12"),
        ("linux", "ID=arch\n", "Python 3.12 with its venv and ensurepip modules"),
        ("darwin", "", "python@3.12 with Homebrew"),
    ],
)
def test_each_system_has_its_package(
    platform: str, release: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the package as the operating system calls it."""
    monkeypatch.setattr(sys, "platform", platform)
    (tmp_path / "os-release").write_text(release)
    assert dev.package("3.12", str(tmp_path / "os-release")) == package


def test_other_makers_stand_in_for_ensurepip(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ensurepip, an environment is created with virtualenv or uv if one of them is installed."""
    bare = dev.Python("/python3", "3.13", ("venv",))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert list(dev.recipes(bare, "here")) == []
    script("bin/uv", "exit 0")
    script("bin/virtualenv", "exit 0")
    assert [commands[0][0] for commands in dev.recipes(bare, "here")] == ["virtualenv", "uv"]


def test_the_next_python_is_tried(
    checkout: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the newest Python fails to create an environment, the next older one is used."""
    newest = script("new/python3", "exit 1")
    make = 'mkdir -p "$3/bin" && cp "$0" "$3/bin/python"'
    next_one = script("old/python3", f'case "$2" in venv) {make} ;; esac')
    found = [
        dev.Python(str(newest), "3.13", ("venv", "ensurepip")),
        dev.Python(str(next_one), "3.11", ("venv", "ensurepip")),
    ]
    monkeypatch.setattr(dev, "pythons", lambda _wanted: found)
    assert dev.create(None) == str(checkout / ".venv" / "3.11")


def test_the_second_time_nothing_is_done(installs: list[str]) -> None:
    """A finished environment is reused, whether or not its Python version is given."""
    first = dev.environment(None)
    assert installs == WHOLE
    assert dev.environment(None) == dev.environment("3.13") == first
    assert installs == WHOLE


def test_a_change_renews_what_depends_on_it(checkout: Path, installs: list[str]) -> None:
    """A changed project is installed again.

    A changed lock file or interpreter creates the environment again.
    """
    folder = Path(dev.environment(None))
    (checkout / "pyproject.toml").write_text("another project")
    dev.environment(None)
    assert installs == [*WHOLE, "."]
    (checkout / "requirements.lock").write_text("another lock")
    dev.environment(None)
    assert installs == [*WHOLE, ".", *WHOLE]
    (folder / "bin" / "python").write_text("an upgraded interpreter")
    dev.environment(None)
    assert installs == [*WHOLE, ".", *WHOLE, *WHOLE]


def test_an_interrupted_set_up_is_repeated(
    installs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted installation is not marked as finished, and the next command starts it again."""

    def interrupted(_folder: str, *_arguments: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dev, "install", interrupted)
        assert dev.main(["env"]) == 130
    assert dev.main(["env"]) == 0
    assert installs == ["new", *WHOLE]
    assert capsys.readouterr().err == ""


def test_a_second_command_waits_for_the_first(checkout: Path) -> None:
    """While an environment is being set up, its lock is held, even by the children of a killed command."""
    with dev.one_at_a_time():
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    probe = [sys.executable, "-c", LOCKED, str(checkout / ".venv" / "busy")]
    assert subprocess.run(probe, check=False).returncode == 1
    child.kill()
    child.wait()
    assert subprocess.run(probe, check=False).returncode == 0


LOCKED = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(1)
"""


def test_pip_is_quiet_until_it_fails(
    checkout: Path, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of a command is hidden; if it fails, the end of the output is shown with one sentence."""
    folder = str(checkout)
    dev.run_or_fail([str(script("fine", "echo noise"))], folder)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(dev.Failure, match="failed, as shown above"):
        dev.run_or_fail([str(script("bad", "seq 100; exit 3"))], folder)
    assert capsys.readouterr().err.split() == [str(number) for number in range(86, 101)]


@pytest.mark.parametrize(("code", "done"), [(0, ["uv"]), (1, ["uv", "python"])])
def test_what_uv_cannot_do_is_left_to_pip(
    checkout: Path, script: Script, code: int, done: list[str]
) -> None:
    """If uv fails, pip is run with the same arguments; both come from the environment."""
    for name in ("uv", "python"):
        script(f"checkout/bin/{name}", f'echo "{name} $*" >> told; exit {code * (name == "uv")}')
    dev.install(str(checkout), "--requirement", "requirements.lock")
    told = (checkout / "told").read_text().splitlines()
    assert [line.split()[0] for line in told] == done
    assert all(line.endswith("--requirement requirements.lock") for line in told)


def test_a_pin_has_its_hashes(checkout: Path) -> None:
    """The installer uv itself is installed with the hash in the lock file."""
    (checkout / "requirements.lock").write_text(
        "uvicorn==2 \\\n    --hash=a\nuv==1 \\\n    --hash=b\n"
    )
    assert dev.pins("uv") == ["uv==1     --hash=b"]


def test_the_environment_of_a_command_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command finds the programs of its environment first, and no variable of another environment is passed on."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    variables = dev.environ("/here")
    # without bytecode files, every start would compile all modules
    assert "PYTHONDONTWRITEBYTECODE" not in variables
    assert "PYTHONPATH" not in variables
    assert variables["VIRTUAL_ENV"] == "/here"
    assert variables["PATH"].split(os.pathsep)[0] == "/here/bin"


@pytest.mark.usefixtures("installs")
@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("run --fast", "taskqueue demo --journal .venv/demo/journal.jsonl --fast"),
        ("report --from x", "taskqueue pipeline report --open --from x"),
        ("report --backend=redis", "taskqueue pipeline report --open --backend=redis"),
        ("test --python=3.12 tests/core::x", "python -m pytest tests/core::x"),
        ("test tests/core -q", "python -m pytest tests/core -q"),
        ("test tests/core --all", "python -m pytest -m not chaos and not soak tests/core"),
        ("--python 3.12 check", "python tools/check.py"),
        ("chaos --seeds 3", "python -m tests.chaos --seeds 3"),
        ("soak -x", "python -m tests.soak -x"),
    ],
)
def test_a_command_becomes_its_program(
    line: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command runs its program in the chosen environment and passes on its arguments."""
    became: list[tuple[str, str]] = []

    def become(folder: str, command: list[str], **_variables: str) -> int:
        became.append((Path(folder).name, " ".join(command)))
        return 0

    monkeypatch.setattr(dev, "replace_process", become)
    assert dev.main(line.split()) == 0
    assert became == [("3.12" if "3.12" in line else "3.13", program)]


@pytest.mark.usefixtures("installs")
def test_all_tests_are_run_after_all_programs_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """U30: a full test run downloads the required programs first, and then uses three processes."""
    ran: list[str] = []
    monkeypatch.setattr("subprocess.call", lambda command, **_: ran.append(" ".join(command)))
    monkeypatch.setattr(
        dev, "replace_process", lambda _folder, command: ran.append(" ".join(command))
    )
    dev.main(["test", "-x", "--all"])
    marked = "python -m pytest -m not chaos and not soak --numprocesses 3 --dist loadfile -x"
    assert ran == ["python -m tests.binaries", marked]


@pytest.mark.usefixtures("installs")
def test_the_report_is_of_the_job_before(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G10: `report` reads the journal that `run` has written, and fails with a message if there is none."""
    became: list[list[str]] = []
    monkeypatch.setattr(
        dev, "replace_process", lambda _folder, command, **_variables: became.append(command)
    )
    assert dev.main(["report"]) == 2
    assert became == []
    (checkout / ".venv/demo").mkdir(parents=True)
    (checkout / ".venv/demo/journal.jsonl").touch()
    dev.main(["report", "--json"])
    words = "--open --journal .venv/demo/journal.jsonl --out .venv/demo/report --json"
    assert " ".join(became[0]) == f"taskqueue pipeline report {words}"


@pytest.mark.parametrize("line", ["test --python 3.10", "test --python", "report", "unknown"])
@pytest.mark.usefixtures("installs")
def test_a_wrong_command_line_is_one_sentence(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid command line is refused in one sentence, with exit code 2."""
    assert dev.main(line.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments dev.py prints its help, which names every command."""
    assert dev.main([]) == dev.main(["--help"]) == 0
    said = capsys.readouterr().out
    for name in [
        "run",
        "report",
        "test",
        "check",
        "bench",
        "chaos",
        "soak",
        "env",
        "lock",
        "clean",
    ]:
        assert said.count(f"\n  {name} ") == 2


def test_clean_removes_only_what_was_made(checkout: Path) -> None:
    """``clean`` deletes environments, caches and compiled files; sources and settings stay."""
    gone = [".venv/3.13", ".mypy_cache", "src/pkg/__pycache__", "tests/dev/__pycache__"]
    stay = ["src/pkg", "docs", ".git", "examples"]
    for name in gone + stay:
        (checkout / name).mkdir(parents=True, exist_ok=True)
    assert dev.main(["clean"]) == 0
    assert [name for name in gone if (checkout / name).exists()] == []
    assert all((checkout / name).is_dir() for name in stay)
