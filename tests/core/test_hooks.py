"""Hooks: plugins see what happens, each on its own, and can harm nobody."""

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
    """Sees all there is to see of a publish."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.seen: list[Any] = []

    @hookimpl
    def published(self, tasks: Any, confirmations: Any) -> None:
        """Note the call."""
        self.seen.append((tasks, confirmations))


class Choosy:
    """Names one argument of two."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.seen: list[Any] = []

    @hookimpl
    def published(self, confirmations: Any) -> None:
        """Note the argument."""
        self.seen.append(confirmations)

    @hookimpl
    def delivered(self) -> None:
        """Note the call."""
        self.seen.append("delivered")


class Failing:
    """Fails in each hook."""

    @hookimpl
    def published(self) -> None:
        """Fail."""
        raise KeyError("broken plugin")

    @hookimpl
    def authenticate(self) -> None:
        """Fail."""
        raise ValueError("broken plugin")


def hooks_with(*plugins: object) -> Hooks:
    """Hooks with plugins registered in this order."""
    hooks = Hooks()
    for plugin in plugins:
        hooks.register(plugin)
    return hooks


def test_a_batch_is_one_call() -> None:
    """However many tasks a call has, each plugin is called once, with all of them."""
    recorder = Recorder()
    hooks_with(recorder).fire("published", tasks=(TASK,) * 100, confirmations=(CONFIRMATION,) * 100)
    assert recorder.seen == [((TASK,) * 100, (CONFIRMATION,) * 100)]


def test_what_plugins_see_is_frozen() -> None:
    """A plugin cannot change what it observes."""
    for thing in (TASK, CONFIRMATION, Expired("k", "t", 1), Identity(name="n")):
        name = thing.__struct_fields__[0]
        with pytest.raises(AttributeError):
            setattr(thing, name, "other")


def test_an_implementation_names_the_arguments_it_wants() -> None:
    """Fewer arguments than the hook has, or none, are fine."""
    choosy = Choosy()
    hooks = hooks_with(choosy)
    hooks.fire("published", tasks=(TASK,), confirmations=(CONFIRMATION,))
    hooks.fire("delivered", deliveries=(), consumer="w")
    assert choosy.seen == [(CONFIRMATION,), "delivered"]


def test_a_failing_plugin_is_logged_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """The others are called all the same, whatever the order, and so is the caller's work done."""
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
    """Plugins are called in the reverse order of their registration, unless they ask otherwise."""
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
    """A plugin that knows one token."""

    class Plugin:
        @hookimpl
        def authenticate(self, token: str | None) -> Identity | None:
            return Identity(name=name) if token == known else None

    known = token
    return Plugin()


def test_the_first_answer_counts() -> None:
    """Who does not know a token leaves it to the next; nobody is asked after the first answer."""
    hooks = hooks_with(Failing(), knows("t", "later"), knows("t", "first"), knows("u", "other"))
    answers = [
        hooks.first("authenticate", token=token, peer="p") for token in ("t", "u", "v", None)
    ]
    assert answers == [Identity(name="first"), Identity(name="other"), None, None]


def test_a_failing_plugin_authenticates_no_token(caplog: pytest.LogCaptureFixture) -> None:
    """Fault K1: an error while asking is no answer, and its message is not one either."""
    assert hooks_with(Failing()).first("authenticate", token="t", peer="p") is None
    assert "authenticate" in caplog.text


def test_cancellation_is_not_swallowed() -> None:
    """Only errors are passed over; the end of the task that calls is not."""

    class Cancelling:
        @hookimpl
        def delivered(self) -> None:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        hooks_with(Cancelling()).fire("delivered", deliveries=(), consumer="w")


def test_wants() -> None:
    """Hot paths can ask whether anybody listens."""
    plugin = Recorder()
    hooks = hooks_with(plugin)
    assert (hooks.wants("published"), hooks.wants("delivered")) == (True, False)
    hooks.unregister(plugin)
    assert not hooks.wants("published")
    hooks.fire("published", tasks=(), confirmations=())
    assert plugin.seen == []


class Unknown:
    """Implements what is no hook."""

    @hookimpl
    def exploded(self) -> None:
        """Never called."""


class Greedy:
    """Names an argument that the hook does not have."""

    @hookimpl
    def published(self, tasks: Any, tuesday: Any) -> None:
        """Never called."""


class Wrapping:
    """Wants to be around the others."""

    @hookimpl(wrapper=True)
    def published(self) -> Any:
        """Never called."""
        return (yield)


class Waiting:
    """Wants to be awaited."""

    @hookimpl
    async def published(self) -> None:
        """Never called."""


@pytest.mark.parametrize("plugin", [Unknown(), Greedy(), Wrapping(), Waiting()])
def test_what_would_never_be_called_is_refused(plugin: object) -> None:
    """A plugin that does not fit is refused whole, when it is registered and not when a hook fires."""
    recorder = Recorder()
    hooks = hooks_with(recorder)
    with pytest.raises(ValueError, match=r"exploded|tuesday|plain function"):
        hooks.register(plugin, name="bad")
    assert "bad" not in hooks.plugins
    hooks.fire("published", tasks=(), confirmations=())
    assert len(recorder.seen) == 1


def test_a_module_can_be_a_plugin() -> None:
    """Functions of a module need no class."""
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
    """Plugins are listed by the names that they were given."""
    hooks = Hooks()
    hooks.register(Recorder(), name="one")
    hooks.register(Recorder(), name="two")
    assert set(hooks.plugins) == {"one", "two"}
    with pytest.raises(ValueError, match="one"):
        hooks.register(Recorder(), name="one")


def test_hooks_of_two_applications_are_separate() -> None:
    """Nothing about plugins is global."""
    recorder = Recorder()
    hooks_with(recorder)
    Hooks().fire("published", tasks=(), confirmations=())
    assert recorder.seen == []
    assert pluggy.HookimplMarker("taskqueue") is not hookimpl
