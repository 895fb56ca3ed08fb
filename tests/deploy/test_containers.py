"""Tests of the container image and the Compose file: linted, complete and without secrets.

No container engine is needed.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import venv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.redis.backends import KEY, opened, publish, take
from tests.redis.engines import find_engine
from tests.redis.resp import RedisError
from tests.redis.servers import RedisServer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operating.md").read_text("utf-8")
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text("utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text("utf-8"))
IGNORED = (ROOT / ".dockerignore").read_text("utf-8").splitlines()


def instructions(name: str) -> list[str]:
    """Return the arguments of each Dockerfile instruction with this name, with continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    return re.findall(rf"^{name} (.+)$", text, re.MULTILINE)


class TestImage:
    """The Dockerfile."""

    def test_hadolint_finds_nothing(self) -> None:
        """The Dockerfile linter hadolint finds no problem, in shell commands either."""
        done = subprocess.run(
            [str(Path(sys.executable).parent / "hadolint"), "--failure-threshold", "style", "-"],
            input=DOCKERFILE,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout

    def test_it_is_pinned_small_and_not_root(self) -> None:
        """Security 23, 24: the base image has an exact version and digest, and packages are checked by hash.

        The image has a user other than root, and contains no secret.
        """
        bases = {base.split()[0] for base in instructions("FROM")}
        assert len(bases) == 1
        assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", bases.pop())
        assert all("--require-hashes" in c for r in instructions("RUN") for c in installs(r))
        assert instructions("USER") == ["10001:10001"]
        for name in ("ENTRYPOINT", "CMD"):
            assert all(one.startswith("[") for one in instructions(name))
        assert "/alive" in instructions("HEALTHCHECK")[0]
        assert not instructions("ARG")
        assert not re.search(r"(?i)password|secret|TOKEN", " ".join(instructions("ENV")))

    def test_what_is_copied_is_let_in(self) -> None:
        """The build context contains the files that the Dockerfile copies, and nothing else of the project."""
        assert IGNORED[1] == "*"
        let_in = {line[1:] for line in IGNORED if line.startswith("!")}
        for copied in instructions("COPY"):
            if "--from" in copied:
                continue
            for source in copied.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in let_in or (source.endswith(".lock") and "deploy/*.lock" in let_in)

    def test_the_locks_are_those_of_the_project(self) -> None:
        """Each line of the image's lock file is in requirements.lock, so the tested versions are those in the image."""
        done = subprocess.run(
            [sys.executable, "tools/deploy_lock.py", "--check"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def test_the_lock_is_enough(self, tmp_path: Path) -> None:
        """With only the packages of the lock file, every command of the image and the store's backend can start."""
        names = set(re.findall(r"(?m)^([a-z0-9-]+)==", lock()))
        assert {"uvicorn", "msgspec", "typer", "hiredis", "structlog"} <= names
        assert not {"pyspark", "pytest", "mypy", "schemathesis"} & names
        allowed = [str(ROOT / "src"), *(str(one) for one in modules(names, tmp_path))]
        program = (
            "import sys\n"
            "from taskqueue_cli import main\n"
            "import taskqueue_redis, taskqueue_server.process.supervisor, taskqueue_worker\n"
            "from taskqueue_server import create_app\n"
            "for words in (['serve', '--help'], ['worker', '--help'], ['--version']):\n"
            "    assert main(words) == 0\n"
        )
        bare = venv.EnvBuilder(with_pip=False, symlinks=True)
        bare.create(tmp_path / "bare")
        done = subprocess.run(
            [str(tmp_path / "bare/bin/python"), "-W", "error", "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(allowed)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]


def installs(run: str) -> list[str]:
    """Return the commands of a RUN instruction that install packages from an index."""
    return [c for c in run.split("&&") if "pip install" in c and "--no-index" not in c]


def lock() -> str:
    """Return the text of the image's lock file."""
    return (ROOT / "deploy/requirements.lock").read_text("utf-8")


def modules(names: set[str], folder: Path) -> list[Path]:
    """Create a folder with links to the installed modules of these distributions only."""
    from importlib.metadata import distribution  # noqa: PLC0415 - imported here, because only this function uses it

    links = folder / "linked"
    links.mkdir()
    for name in names:
        found = distribution(name)
        for file in found.files or ():
            top = file.parts[0]
            if top not in {"..", "__pycache__"} and not (links / top).exists():
                (links / top).symlink_to(Path(str(found.locate_file(top))))
    return [links]


class TestCompose:
    """The Compose file."""

    def test_everything_it_names_is_there(self) -> None:
        """All secrets, networks, volumes, services and files that the Compose file names exist."""
        for name, service in COMPOSE["services"].items():
            for kind in ("secrets", "networks"):
                assert set(service.get(kind, ())) <= set(COMPOSE[kind]), name
            assert set(service.get("depends_on", {})) <= set(COMPOSE["services"])
            for volume in service.get("volumes", ()):
                source = volume.split(":")[0]
                known = source in COMPOSE["volumes"] or (ROOT / "deploy" / source).is_dir()
                assert known, volume
        build = COMPOSE["services"]["server"]["build"]
        assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).is_file()

    @pytest.mark.parametrize("name", COMPOSE["services"])
    def test_a_service_is_hardened(self, name: str) -> None:
        """Security 24: a service gets its secrets from files.

        It has no additional rights, no writable root, and ports on localhost only.
        """
        service = COMPOSE["services"][name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for variable, value in service.get("environment", {}).items():
            secret = re.search(r"PASSWORD|TOKEN", variable)
            assert not secret or str(value).startswith("/run/secrets/"), variable
        assert all(one["file"].startswith("./secrets/") for one in COMPOSE["secrets"].values())
        command = service.get("command", [])
        assert isinstance(command, list), "the command uses the exec form"

    def test_it_ends_in_order(self) -> None:
        """A server gets more time to stop than its drain takes, and its health check does not depend on the store."""
        server = COMPOSE["services"]["server"]
        drain = float(server["environment"]["TASKQUEUE_DRAIN"])
        assert float(server["stop_grace_period"].removesuffix("s")) >= drain + 15
        assert "healthcheck" not in server, "the health check is defined in the image"

    def test_the_store_is_pinned_and_current(self) -> None:
        """U26 (A10): the store has a digest, and the newest version that the tests run."""
        image = COMPOSE["services"]["redis"]["image"]
        pinned = re.fullmatch(r"valkey/valkey:(\d+\.\d+\.\d+)-\w+@sha256:[0-9a-f]{64}", image)
        assert pinned
        assert tuple(map(int, pinned[1].split("."))) == find_engine().version

    async def test_the_page_creates_the_secrets(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """U26 (A10): the store uses the access list, and the server has a user with only the rights it needs.

        The commands of the page are run, and the store is started with the files that they create.
        """
        (block,) = re.findall(r"```sh\n(docker build .*?)```", PAGE, re.DOTALL)
        lines = [re.sub(r" && chown .*", "", line) for line in block.splitlines()]
        commands = "\n".join(line for line in lines if not line.startswith("docker "))
        (tmp_path / "deploy").mkdir()
        (tmp_path / "src").symlink_to(ROOT / "src")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        run = partial(subprocess.run, stdout=subprocess.DEVNULL, timeout=60, check=True)
        command, environment = ["/bin/sh", "-e", "-c", commands], {**os.environ, "PATH": path}
        await asyncio.to_thread(run, command, cwd=tmp_path, env=environment)
        secrets = tmp_path / "deploy/secrets"
        assert {one["file"].removeprefix("./secrets/") for one in COMPOSE["secrets"].values()} == {
            one.name for one in secrets.iterdir()
        }
        config = dict(
            line.split(" ", 1) for line in (secrets / "redis.conf").read_text().splitlines()
        )
        assert config.pop("dir") == "/data"
        config["aclfile"] = str(secrets / Path(config["aclfile"]).relative_to("/run/secrets"))
        server = COMPOSE["services"]["server"]["environment"]
        with RedisServer(find_engine(), tmp_path / "store", config=config) as store:
            url = server["TASKQUEUE_REDIS_URL"].replace("@redis:6379", f"@127.0.0.1:{store.port}")
            password = secrets / Path(server["TASKQUEUE_REDIS_PASSWORD_FILE"]).name
            fsync = server["TASKQUEUE_REDIS_APPENDFSYNC"]
            async with opened(url, "tq", password_file=password, appendfsync=fsync) as backend:
                await publish(backend, "1")
                subscription = backend.subscribe([KEY], "w1")
                await subscription.ack(*await take(subscription, 1))
                await subscription.close()
            assert not caplog.records, "the settings are complete"
            with pytest.raises(RedisError, match="NOAUTH"):
                store.call("PING")
