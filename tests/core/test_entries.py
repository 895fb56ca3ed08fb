"""The books of one task, without storage, beside what the kit proves of them."""

from taskqueue_core.authoring.entries import Entry
from taskqueue_core.tasks import Settled, State, Task

NOW = 1000.0


def entry() -> Entry:
    """An entry that was delivered once."""
    made = Entry(task=Task(key="k", id="t"), state=State.IN_FLIGHT, updated_at=NOW)
    made.hand_out("r1", NOW)
    return made


def test_recovery_changes_no_answer() -> None:
    """Law 2: a loss that a recovery finds is nobody's settlement: an older one, sent again, is answered as before."""
    lost = entry()
    lost.settle("lost")
    assert not lost.lose(1, NOW)
    lost.hand_out("r2", NOW)
    assert lost.lose(1, NOW), "taken back from a process that died, its receipt still there"
    assert lost.settled_before("r1", "lost") is Settled.OK


def test_retry_and_redrive() -> None:
    """REV-E1, C16: a retry raises the attempt; who is redriven, or retried when dead, gets the attempts anew."""
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
    """Only the last failures are kept, oldest first."""
    failing = entry()
    for number in range(50):
        failing.fail(f"error {number}", NOW + number)
    assert len(failing.history) == 20
    assert failing.status.error == failing.dead_letter.history[-1].error == "error 49"
