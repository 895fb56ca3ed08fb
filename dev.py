#!/usr/bin/env python3
"""The commands for developers of this project.

python3 dev.py COMMAND [--python 3.12] [arguments]

  run    run the demo: a server, workers and a real job (arguments are passed to `taskqueue demo`)
  report  make a report of the last demo (arguments are passed to `taskqueue pipeline report`)
  test   run all tests, or the tests of a path (arguments are passed to pytest); --all includes the long tests
  check  run all static checks
  docs   build the documentation site into build/docs, without a network
  bench  run the benchmarks
  chaos  run the tests that kill, suspend and disconnect processes (--seeds N: number of random runs)
  soak   run the long versions of the fuzz tests, the random histories, the audit and the burst of jobs
  model  check all states of the model of the Lua scripts, with large bounds
  mutants  insert faults into the code and count how many the tests find (--compare BEFORE AFTER: compare two runs)
  audit  look for known vulnerabilities of the locked packages; asks an advisory service on the internet
  env    set up the environment and print its path
  lock   write all lock files again; pins that are still valid are kept, unless --upgrade is given
  clean  remove environments, caches and builds

Only Python 3.11, 3.12 or 3.13 must be installed. The first command sets up an environment from
requirements.lock in .venv/; later commands use it. Nothing outside this folder is changed.
"""
# Any Python 3 must be able to run this file, because an older Python uses it to find a newer one, or to print
# what to install. So it uses only the standard library of Python 3.6, and annotations in quotes.

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
SUPPORTED = ("3.13", "3.12", "3.11")  # the preferred version first
CREATED = """.venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
    __pycache__ [bdest]*/**/__pycache__"""  # [bdest]* matches benchmarks, docs, examples, src, tests, tools
RESOLVE = "uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet"
LOCKS = (  # Prefect has its own environment, because its requirements may conflict with those of the project
    "pyproject.toml --extra all --extra conformance --extra dev --extra spark --group dev -o requirements.lock",
    """pyproject.toml tests/prefect/requirements.in --extra prefect --extra redis
    -c tests/prefect/constraints.txt -o tests/prefect/requirements.txt""",
    "--no-deps tests/binaries/requirements.in -o tests/binaries/requirements.txt",
)
SOURCES = ("--journal", "--from", "--backend")  # options that select the source of a report
THREE_PROCESSES = [
    "--numprocesses",
    "3",
    "--dist",
    "loadfile",
]  # tests mostly wait, so several can share a core
FOREIGN = "PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV __PYVENV_LAUNCHER__"
PROBE_SECONDS = 10
PROBE = """
import importlib.util, ssl, sys, zlib
names = "venv", "ensurepip", "virtualenv", "pip"
print("%d.%d" % sys.version_info[:2], *filter(importlib.util.find_spec, names))
"""


class Failure(Exception):
    """An error that is reported to the developer in one sentence."""

    def __init__(self, sentence: str, code: int = 2) -> None:
        super().__init__(sentence)
        self.code = code


class Python(NamedTuple):
    """A working interpreter, with the modules for creating environments that it has."""

    path: str
    version: str
    modules: "tuple[str, ...]"


def probe(path: str) -> "Python | None":
    """Return the Python at a path; None unless it runs in time and has TLS and compression."""
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
        # Kill the whole group, because a child could keep the pipe open.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    return Python(path, words[0], tuple(words[1:])) if words and not process.returncode else None


def candidates() -> "Iterator[str]":
    """Yield each path that may be a Python: the running one, those in PATH, and the versions to which shims lead."""
    names = ["python" + version for version in SUPPORTED] + ["python3", "python"]
    paths = [sys.executable]
    for folder in filter(None, os.environ.get("PATH", os.defpath).split(os.pathsep)):
        paths += [os.path.join(folder, name) for name in names]
        versions = os.path.join(os.path.dirname(os.path.abspath(folder)), "versions")
        paths += sorted(glob.glob(os.path.join(versions, "3.1[123]*", "bin", "python3")))
    seen = set()
    for path in map(os.path.abspath, paths):
        # The name is part of the key, because one program can be the shim of several versions.
        key = os.path.realpath(path), os.path.basename(path)
        if key not in seen and os.access(path, os.X_OK) and not path.startswith(env_path("")):
            seen.add(key)
            yield path


def pythons(wanted: "str | None") -> "list[Python]":
    """Return the working Pythons of the wanted version, or of all supported versions, newest first."""
    versions = [wanted] if wanted else list(SUPPORTED)
    found = [python for python in map(probe, candidates()) if python and python.version in versions]
    return sorted(found, key=lambda python: versions.index(python.version))


def package(version: "str | None", release: str = "/etc/os-release") -> str:
    """Return what to install on this system to get a Python (None: any version) with venv."""
    if sys.platform == "darwin":
        return f"python@{version or SUPPORTED[0]} with Homebrew"
    words = [line for line in read_file(release).decode().splitlines() if line.startswith("ID")]
    if "debian" in str(words):
        system = None if version else probe("/usr/bin/python3")
        if system and system.version not in SUPPORTED:
            version = SUPPORTED[-1]  # the version of the system's Python is not supported
        return f"the package python{version or 3}-venv"
    if "fedora" in str(words):
        return f"the package python{version or '3.12'}"
    return f"Python {version or SUPPORTED[0]} with its venv and ensurepip modules"


