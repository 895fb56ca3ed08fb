"""The state of a single task without any storage: rules that the conformance kit does not cover."""

from taskqueue_core.authoring.entries import Entry
from taskqueue_core.tasks import Settled, State, Task

NOW = 1000.0


def entry() -> Entry:
    """Return an entry that was delivered once, with the receipt ``r1``."""
    made = Entry(task=Task(key="k", id="t"), state=State.IN_FLIGHT, updated_at=NOW)
    made.hand_out("r1", NOW)
    return made


def test_recovery_changes_no_answer() -> None:
    """Law 2: a loss found by recovery does not count as a settlement.

    If the consumer sends an earlier settlement again, it gets the same answer as before.
    """
    lost = entry()
    lost.settle("lost")
    assert not lost.lose(1, NOW)
    lost.hand_out("r2", NOW)
    assert lost.lose(1, NOW), "taken back from a process that died, its receipt still there"
    assert lost.settled_before("r1", "lost") is Settled.OK


def test_retry_and_redrive() -> None:
    """REV-E1, C16: a retry raises the attempt.

    After a redrive, or a retry of a dead task, the attempts so far no longer count.
    """
    retried = entry()
    token = retried.retry_token(None, retried.delivery)
    retried.settle("retry")
    retried.retry(token, "boom", NOW)
    assert (retried.attempt, retried.prior, token) == (2, 0, "attempt:1")
    retried.state = State.DEAD
    retried.redrive()
    assert (retried.attempt, retried.prior) == (2, 1)
    retried.retry(retried.retry_token(None, None), None, NOW)
    assert (retried.attempt, retried.prior) == (3, 2)


def test_history_is_bounded() -> None:
    """Only the last 20 failures of a task are kept, oldest first."""
    failing = entry()
    for number in range(50):
        failing.fail(f"error {number}", NOW + number)
    assert len(failing.history) == 20
    assert failing.status.error == failing.dead_letter.history[-1].error == "error 49"
