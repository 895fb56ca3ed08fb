"""Plugin hooks: every plugin sees each event, and a failing plugin does no harm to the others or to the application."""

import asyncio
import logging
from typing import Any

import pluggy
import pytest

from taskqueue_core.hooks import Hooks, Identity, hookimpl
from taskqueue_core.tasks import Confirmation, Expired, Published, Task

TASK = Task(key="k")
CONFIRMATION = Confirmation(key="k", task_id=TASK.id, status=Published.ACCEPTED)


class Recorder:
    """A plugin that records all arguments of the ``published`` hook."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @hookimpl
    def published(self, tasks: Any, confirmations: Any) -> None:
        """Record both arguments of the call."""
        self.seen.append((tasks, confirmations))


class Choosy:
    """A plugin whose hooks accept only some of the arguments, or none."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @hookimpl
    def published(self, confirmations: Any) -> None:
        """Record the one argument that this hook accepts."""
        self.seen.append(confirmations)

    @hookimpl
    def delivered(self) -> None:
        """Record that the hook was called, without any argument."""
        self.seen.append("delivered")


class Failing:
    """A plugin that raises an exception in each hook."""

    @hookimpl
    def published(self) -> None:
        """Raise `KeyError`."""
        raise KeyError("broken plugin")

    @hookimpl
    def authenticate(self) -> None:
        """Raise `ValueError`."""
        raise ValueError("broken plugin")


def hooks_with(*plugins: object) -> Hooks:
    """Return hooks with the plugins registered in this order."""
    hooks = Hooks()
    for plugin in plugins:
        hooks.register(plugin)
    return hooks


def test_a_batch_is_one_call() -> None:
    """A batch of tasks is one call of each plugin, with all tasks of the batch."""
    recorder = Recorder()
    hooks_with(recorder).fire("published", tasks=(TASK,) * 100, confirmations=(CONFIRMATION,) * 100)
    assert recorder.seen == [((TASK,) * 100, (CONFIRMATION,) * 100)]


def test_what_plugins_see_is_frozen() -> None:
    """The objects passed to plugins are immutable."""
    for thing in (TASK, CONFIRMATION, Expired("k", "t", 1), Identity(name="n")):
        name = thing.__struct_fields__[0]
        with pytest.raises(AttributeError):
            setattr(thing, name, "other")


def test_an_implementation_names_the_arguments_it_wants() -> None:
    """A hook function may accept only some of the hook's arguments, or none."""
    choosy = Choosy()
    hooks = hooks_with(choosy)
    hooks.fire("published", tasks=(TASK,), confirmations=(CONFIRMATION,))
    hooks.fire("delivered", deliveries=(), consumer="w")
    assert choosy.seen == [(CONFIRMATION,), "delivered"]


def test_a_failing_plugin_is_logged_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """A plugin that raises is logged with its name; the plugins before and after it are still called."""
    first, last = Recorder(), Recorder()
    hooks = Hooks()
    for plugin, name in ((first, "first"), (Failing(), "broken"), (last, "last")):
        hooks.register(plugin, name=name)
    with caplog.at_level(logging.ERROR):
        hooks.fire("published", tasks=(TASK,), confirmations=(CONFIRMATION,))
    assert len(first.seen) == len(last.seen) == 1
    assert "plugin broken failed in hook published" in caplog.text
    assert "KeyError" in caplog.text


def test_order_of_calls() -> None:
    """Plugins are called in the reverse order of their registration, unless they set ``tryfirst`` or ``trylast``."""
    called: list[str] = []

    def plugin(name: str, **options: Any) -> object:
        class Plugin:
            def delivered(self) -> None:
                called.append(name)

        hookimpl(Plugin.delivered, **options)
        return Plugin()

    hooks = hooks_with(
        plugin("a", trylast=True), plugin("b"), plugin("c"), plugin("d", tryfirst=True)
    )
    hooks.fire("delivered", deliveries=(), consumer="w")
    assert called == ["d", "c", "b", "a"]


def knows(token: str, name: str) -> object:
    """Return a plugin that authenticates one token and returns an identity with this name."""

    class Plugin:
        @hookimpl
        def authenticate(self, token: str | None) -> Identity | None:
            return Identity(name=name) if token == known else None

    known = token
    return Plugin()


