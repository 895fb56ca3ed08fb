"""Loading a backend by name: the name leads to a backend, or to an error that says what to do."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import control_of, dead_letters_of
from taskqueue_core.errors import (
    BackendNotFound,
    CapabilityMissing,
    ConfigurationError,
    InvalidBackend,
)
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.loading import check_backend, installed_backends, load_backend
from taskqueue_memory import MemoryBackend

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
Write = Callable[[str, str], None]
Install = Callable[[str, str], None]

TOY = """
from taskqueue_memory import MemoryBackend

class Toy(MemoryBackend):
    pass

class Outer:
    factory = Toy

create_backend = Toy
number = 5
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes a module which the test can import."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution with one backend entry point."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, target: str) -> None:
        folder = tmp_path / f"dist_{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n"
        (folder / "METADATA").write_text(metadata, encoding="utf-8")
        points = f"[taskqueue.backends]\n{name} = {target}\n"
        (folder / "entry_points.txt").write_text(points, encoding="utf-8")

    return install


@pytest.mark.parametrize(
    "word",
    [
        "toy-queue",
        "toymodule",
        "toymodule:create_backend",
        "toymodule:Toy",
        "toymodule:Outer.factory",
    ],
)
def test_every_kind_of_word(word: str, write: Write, install: Install) -> None:
    """E3, G3: an entry point name, a module path and ``module:attribute`` can all name the same backend."""
    write("toymodule", TOY)
    install("toy-queue", "toymodule:create_backend")
    assert type(load_backend(word)).__name__ == "Toy"


def test_each_load_makes_a_backend() -> None:
    """Each call of ``load_backend`` creates a new backend."""
    assert load_backend("taskqueue_memory") is not load_backend("taskqueue_memory")


def test_the_memory_backend_is_declared() -> None:
    """G3: the ``memory`` entry point in pyproject.toml loads the memory backend."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    word = project["entry-points"]["taskqueue.backends"]["memory"]
    assert isinstance(load_backend(word), MemoryBackend)


def test_installed_backends_are_listed(write: Write, install: Install) -> None:
    """Installed backends are listed by name, in sorted order, without importing them."""
    write("broken_on_import", "raise SystemExit")
    install("zz-two", "broken_on_import:f")
    install("aa-one", "broken_on_import:f")
    names = installed_backends()
    assert {"aa-one", "zz-two"} <= set(names)
    assert list(names) == sorted(set(names))


def test_an_unknown_name(install: Install) -> None:
    """E3: the error for an unknown name lists the installed backends and says how to install others."""
    install("toy", "nowhere:f")
    with pytest.raises(BackendNotFound) as caught:
        load_backend("reddis")
    message = str(caught.value)
    assert "no backend 'reddis'" in message
    assert re.search(r"Installed backends: [^.]*\btoy\b", message)
    assert "pip install" in message
    assert "TASKQUEUE_BACKEND" in message


@pytest.mark.parametrize(
    "word",
    [
        "",
        ":create_backend",
        "a b",
        "a-b",
        "../taskqueue_memory",
        "taskqueue_memory.",
        ".taskqueue_memory",
        "taskqueue_memory:",
        "taskqueue_memory:create_backend()",
        "__import__('os')",
        "a\x00b",
        "redis://localhost",
        "x" * 10_000,
    ],
    ids=lambda word: repr(word)[:30],
)
def test_odd_words(word: str) -> None:
    """E3: a name that is not a valid path is refused before any import.

    Only an empty attribute after the colon is accepted.
    """
    if word == "taskqueue_memory:":
        assert isinstance(load_backend(word), MemoryBackend)
    else:
        with pytest.raises(BackendNotFound, match="no backend"):
            load_backend(word)


@pytest.mark.parametrize(
    "word", ["nowhere.at.all", "taskqueue_memory.nowhere", "json.decoder.nowhere"]
)
def test_a_module_that_is_not_there(word: str) -> None:
    """E3: if a module does not exist, the error names the missing part of the path."""
    with pytest.raises(BackendNotFound, match="there is no module '"):
        load_backend(word)


FAILING = """
from taskqueue_core.errors import ConfigurationError

def wants_arguments(url): ...
def fails(): raise OSError("no such host")
def wrong_settings(): raise ConfigurationError("TOY_URL: missing")
"""


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("empty", "'empty' lacks 'create_backend'"),
        ("toy:nothing", "lacks 'nothing'"),
        ("toy:Outer.nothing", "lacks 'Outer.nothing'"),
        ("toy:number", "got int; allowed: a callable"),
        ("toy:dict", "dict is not a backend"),
        ("toy:fails", "its factory raised an exception: OSError: no such host"),
        ("toy:wants_arguments", "its factory raised an exception: TypeError"),
    ],
)
def test_a_module_or_factory_that_will_not_do(word: str, why: str, write: Write) -> None:
    """E3, G6: if a factory is missing, not callable, fails or returns no backend, the error says which and why."""
    write("empty", "")
    write("toy", TOY + FAILING + "dict = dict\n")
    with pytest.raises(InvalidBackend, match=re.escape(why)):
        load_backend(word)


@pytest.mark.parametrize("kind", ["word", "entry point"])
def test_a_missing_dependency(kind: str, write: Write, install: Install) -> None:
    """If a dependency of a backend's module is missing, the error names the dependency as missing, not the backend."""
    write("toymodule", "import a_driver_nobody_has")
    install("toy", "toymodule:create_backend")
    with pytest.raises(InvalidBackend, match="needs the module 'a_driver_nobody_has'") as caught:
        load_backend("toymodule" if kind == "word" else "toy")
    assert "install the dependencies of the backend's package" in str(caught.value)


