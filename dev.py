#!/usr/bin/env python3
"""The developer's commands.

python3 dev.py COMMAND [--python 3.12] [arguments]

  run    start the demo: a server, workers and a real job (arguments go to `taskqueue demo`)
  report  a page on where that job's time went (arguments go to `taskqueue pipeline report`)
  test   run the tests: all, or those of a path (arguments go to pytest); --all: the long ones too
  check  run every static check and sum up
  bench  run the benchmarks
  chaos  run the tests that kill, freeze and cut off processes (--seeds N: that many random runs)
  soak   run the fuzz tests, random histories, the audit and a burst of jobs at their large size
  model  visit every state of the model of the scripts, in its large bound
  mutants  put mistakes into the product, and count how many the tests notice (--compare BEFORE AFTER: two runs)
  env    only set up the environment, and say where it is
  lock   solve requirements.lock and Prefect's anew; pins that still fit stay, unless --upgrade is given
  clean  remove environments, caches and builds

Nothing is needed beforehand but Python 3.11, 3.12 or 3.13. The first command sets up an environment
from requirements.lock in .venv/, later ones use it. Nothing outside this folder is changed.
"""
# Any Python 3 must be able to start this file: an older one still finds a newer one with it, or
# says in one sentence what to install. So: the library of 3.6, and annotations in quotes.

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from typing import Iterator, NamedTuple

ROOT = os.path.dirname(os.path.abspath(__file__))
SUPPORTED = ("3.13", "3.12", "3.11")  # best first
LITTER = """.venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
    __pycache__ [bdest]*/**/__pycache__"""  # benchmarks, docs, examples, src, tests, tools
SOLVE = "uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet"
LOCKS = (  # Prefect has an environment of its own: what it needs and what all else needs do not always go together
    "pyproject.toml --extra all --extra conformance --extra spark --group dev -o requirements.lock",
    """pyproject.toml tests/prefect/requirements.in --extra prefect --extra redis
    -c tests/prefect/constraints.txt -o tests/prefect/requirements.txt""",
    "--no-deps tests/binaries/requirements.in -o tests/binaries/requirements.txt",
)
SOURCES = ("--journal", "--from", "--backend")  # where a report can be from
THREE_PROCESSES = ["--numprocesses", "3", "--dist", "loadfile"]  # tests wait for much
STRAYS = "PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV __PYVENV_LAUNCHER__"
PROBE_SECONDS = 10
PROBE = """
import importlib.util, ssl, sys, zlib
names = "venv", "ensurepip", "virtualenv", "pip"
print("%d.%d" % sys.version_info[:2], *filter(importlib.util.find_spec, names))
"""


class Trouble(Exception):
    """What went wrong, in one sentence for the developer."""

    def __init__(self, sentence: str, code: int = 2) -> None:
        super().__init__(sentence)
        self.code = code


class Python(NamedTuple):
    """An interpreter that was seen to run, and which of the modules we may need it has."""

    path: str
    version: str
    modules: "tuple[str, ...]"


# Finding a Python


