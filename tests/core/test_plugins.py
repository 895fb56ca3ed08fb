"""Loading the installed plugins: which are loaded, and how a plugin that cannot be loaded is reported."""

import logging
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from taskqueue_core.hooks import HOOK_API, PLUGIN_GROUP, Hooks, load_plugins

GOOD = f"""
from taskqueue_core.hooks import hookimpl

TASKQUEUE_HOOK_API = {HOOK_API}
calls = []

@hookimpl
def published(tasks):
    calls.append(tasks)

class AsClass:
    TASKQUEUE_HOOK_API = {HOOK_API}

    @hookimpl
    def published(self, tasks):
        calls.append(tasks)
"""
MODULES = {
    "good_plugin": GOOD,
    "plugin_without_version": GOOD.replace(f"TASKQUEUE_HOOK_API = {HOOK_API}", ""),
    "plugin_of_tomorrow": GOOD.replace(f"API = {HOOK_API}", f"API = {HOOK_API + 1}"),
    "plugin_with_text": GOOD.replace(f"API = {HOOK_API}", f"API = '{HOOK_API}'"),
    "plugin_that_fails": "1 / 0",
    "plugin_that_does_not_fit": GOOD.replace("published", "publishing"),
    "plugin_that_cannot_be_made": GOOD + "\n    def __init__(self): raise OSError\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the plugin modules of `MODULES` to a folder from which the test can import them."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def point(name: str, value: str) -> EntryPoint:
    """Return the entry point that an installed plugin declares."""
    return EntryPoint(name=name, value=value, group=PLUGIN_GROUP)


GOOD_POINTS = [point("b", "good_plugin:AsClass"), point("a", "good_plugin")]


def test_modules_and_classes() -> None:
    """A plugin is a module or a class; a class is instantiated once."""
    hooks = Hooks()
    assert load_plugins(hooks, matches=GOOD_POINTS) == ("a", "b")
    assert set(hooks.plugins) == {"a", "b"}
    hooks.fire("published", tasks=(1,), confirmations=())
    assert sys.modules["good_plugin"].calls == [(1,), (1,)]


@pytest.mark.parametrize(
    ("allow", "deny", "loaded"),
    [
        (None, (), ("a", "b")),
        ({"a"}, (), ("a",)),
        ((), (), ()),
        (None, {"a"}, ("b",)),
        ({"a", "b"}, {"a"}, ("b",)),
        ({"other"}, (), ()),
        (None, {"other"}, ("a", "b")),
    ],
)
def test_allow_and_deny(allow: set[str] | None, deny: set[str], loaded: tuple[str, ...]) -> None:
    """Without a list of allowed plugins all are loaded, with an empty list none; a denied plugin is never loaded."""
    assert load_plugins(Hooks(), allow=allow, deny=deny, matches=GOOD_POINTS) == loaded


def test_what_is_not_allowed_is_not_imported(caplog: pytest.LogCaptureFixture) -> None:
    """A plugin that is denied, or not allowed, is not even imported."""
    fails = [point("x", "plugin_that_fails")]
    assert load_plugins(Hooks(), deny={"x"}, matches=fails) == ()
    assert load_plugins(Hooks(), allow={"y"}, matches=fails) == ()
    assert not caplog.records
    assert "plugin_that_fails" not in sys.modules


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("plugin_without_version", "plugin x not loaded: its TASKQUEUE_HOOK_API is None"),
        (
            "plugin_of_tomorrow",
            f"plugin x not loaded: its TASKQUEUE_HOOK_API is {HOOK_API + 1}, but must be {HOOK_API}",
        ),
        ("plugin_with_text", "plugin x not loaded: its TASKQUEUE_HOOK_API is"),
        ("plugin_that_fails", "ZeroDivisionError"),
        ("plugin_that_does_not_fit", "publishing"),
        ("plugin_that_cannot_be_made:AsClass", "OSError"),
        ("no_such_plugin", "ModuleNotFoundError"),
        ("good_plugin:nothing", "AttributeError"),
    ],
)
def test_a_bad_plugin_is_logged_and_left_out(
    target: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A plugin that cannot be loaded is logged with the reason.

    The other plugins are loaded and the application starts.
    """
    hooks = Hooks()
    with caplog.at_level(logging.ERROR):
        loaded = load_plugins(hooks, matches=[point("x", target), *GOOD_POINTS])
    assert loaded == ("a", "b")
    assert set(hooks.plugins) == {"a", "b"}
    assert why in caplog.text


def test_two_plugins_of_one_name(caplog: pytest.LogCaptureFixture) -> None:
    """If two plugins have the same name, the first is loaded and the second is logged as not loaded."""
    twice = [point("a", "good_plugin"), point("a", "good_plugin:AsClass")]
    assert load_plugins(Hooks(), matches=twice) == ("a",)
    assert "plugin a could not be loaded" in caplog.text
