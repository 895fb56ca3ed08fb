"""The plan of a demo run: three models, five servers, and the jobs, some of which fail."""

from __future__ import annotations

import hashlib
import random
import secrets
from typing import Any

import msgspec

from taskqueue_dispatch.models import ModelConfig, ModelType

CRASHES, FALSE_REPORTER = "gpu-3", "gpu-1"
"""names of the server that crashes, and of the server that falsely reports that it is idle"""
_MACHINES = {
    "gpu-1": {"chat": 2},
    "gpu-2": {"chat": 2},
    "gpu-3": {"image": 3},
    "gpu-4": {"image": 2},
    "gpu-5": {"speech": 3},
}
_JOBS_PER_SECOND = 25
_MIN_JOBS = 50
_POISON_JOBS = 3
_SHARE_FAILING_ONCE = 0.05
_SHARE_WITH_CALLBACK = 0.4
_TENANTS = ("acme", "globex", "initech")


class ModelPlan(msgspec.Struct, frozen=True):
    """A model of the demo: how its servers return results, and how long its jobs run."""

    name: str
    """name of the model in the demo's output"""
    model: str
    """name under which the model is registered; it is different in each run"""
    share: float
    """share of all jobs that are for this model"""
    seconds: tuple[float, float]
    """shortest and longest duration of a job in seconds"""
    config: ModelConfig
    pushed: bool = False
    """whether the model's servers push results instead of being polled"""

    @property
    def answer_mode(self) -> str:
        """How the model's servers return results: synchronously, polled or pushed."""
        if self.pushed:
            return "async, pushed"
        return "async, polled" if self.config.model_type is ModelType.ASYNC else "sync"


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that the demo will submit."""

    key: str
    name: str
    """name of the job's model"""
    prompt: str
    seconds: float
    fails: int
    """number of attempts that fail; -1 if all of them fail"""
    tenant: str
    priority: int
    callback: bool


class DispatchDemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one run of the demo."""

    run: str
    models: dict[str, ModelPlan]
    """models of the demo by name"""
    machines: dict[str, dict[str, int]]
    """number of slots of each model on each server, by server name and model name"""
    jobs: tuple[PlannedJob, ...]

    def jobs_of(self, name: str) -> list[PlannedJob]:
        """Return the jobs of a model."""
        return [job for job in self.jobs if job.name == name]


def answer_of(prompt: str) -> dict[str, Any]:
    """Return the answer of a server to a prompt. The audit computes it again to check results."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return {"text": digest[:24], "tokens": len(prompt)}


def make_plan(jobs: int, seed: int) -> DispatchDemoPlan:
    """Return the plan of a run. The same arguments give the same jobs, except for the names of models and the keys."""
    run = secrets.token_hex(3)
    rng = random.Random(seed)  # noqa: S311 - no secret depends on these values
    models = _models(run)
    shares = [model.share for model in models]
    drawn = rng.choices(models, shares, k=max(jobs - _POISON_JOBS, 0))
    made = []
    # Before the shuffle, the jobs that always fail are the last three, one of each model.
    for number, model in enumerate([*drawn, *models][:jobs]):
        poison = number >= jobs - _POISON_JOBS
        once = rng.random() < _SHARE_FAILING_ONCE
        made.append(
            PlannedJob(
                key=f"{run}-{number}",
                name=model.name,
                prompt=f"{model.name} {number}: " + "x" * rng.randrange(200),
                seconds=round(rng.uniform(*model.seconds), 3),
                fails=-1 if poison else int(once),
                tenant=rng.choice(_TENANTS),
                priority=rng.choice((2, 5, 5, 5, 8)),
                callback=rng.random() < _SHARE_WITH_CALLBACK or poison,
            )
        )
    rng.shuffle(made)
    by_name = {model.name: model for model in models}
    return DispatchDemoPlan(run=run, models=by_name, machines=_MACHINES, jobs=tuple(made))


def jobs_for(seconds: float) -> int:
    """Return the number of jobs, at least 50, that keep the servers busy for about this many seconds."""
    return max(_MIN_JOBS, round(seconds * _JOBS_PER_SECOND))


def _models(run: str) -> tuple[ModelPlan, ...]:
    sync = ModelConfig(
        max_retries=2, max_poll_time=20, queue_per_slot=10, poll_endpoint_template="/status/{id}"
    )
    later = sync.model_copy(update={"model_type": ModelType.ASYNC})
    polled = later.model_copy(update={"poll_interval": 0.1})
    pushed = later.model_copy(update={"poll_interval": 5.0})
    return (
        ModelPlan("chat", f"chat@{run}", 0.5, (0.05, 0.25), sync),
        ModelPlan("image", f"image@{run}", 0.3, (0.2, 0.7), polled),
        ModelPlan("speech", f"speech@{run}", 0.2, (0.1, 0.4), pushed, pushed=True),
    )


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one run of the demo."""

    backend: str
    embedded: bool = False
    """whether to start an embedded store, whose folder is removed at the end"""
    jobs: int = 200
    seed: int = 0
    """random seed of the jobs"""
    port: int = 0
    """port of the server with the dashboard; 0 selects a free port"""
    keep_going: bool = False
    """whether to keep all servers running after the report, until interrupted"""
