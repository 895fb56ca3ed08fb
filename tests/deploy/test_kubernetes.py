"""Tests of the Kubernetes manifests: they are valid by the API's schemas, and match how the server behaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml  # type: ignore[import-untyped]

from taskqueue_core.config import Settings
from taskqueue_memory import MemoryBackend
from taskqueue_server import create_app
from tests.server.support import settings

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
BY_KIND: dict[str, dict[str, Any]] = {
    one["kind"]: one for one in yaml.safe_load_all((FOLDER / "server.yaml").read_text("utf-8"))
}
POD: dict[str, Any] = BY_KIND["Deployment"]["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
LABELS: dict[str, str] = BY_KIND["Service"]["spec"]["selector"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_the_schemas_find_nothing(file: Path) -> None:
    """Each manifest is valid by the API's strict schemas, without unknown fields.

    Only KEDA's resources have no schema there.
    """
    done = subprocess.run(
        [str(Path(sys.executable).parent / "kubernetes-validate"), "--strict", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    unknown = [line for line in done.stdout.splitlines() if "Couldn't find" in line]
    assert all("keda.sh" in line for line in unknown)


def test_labels_and_names_agree() -> None:
    """Every selector for the server's pods matches their labels."""
    labels = BY_KIND["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert BY_KIND["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert BY_KIND["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert BY_KIND["Service"]["spec"]["selector"] == labels
    scaled = BY_KIND["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
    assert scaled == BY_KIND["Deployment"]["metadata"]["name"]


def test_only_what_is_needed_may_connect() -> None:
    """U26 (A10): network policies cover all pods in both directions, and let the workers reach the servers' port."""
    for file in FILES:
        all_of_it = list(yaml.safe_load_all(file.read_text("utf-8")))
        policies = [one["spec"] for one in all_of_it if one["kind"] == "NetworkPolicy"]
        deployments = [one["spec"] for one in all_of_it if one["kind"] == "Deployment"]
        covered = [one["podSelector"]["matchLabels"] for one in policies]
        assert covered == [one["selector"]["matchLabels"] for one in deployments]
        assert all(one["policyTypes"] == ["Ingress", "Egress"] for one in policies)
        (pod,) = (one["template"] for one in deployments)
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "worker":
            assert "ingress" not in policies[0]
            assert policies[0]["egress"][1]["to"][0]["podSelector"]["matchLabels"] == LABELS
        else:
            (rule,) = policies[0]["ingress"]
            workers = {"app.kubernetes.io/component": "worker"}
            assert rule["from"][0] == {"podSelector": {"matchLabels": workers}}
            assert rule["ports"] == [{"protocol": "TCP", "port": SERVER["ports"][0]["name"]}]


async def test_probes_ask_what_the_server_answers() -> None:
    """Fault B1: while the store is unavailable a server is not ready, but it is not restarted."""
    backend = MemoryBackend()
    app = create_app(backend, settings())
    transport = httpx2.ASGITransport(app=app)
    paths = {
        probe: SERVER[f"{probe}Probe"]["httpGet"]["path"]
        for probe in ("startup", "liveness", "readiness")
    }
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8420") as client,
    ):
        for path in paths.values():
            assert (await client.get(path)).status_code == 200
        app.state.context.draining.set()
        answers = {probe: (await client.get(path)).status_code for probe, path in paths.items()}
    assert answers == {"startup": 200, "liveness": 200, "readiness": 503}


def test_it_ends_in_order() -> None:
    """The grace period is longer than the pause before the signal, the drain and the handover together."""
    drain = float(BY_KIND["ConfigMap"]["data"]["TASKQUEUE_DRAIN"])
    pause = float(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] >= pause + drain + 10
    assert BY_KIND["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_settings_are_real() -> None:
    """Every environment variable in the manifests is a setting that exists."""
    for name in BY_KIND["ConfigMap"]["data"]:
        if not name.startswith("TASKQUEUE_REDIS_"):
            assert name.removeprefix("TASKQUEUE_").lower() in Settings.model_fields


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_pods_are_restricted(file: Path) -> None:
    """Security 24: pods meet the pod security standard ``restricted``, and secrets are only referred to."""
    for one in yaml.safe_load_all(file.read_text("utf-8")):
        assert one["kind"] != "Secret"
        if one["kind"] != "Deployment":
            continue
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            for variable in container.get("env", ()):
                secret = "TOKEN" in variable["name"]
                assert ("valueFrom" in variable) == secret