def env_path(name: str) -> str:
    """Return the folder of the environment with this name."""
    return os.path.join(ROOT, ".venv", name)


def read_file(*names: str) -> bytes:
    """Return the content of a file in the checkout; empty if the file does not exist."""
    with contextlib.suppress(OSError), open(os.path.join(ROOT, *names), "rb") as file:
        return file.read()
    return b""


def write(path: str, *words: str) -> "list[str]":
    """Write texts to a file, one per line, and return them."""
    with open(path, "w", encoding="ascii") as file:
        file.write("\n".join(words))
    return list(words)


def environ(folder: "str | None" = None, **more: str) -> "dict[str, str]":
    """Return the variables for a command, without other Python environments, but with ``folder`` if it is given.

    Bytecode is written, because the tests start hundreds of processes.
    """
    variables = {name: value for name, value in os.environ.items() if name not in FOREIGN.split()}
    variables.update(more, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PIP_USER="0")
    if folder:
        path = os.environ.get("PATH", os.defpath)
        variables.update(VIRTUAL_ENV=folder, PATH=os.path.join(folder, "bin") + os.pathsep + path)
    return variables


def failure_of(command: "list[str]", folder: "str | None" = None) -> str:
    """Run a command without showing its output; return the end of the output if it fails, else an empty text."""
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ(folder),
            close_fds=False,  # the child keeps the lock of one_at_a_time until it ends
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        return str(error)
    output = process.communicate()[0].decode("utf-8", "replace").splitlines()
    return "\n".join(output[-15:] or ["no output"]) if process.returncode else ""


def run_or_fail(command: "list[str]", folder: str) -> None:
    """Run a command inside an environment; if it fails, show the end of its output and raise."""
    output = failure_of(command, folder)
    if output:
        print(output, file=sys.stderr)
        raise Failure(f"`{' '.join(command[:4])} ...` failed, as shown above.", code=1)


def recipes(python: Python, folder: str) -> "Iterator[list[list[str]]]":
    """Yield the lists of commands with which this Python can create an environment with pip, preferred first."""
    if {"venv", "ensurepip"} <= set(python.modules):
        yield [[python.path, "-m", "venv", folder]]
    if "virtualenv" in python.modules:
        yield [[python.path, "-m", "virtualenv", folder]]
    if shutil.which("virtualenv"):
        yield [["virtualenv", "--python", python.path, folder]]
    if shutil.which("uv"):
        yield [["uv", "venv", "--seed", "--python", python.path, folder]]


def create(wanted: "str | None") -> str:
    """Create an empty environment with the first Python that can, and return its folder."""
    found, output = pythons(wanted), ""
    for python in found:
        folder = env_path(python.version)
        for commands in recipes(python, folder):
            shutil.rmtree(folder, ignore_errors=True)
            works = [os.path.join(folder, "bin", "python"), "-m", "pip", "--version"]
            output = next(filter(None, map(failure_of, [*commands, works])), "")
            if not output:
                print(f"Setting up Python {python.version} (first time only)...", flush=True)
                return folder
    if found:
        print(output, end="\n" if output else "", file=sys.stderr)
        version = found[0].version
        raise Failure(f"Python {version} cannot create an environment: install {package(version)}.")
    versions = wanted or ", ".join(SUPPORTED[:-1]) + " or " + SUPPORTED[-1]
    raise Failure(f"No working Python {versions} was found: install {package(wanted)}.")


def install(folder: str, *arguments: str) -> None:
    """Install packages with uv, which is faster, or if that fails with pip, which supports more registries."""
    if failure_of(["uv", "pip", "install", "--system-certs", "--no-cache", *arguments], folder):
        run_or_fail(["python", "-m", "pip", "install", *arguments], folder)


def pins(name: str) -> "list[str]":
    """Return the lines of the lock file for one package, with its version and the hashes of its files."""
    entries = read_file("requirements.lock").decode("ascii").replace("\\\n", "").splitlines()
    return [entry for entry in entries if entry.startswith(name + "==")]


def stamps(folder: str) -> "list[str]":
    """Return two hashes, which mark that the setup of the environment, and of the project in it, is complete."""
    python = os.path.realpath(os.path.join(folder, "bin", "python"))
    about = os.stat(python) if os.path.exists(python) else None
    interpreter = about and (python, about.st_size, about.st_mtime_ns)
    parts = repr([folder, interpreter, read_file("requirements.lock")]).encode()
    both = parts + read_file("pyproject.toml")
    return [hashlib.sha256(part).hexdigest() for part in (parts, both)]


@contextlib.contextmanager
def one_at_a_time() -> "Iterator[None]":
    """Hold a lock, so that a second command waits until the setup by the first one and its children has ended."""
    os.makedirs(env_path(""), exist_ok=True)
    with open(env_path("busy"), "w", encoding="ascii") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        os.set_inheritable(guard.fileno(), True)  # noqa: FBT003 - takes no keywords
        yield