def test_the_first_answer_counts() -> None:
    """A plugin that does not know a token returns None, and the next plugin is called; the first identity wins."""
    hooks = hooks_with(Failing(), knows("t", "later"), knows("t", "first"), knows("u", "other"))
    answers = [
        hooks.first("authenticate", token=token, peer="p") for token in ("t", "u", "v", None)
    ]
    assert answers == [Identity(name="first"), Identity(name="other"), None, None]


def test_a_failing_plugin_authenticates_no_token(caplog: pytest.LogCaptureFixture) -> None:
    """Fault K1: if a plugin raises during authentication, the token is not authenticated, and the error is logged."""
    assert hooks_with(Failing()).first("authenticate", token="t", peer="p") is None
    assert "authenticate" in caplog.text


def test_cancellation_is_not_swallowed() -> None:
    """A plugin's ordinary exceptions are logged and skipped, but `CancelledError` reaches the caller."""

    class Cancelling:
        @hookimpl
        def delivered(self) -> None:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        hooks_with(Cancelling()).fire("delivered", deliveries=(), consumer="w")


def test_wants() -> None:
    """``wants`` returns whether any plugin implements a hook, so that hot paths can skip the call."""
    plugin = Recorder()
    hooks = hooks_with(plugin)
    assert (hooks.wants("published"), hooks.wants("delivered")) == (True, False)
    hooks.unregister(plugin)
    assert not hooks.wants("published")
    hooks.fire("published", tasks=(), confirmations=())
    assert plugin.seen == []


class Unknown:
    """A plugin that marks a function as a hook although no hook has this name."""

    @hookimpl
    def exploded(self) -> None:
        """Never called, because the plugin is refused."""


class Greedy:
    """A plugin whose hook accepts an argument that the hook does not have."""

    @hookimpl
    def published(self, tasks: Any, tuesday: Any) -> None:
        """Never called, because the plugin is refused."""


class Wrapping:
    """A plugin whose hook is a wrapper around the other plugins, which is not supported."""

    @hookimpl(wrapper=True)
    def published(self) -> Any:
        """Never called, because the plugin is refused."""
        return (yield)


class Waiting:
    """A plugin whose hook is a coroutine function, which is not supported."""

    @hookimpl
    async def published(self) -> None:
        """Never called, because the plugin is refused."""


@pytest.mark.parametrize("plugin", [Unknown(), Greedy(), Wrapping(), Waiting()])
def test_what_would_never_be_called_is_refused(plugin: object) -> None:
    """A plugin with an invalid hook is refused as a whole, and already when it is registered."""
    recorder = Recorder()
    hooks = hooks_with(recorder)
    with pytest.raises(ValueError, match=r"exploded|tuesday|plain function"):
        hooks.register(plugin, name="bad")
    assert "bad" not in hooks.plugins
    hooks.fire("published", tasks=(), confirmations=())
    assert len(recorder.seen) == 1


def test_a_module_can_be_a_plugin() -> None:
    """A module with hook functions can be a plugin; a class is not needed."""
    module = type(pytest)("a_plugin")
    calls: list[Any] = []

    @hookimpl
    def expired(tasks: Any) -> None:
        calls.append(tasks)

    vars(module)["expired"] = expired
    hooks = hooks_with(module)
    hooks.fire("expired", tasks=(Expired("k", "t", 1),))
    assert calls == [(Expired("k", "t", 1),)]


def test_names() -> None:
    """Plugins are listed by the names under which they were registered, and each name can be used once."""
    hooks = Hooks()
    hooks.register(Recorder(), name="one")
    hooks.register(Recorder(), name="two")
    assert set(hooks.plugins) == {"one", "two"}
    with pytest.raises(ValueError, match="one"):
        hooks.register(Recorder(), name="one")


def test_hooks_of_two_applications_are_separate() -> None:
    """Two applications in one process have separate hooks: a plugin of the first gets no events of the second."""
    recorder = Recorder()
    hooks_with(recorder)
    Hooks().fire("published", tasks=(), confirmations=())
    assert recorder.seen == []
    assert pluggy.HookimplMarker("taskqueue") is not hookimpl