def test_a_missing_extra(write: Write, tmp_path: Path) -> None:
    """If installing an extra of this project provides the missing module, the error gives the command."""
    write("taskqueue_toy", "import a_driver_nobody_has")
    folder = tmp_path / "taskqueue_backends-9.9.dist-info"
    folder.mkdir()
    text = "Metadata-Version: 2.1\nName: taskqueue-backends\nVersion: 9.9\nProvides-Extra: toy\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidBackend, match=r"try: pip install 'taskqueue-backends\[toy\]'"):
        load_backend("taskqueue_toy:create_backend")


def test_an_import_that_fails(write: Write) -> None:
    """Any exception while importing a backend's module is reported with its cause."""
    write("toymodule", "1 / 0")
    with pytest.raises(InvalidBackend, match="importing it failed: ZeroDivisionError") as caught:
        load_backend("toymodule")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_wrong_settings_of_a_backend(write: Write) -> None:
    """A configuration error raised by a backend's factory reaches the caller unchanged."""
    write("toymodule", FAILING)
    with pytest.raises(ConfigurationError, match=r"^TOY_URL: missing$"):
        load_backend("toymodule:wrong_settings")


def stub(**changes: Any) -> SimpleNamespace:
    """Return a minimal backend with some members replaced; a value of None removes the member."""
    members: dict[str, Any] = {
        "capabilities": Capabilities(),
        "publisher": SimpleNamespace(publish=print, schedule_retry=print),
        **dict.fromkeys(("subscribe", "now", "health", "aclose"), print),
        **changes,
    }
    return SimpleNamespace(
        **{name: member for name, member in members.items() if member is not None}
    )


def test_a_minimal_backend() -> None:
    """G6: an object with just the members of the contract is accepted as a backend."""
    check_backend(stub(), "toy")


@pytest.mark.parametrize(
    ("thing", "lacks"),
    [
        (object(), "capabilities, publisher, subscribe, now, health, aclose"),
        (None, "capabilities, publisher, subscribe, now, health, aclose"),
        (stub(now=None, health=None), "now, health"),
        (stub(publisher=SimpleNamespace(publish=print)), "publisher.schedule_retry"),
        (
            stub(capabilities={"control"}),
            "capabilities (must be taskqueue_core.backend.Capabilities)",
        ),
        (
            stub(capabilities=Capabilities(names=frozenset(Capability))),
            "control (declared as a capability)",
        ),
    ],
)
def test_what_is_lacking_is_listed(thing: object, lacks: str) -> None:
    """G6: the error for an incomplete backend lists all missing members at once."""
    with pytest.raises(InvalidBackend, match=r"toy.*is not a backend; it lacks: ") as caught:
        check_backend(thing, "toy")
    listed = str(caught.value).split("lacks: ")[1].split(";")[0]
    assert set(lacks.split(", ")) <= set(listed.split(", "))


def test_the_wrapper_is_a_backend_too() -> None:
    """A backend wrapped for plugin hooks is accepted as a backend too."""
    check_backend(InstrumentedBackend(MemoryBackend(), Hooks()), "observed")


def test_capabilities_are_refused_early_and_clearly() -> None:
    """Using a capability that the backend lacks raises an error that names it and lists the declared ones."""
    bare: Any = stub()
    some: Any = stub(capabilities=Capabilities(names=frozenset({Capability.CONTROL})), control=1)
    with pytest.raises(CapabilityMissing, match="'control'; its capabilities: none"):
        control_of(bare)
    with pytest.raises(CapabilityMissing, match="'dead_letters'; its capabilities: control"):
        dead_letters_of(some)
    assert control_of(some) is some.control


@pytest.mark.parametrize(
    ("line", "module", "extra"),
    [
        ("import taskqueue_remote", "httpx2", "client"),
        ("from taskqueue_worker import Worker", "websockets", "worker"),
        ("import taskqueue_server", "starlette", "server"),
    ],
)
def test_each_package_names_its_extra(line: str, module: str, extra: str) -> None:
    """U30: without its dependency, a package, and the backend in it, name the extra that installs the dependency."""
    script = f"import sys; sys.modules[{module!r}] = None; {line}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert f"pip install 'taskqueue-backends[{extra}]'" in done.stderr.splitlines()[-1]


def test_the_server_backend_names_its_extra() -> None:
    """U30: connect("server") without its dependency advises the extra ``client``, not ``server``."""
    script = (
        "import sys; sys.modules['httpx2'] = None\n"
        "from taskqueue_core.loading import load_backend; load_backend('server')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "try: pip install 'taskqueue-backends[client]'" in done.stderr.splitlines()[-1]