def environment(wanted: "str | None") -> str:
    """Return the folder of a complete environment. A missing, stale or incomplete one is created again."""
    with one_at_a_time():
        folder = env_path(wanted or read_file(env_path("default")).decode() or "none")
        done = read_file(folder, "stamp").decode().split()
        if stamps(folder)[0] not in done:
            if not read_file("requirements.lock"):
                raise Failure("requirements.lock is missing: restore it from the repository.")
            folder = create(wanted)
            write(env_path("uv.txt"), *pins("uv"))
            for these in (
                env_path("uv.txt"),
                "requirements.lock",
            ):  # uv first, because it installs the rest
                install(folder, "--require-hashes", "--requirement", these)
            done = write(os.path.join(folder, "stamp"), stamps(folder)[0])
            if not wanted:
                write(env_path("default"), os.path.basename(folder))
        if stamps(folder)[1] not in done:
            install(folder, "--no-deps", "--no-build-isolation", "--editable", ".")
            write(os.path.join(folder, "stamp"), *stamps(folder))
    return folder


def replace_process(folder: str, command: "list[str]", **variables: str) -> int:
    """Replace this process by a command inside the environment. It does not return."""
    sys.stdout.flush()
    os.chdir(ROOT)
    variables["XDG_CACHE_HOME"] = env_path("cache")  # the pipeline may store a Java there
    variables["NO_MKDOCS_2_WARNING"] = "1"  # docs/decisions/023-documentation-site.md is about it
    os.execvpe(command[0], command, environ(folder, **variables))


def test(folder: str, arguments: "list[str]") -> int:
    """Run the tests of the given paths; without a path fetch what the tests need, and run all."""
    rest = [word for word in arguments if word != "--all"]
    command = ["python", "-m", "pytest"]
    if rest != arguments:
        command += ["-m", "not chaos and not soak"]
    if not any(word.startswith("tests") for word in rest):
        # If something cannot be fetched, the tests that need it report this again.
        subprocess.call(["python", "-m", "tests.binaries"], cwd=ROOT, env=environ(folder))
        command += THREE_PROCESSES
    return replace_process(folder, command + rest)


def lock(wanted: "str | None", arguments: "list[str]") -> int:
    """Resolve the lock files for all supported Pythons and platforms, with the uv of the current lock file."""
    folder = environment(wanted)
    with one_at_a_time():
        for what in LOCKS:
            run_or_fail([*RESOLVE.split(), *what.split(), *arguments], folder)
    return 0


def clean() -> int:
    """Remove what these commands created, and nothing else."""
    for pattern in CREATED.split():
        for path in glob.glob(os.path.join(ROOT, pattern), recursive=True):
            shutil.rmtree(path, ignore_errors=True)
    return 0


def take_python_option(arguments: "list[str]") -> "str | None":
    """Remove `--python 3.12` from the arguments and return the version; None without the option."""
    for index, word in enumerate(arguments):
        option, given, version = word.partition("=")
        if option == "--python":
            version = version or "".join(arguments[index + 1 : index + 2])
            del arguments[index : index + (1 if given else 2)]
            if version in SUPPORTED:
                return version
            raise Failure("--python takes one of " + ", ".join(SUPPORTED) + ".")
    return None


def run_command(arguments: "list[str]") -> int:
    """Run a command line and return its exit code."""
    wanted = take_python_option(arguments)
    name, rest = (arguments or ["help"])[0], arguments[1:]
    journal = os.path.join(".venv", "demo", "journal.jsonl")
    report = os.path.join(".venv", "demo", "report")
    programs = {
        "run": ["taskqueue", "demo", "--journal", journal],
        "report": ["taskqueue", "pipeline", "report", "--open"],
        "check": ["python", "tools/check.py"],
        "docs": ["mkdocs", "build", "--strict", "--quiet"],
        "bench": ["python", "benchmarks/run.py"],
        "chaos": ["python", "-m", "tests.chaos"],
        "soak": ["python", "-m", "tests.soak"],
        "model": ["python", "-m", "tests.model"],
        "mutants": ["python", "-m", "tests.mutants"],
        "audit": ["python", "-m", "tools.audit"],
    }
    if name == "report" and not any(word.startswith(SOURCES) for word in rest):
        if not os.path.exists(os.path.join(ROOT, journal)) and not {"-h", "--help"} & set(rest):
            raise Failure("There is no demo to report on yet: run `python3 dev.py run` first.")
        programs["report"] += ["--journal", journal, "--out", report]
    if name == "test":
        return test(environment(wanted), rest)
    if name in programs:
        return replace_process(
            environment(wanted),
            programs[name] + rest,
            _TASKQUEUE_DEMO_REPORT="python3 dev.py report",
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
    raise Failure(f"There is no command {name}: `python3 dev.py help` lists all commands.")


def main(arguments: "list[str]") -> int:
    """Run a command line, report an error in one sentence, and return the exit code."""
    try:
        return run_command(list(arguments))
    except Failure as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
