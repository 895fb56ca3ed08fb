"""What is to be done: three models, five servers, and the jobs with what is to go wrong in them."""

from __future__ import annotations

import hashlib
import random
import secrets
from typing import Any

import msgspec

from taskqueue_dispatch.models import ModelConfig, ModelType

RETRIES = 2
"""failures of a job after the first one before it goes to the dead letters"""
_PER_SECOND = 25
_FEWEST = 50
_FAILS_ONCE, _POISON = 0.05, 3
_WITH_CALLBACK = 0.4
_TENANTS = ("acme", "globex", "initech")


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A model: how its servers answer, and how long its jobs run there."""

    name: str
    """as it is shown"""
    model: str
    """as it is registered: new with each run"""
    config: ModelConfig
    share: float
    """of all jobs"""
    shortest: float
    longest: float
    pushed: bool = False
    """its servers push results, and are not asked for them"""

    @property
    def answer_mode(self) -> str:
        """How its servers answer, in a word."""
        if self.pushed:
            return "async, pushed"
        return "async, polled" if self.config.model_type is ModelType.ASYNC else "sync"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A server: the slots of each of its models by the model's name."""

    name: str
    slots: dict[str, int]


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job. ``fails`` is how often: below 0 always."""

    key: str
    """its idempotency key"""
    name: str
    """of its model"""
    prompt: str
    seconds: float
    fails: int = 0
    tenant: str | None = None
    priority: int = 5
    callback: bool = False

    @property
    def payload(self) -> dict[str, Any]:
        """What the server is sent."""
        return {"prompt": self.prompt, "seconds": self.seconds, "fails": self.fails}


class DispatchDemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    run: str
    models: tuple[ModelPlan, ...]
    machines: tuple[Machine, ...]
    jobs: tuple[PlannedJob, ...]
    crashes: str
    """the server that crashes midway"""
    lies: str
    """the one that says that it is idle while it is not"""

    def model_plan(self, name: str) -> ModelPlan:
        """Return the model of this name."""
        return next(model for model in self.models if model.name == name)

    def slots(self, name: str) -> int:
        """Return how many slots a model has on all servers."""
        return sum(server.slots.get(name, 0) for server in self.machines)


def answer_of(prompt: str) -> dict[str, Any]:
    """Return what a server answers to a prompt: it can be computed anywhere, and compared."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return {"text": digest[:24], "tokens": len(prompt)}


def make_plan(jobs: int, seed: int) -> DispatchDemoPlan:
    """Return the plan of a run: the same for a seed, but for the names, which are new with each run."""
    run = secrets.token_hex(3)
    chosen = random.Random(seed)  # noqa: S311 - which job fails need not be a secret
    models = _manners(run)
    names = chosen.choices(
        [model.name for model in models],
        [model.share for model in models],
        k=max(jobs - _POISON, 0),
    )
    names = (names + [model.name for model in models])[:jobs]
    of = {model.name: model for model in models}
    made = []
    for number, name in enumerate(names):
        model_plan, poison = of[name], number >= jobs - _POISON
        once = chosen.random() < _FAILS_ONCE
        made.append(
            PlannedJob(
                key=f"{run}-{number}",
                name=name,
                prompt=f"{name} {number}: " + "x" * chosen.randrange(200),
                seconds=round(chosen.uniform(model_plan.shortest, model_plan.longest), 3),
                fails=-1 if poison else int(once),
                tenant=chosen.choice(_TENANTS),
                priority=chosen.choice((2, 5, 5, 5, 8)),
                callback=chosen.random() < _WITH_CALLBACK or poison,
            )
        )
    chosen.shuffle(made)
    return DispatchDemoPlan(
        run=run,
        models=models,
        machines=(
            Machine(name="gpu-1", slots={"chat": 2}),
            Machine(name="gpu-2", slots={"chat": 2}),
            Machine(name="gpu-3", slots={"image": 3}),
            Machine(name="gpu-4", slots={"image": 2}),
            Machine(name="gpu-5", slots={"speech": 3}),
        ),
        jobs=tuple(made),
        crashes="gpu-3",
        lies="gpu-1",
    )


def jobs_for(seconds: float) -> int:
    """Return how many jobs take the servers about so long."""
    return max(_FEWEST, round(seconds * _PER_SECOND))


def _manners(run: str) -> tuple[ModelPlan, ...]:
    shared: dict[str, Any] = {"max_retries": RETRIES, "max_poll_time": 20, "queue_per_slot": 10}
    polled = {"model_type": ModelType.ASYNC, "poll_endpoint_template": "/status/{id}"}
    return (
        ModelPlan(
            name="chat",
            model=f"chat@{run}",
            config=ModelConfig.model_validate({**shared, "poll_endpoint_template": "/status/{id}"}),
            share=0.5,
            shortest=0.05,
            longest=0.25,
        ),
        ModelPlan(
            name="image",
            model=f"image@{run}",
            config=ModelConfig.model_validate({**shared, **polled, "poll_interval": 0.1}),
            share=0.3,
            shortest=0.2,
            longest=0.7,
        ),
        ModelPlan(
            name="speech",
            model=f"speech@{run}",
            config=ModelConfig.model_validate({**shared, **polled, "poll_interval": 5.0}),
            share=0.2,
            shortest=0.1,
            longest=0.4,
            pushed=True,
        ),
    )


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    backend: str
    """the word that names the backend"""
    embedded: bool = False
    """run a store for it, in a folder that is removed at the end"""
    jobs: int = 200
    """how many jobs are submitted"""
    seed: int = 0
    """of the jobs, and of how the servers behave"""
    port: int = 0
    """where the server with the dashboard listens; 0 takes a free one"""
    keep_going: bool = False
    """leave the server and the simulated ones running after the report, until interrupted"""