def probe(path: str) -> "Python | None":
    """What the Python at a path is; None unless it runs, in time, with TLS and compression."""
    try:
        process = subprocess.Popen(
            [path, "-c", PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ(),
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        words = process.communicate(timeout=PROBE_SECONDS)[0].decode("ascii", "replace").split()
    except subprocess.TimeoutExpired:
        # With its children: one of them would hold the pipe open.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    return Python(path, words[0], tuple(words[1:])) if words and not process.returncode else None


def candidates() -> "Iterator[str]":
    """Every path that may be a Python, once: the running one, then PATH in order.

    A version manager's shim may refuse to run what is installed beside it, so that is listed too.
    """
    names = ["python" + version for version in SUPPORTED] + ["python3", "python"]
    paths = [sys.executable]
    for folder in filter(None, os.environ.get("PATH", os.defpath).split(os.pathsep)):
        paths += [os.path.join(folder, name) for name in names]
        versions = os.path.join(os.path.dirname(os.path.abspath(folder)), "versions")
        paths += sorted(glob.glob(os.path.join(versions, "3.1[123]*", "bin", "python3")))
    seen = set()
    for path in map(os.path.abspath, paths):
        # The name counts as well: one program may serve as the shim of several versions.
        key = os.path.realpath(path), os.path.basename(path)
        if key not in seen and os.access(path, os.X_OK) and not path.startswith(place("")):
            seen.add(key)
            yield path


def pythons(wanted: "str | None") -> "list[Python]":
    """The working Pythons of the wanted version, or of every supported one, newest first."""
    versions = [wanted] if wanted else list(SUPPORTED)
    found = [python for python in map(probe, candidates()) if python and python.version in versions]
    return sorted(found, key=lambda python: versions.index(python.version))


def package(version: "str | None", release: str = "/etc/os-release") -> str:
    """What to install on this system for a Python (None: any supported) that can make a venv."""
    if sys.platform == "darwin":
        return f"python@{version or SUPPORTED[0]} with Homebrew"
    words = [line for line in content(release).decode().splitlines() if line.startswith("ID")]
    if "debian" in str(words):
        system = None if version else probe("/usr/bin/python3")
        if system and system.version not in SUPPORTED:
            version = SUPPORTED[-1]  # the system's own is too old or too new: name one beside it
        return f"the package python{version or 3}-venv"
    if "fedora" in str(words):
        return f"the package python{version or '3.12'}"
    return f"Python {version or SUPPORTED[0]} with its venv and ensurepip modules"


# Making an environment


def place(name: str) -> str:
    """Where the environment of this name is."""
    return os.path.join(ROOT, ".venv", name)


def content(*names: str) -> bytes:
    """What the file at this place in the checkout holds; empty if it is absent."""
    with contextlib.suppress(OSError), open(os.path.join(ROOT, *names), "rb") as file:
        return file.read()
    return b""


def write(path: str, *words: str) -> "list[str]":
    """Writes the words to a file, one a line, and gives them back."""
    with open(path, "w", encoding="ascii") as file:
        file.write("\n".join(words))
    return list(words)


def environ(folder: "str | None" = None, **more: str) -> "dict[str, str]":
    """The variables for a command: free of other environments, inside this one if it is given.

    And what it compiles is kept: the tests start hundreds of processes.
    """
    variables = {name: value for name, value in os.environ.items() if name not in STRAYS.split()}
    variables.update(more, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PIP_USER="0")
    if folder:
        path = os.environ.get("PATH", os.defpath)
        variables.update(VIRTUAL_ENV=folder, PATH=os.path.join(folder, "bin") + os.pathsep + path)
    return variables


def complaint(command: "list[str]", folder: "str | None" = None) -> str:
    """Runs a command at the root, unseen; empty if it succeeds, else the end of what it said."""
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ(folder),
            close_fds=False,  # it holds the lock of one_at_a_time as long as it lives
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        return str(error)
    said = process.communicate()[0].decode("utf-8", "replace").splitlines()
    return "\n".join(said[-15:] or ["no output"]) if process.returncode else ""


def must(command: "list[str]", folder: str) -> None:
    """Runs a command inside an environment, unseen; if it fails, shows why and stops."""
    said = complaint(command, folder)
    if said:
        print(said, file=sys.stderr)
        raise Trouble(f"`{' '.join(command[:4])} ...` failed, as shown above.", code=1)


def recipes(python: Python, folder: str) -> "Iterator[list[list[str]]]":
    """The ways this Python can make an environment that has pip, best first, as commands."""
    if {"venv", "ensurepip"} <= set(python.modules):
        yield [[python.path, "-m", "venv", folder]]
    if "virtualenv" in python.modules:
        yield [[python.path, "-m", "virtualenv", folder]]
    if shutil.which("virtualenv"):
        yield [["virtualenv", "--python", python.path, folder]]
    if shutil.which("uv"):
        yield [["uv", "venv", "--seed", "--python", python.path, folder]]


def create(wanted: "str | None") -> str:
    """Makes an empty environment with the first Python that can; its folder, by version."""
    found, said = pythons(wanted), ""
    for python in found:
        folder = place(python.version)
        for commands in recipes(python, folder):
            shutil.rmtree(folder, ignore_errors=True)
            works = [os.path.join(folder, "bin", "python"), "-m", "pip", "--version"]
            said = next(filter(None, map(complaint, [*commands, works])), "")
            if not said:
                print(f"Setting up Python {python.version} (first time only)...", flush=True)
                return folder
    if found:
        print(said, end="\n" if said else "", file=sys.stderr)
        version = found[0].version
        raise Trouble(f"Python {version} cannot make an environment: install {package(version)}.")
    versions = wanted or ", ".join(SUPPORTED[:-1]) + " or " + SUPPORTED[-1]
    raise Trouble(f"No working Python {versions} was found: install {package(wanted)}.")


def install(folder: str, *arguments: str) -> None:
    """Installs into the environment: by the uv in it, far quicker, or by pip, which reaches more registries."""
    if complaint(["uv", "pip", "install", "--system-certs", "--no-cache", *arguments], folder):
        must(["python", "-m", "pip", "install", *arguments], folder)


def pins(name: str) -> "list[str]":
    """What the lock says of one package: its version and the hashes of its files."""
    entries = content("requirements.lock").decode("ascii").replace("\\\n", "").splitlines()
    return [entry for entry in entries if entry.startswith(name + "==")]


def stamps(folder: str) -> "list[str]":
    """The marks of a finished set-up: of the environment itself, and of the project within it."""
    python = os.path.realpath(os.path.join(folder, "bin", "python"))
    about = os.stat(python) if os.path.exists(python) else None
    interpreter = about and (python, about.st_size, about.st_mtime_ns)
    parts = repr([folder, interpreter, content("requirements.lock")]).encode()
    both = parts + content("pyproject.toml")
    return [hashlib.sha256(part).hexdigest() for part in (parts, both)]


@contextlib.contextmanager
def one_at_a_time() -> "Iterator[None]":
    """Lets a second command wait until the first has set up, or has died and its children too."""
    os.makedirs(place(""), exist_ok=True)
    with open(place("busy"), "w", encoding="ascii") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        os.set_inheritable(guard.fileno(), True)  # noqa: FBT003 - it takes no keyword
        yield


def environment(wanted: "str | None") -> str:
    """The folder of a ready environment; what is absent, stale or half made has no stamp, and is made anew."""
    with one_at_a_time():
        folder = place(wanted or content(place("default")).decode() or "none")
        done = content(folder, "stamp").decode().split()
        if stamps(folder)[0] not in done:
            if not content("requirements.lock"):
                raise Trouble("requirements.lock is absent: take it from the repository.")
            folder = create(wanted)
            write(place("uv.txt"), *pins("uv"))
            for these in (place("uv.txt"), "requirements.lock"):  # first what installs the rest
                install(folder, "--require-hashes", "--requirement", these)
            done = write(os.path.join(folder, "stamp"), stamps(folder)[0])
            if not wanted:
                write(place("default"), os.path.basename(folder))
        if stamps(folder)[1] not in done:
            install(folder, "--no-deps", "--no-build-isolation", "--editable", ".")
            write(os.path.join(folder, "stamp"), *stamps(folder))
    return folder


# The commands


def become(folder: str, command: "list[str]", **variables: str) -> int:
    """Turns this process into a command inside the environment; it does not return."""
    sys.stdout.flush()
    os.chdir(ROOT)
    variables["XDG_CACHE_HOME"] = place("cache")  # the pipeline may keep a Java there
    os.execvpe(command[0], command, environ(folder, **variables))


def test(folder: str, arguments: "list[str]") -> int:
    """Runs the tests of the paths among the arguments; without a path all, and fetches first what they need."""
    rest = [word for word in arguments if word != "--all"]
    command = ["python", "-m", "pytest"]
    if rest != arguments:
        command += ["-m", "not chaos and not soak"]
    if not any(word.startswith("tests") for word in rest):
        # It names what cannot be had, and so does each test that needs it.
        subprocess.call(["python", "-m", "tests.binaries"], cwd=ROOT, env=environ(folder))
        command += THREE_PROCESSES
    return become(folder, command + rest)


def lock(wanted: "str | None", arguments: "list[str]") -> int:
    """Solves the locks for every supported Python and platform, by the uv that the old ones name."""
    folder = environment(wanted)
    with one_at_a_time():
        for what in LOCKS:
            must([*SOLVE.split(), *what.split(), *arguments], folder)
    return 0


def clean() -> int:
    """Removes what these commands made, and nothing else."""
    for pattern in LITTER.split():
        for path in glob.glob(os.path.join(ROOT, pattern), recursive=True):
            shutil.rmtree(path, ignore_errors=True)
    return 0


def choice(arguments: "list[str]") -> "str | None":
    """Takes `--python 3.12` out of the arguments; the version, or None if it is not there."""
    for at, word in enumerate(arguments):
        option, given, version = word.partition("=")
        if option == "--python":
            version = version or "".join(arguments[at + 1 : at + 2])
            del arguments[at : at + (1 if given else 2)]
            if version in SUPPORTED:
                return version
            raise Trouble("--python takes one of " + ", ".join(SUPPORTED) + ".")
    return None


def carry_out(arguments: "list[str]") -> int:
    """Carries out a command line; its exit code."""
    wanted = choice(arguments)
    name, rest = (arguments or ["help"])[0], arguments[1:]
    journal, report = (
        os.path.join(".venv", "demo", "journal.jsonl"),
        os.path.join(".venv", "demo", "report"),
    )
    programs = {
        "run": ["taskqueue", "demo", "--journal", journal],
        "report": ["taskqueue", "pipeline", "report", "--open"],
        "check": ["python", "tools/check.py"],
        "bench": ["python", "benchmarks/run.py"],
        "chaos": ["python", "-m", "tests.chaos"],
        "soak": ["python", "-m", "tests.soak"],
        "model": ["python", "-m", "tests.model"],
        "mutants": ["python", "-m", "tests.mutants"],
    }
    if name == "report" and not any(word.startswith(SOURCES) for word in rest):
        if not os.path.exists(os.path.join(ROOT, journal)) and not {"-h", "--help"} & set(rest):
            raise Trouble("There is no job to report on yet: `python3 dev.py run` does one.")
        programs["report"] += ["--journal", journal, "--out", report]
    if name == "test":
        return test(environment(wanted), rest)
    if name in programs:
        return become(
            environment(wanted),
            programs[name] + rest,
            TASKQUEUE_DEMO_REPORT="python3 dev.py report",
        )
    if name == "env":
        print(os.path.relpath(environment(wanted)))
        return 0
    if name == "lock":
        return lock(wanted, rest)
    if name == "clean":
        return clean()
    if name in ("help", "--help", "-h"):
        print(__doc__.strip())
        return 0
    raise Trouble(f"There is no command {name}: `python3 dev.py help` names them all.")


def main(arguments: "list[str]") -> int:
    """Carries out a command line and tells of trouble in one sentence; its exit code."""
    try:
        return carry_out(list(arguments))
    except Trouble as trouble:
        print(f"dev.py: {trouble}", file=sys.stderr)
        return trouble.code
    except OSError as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
