"""The books of one task, without storage."""

import pytest

from taskqueue_core.entries import POISONED, Entry
from taskqueue_core.tasks import Published, Settled, State, Task

NOW = 1000.0


def entry(state: State = State.IN_FLIGHT) -> Entry:
    """An entry in some state, delivered once where that makes sense."""
    made = Entry(task=Task.of("k", {"n": 1}, id="t"), state=state, updated_at=NOW)
    if state is State.IN_FLIGHT:
        made.hand_out("r1", NOW)
    return made


@pytest.mark.parametrize("state", list(State))
def test_recognising(state: State) -> None:
    """Law 7: known while it lives, while it is dead, and for the window after its end; then new."""
    known = entry(state)
    other = Task.of("k", {"n": 2}, id="t")
    assert known.recognise(known.task, NOW + 299, 300) is Published.DUPLICATE
    assert known.recognise(other, NOW + 299, 300) is Published.CONFLICT
    late = known.recognise(known.task, NOW + 300, 300)
    assert late is (None if known.ended else Published.DUPLICATE)


def test_settling_twice() -> None:
    """Law 2: the same settlement again has the same answer, another one is stale."""
    settled = entry()
    settled.settle("ack")
    assert settled.settled_before("r1", "ack") is Settled.OK
    assert settled.settled_before("r1", "redeliver") is Settled.LEASE_LOST
    assert settled.settled_before("r2", "ack") is Settled.LEASE_LOST


def test_poison() -> None:
    """Law 3: losses alone make poison; attempts play no part, and the last answer says so."""
    lost = entry()
    for loss in range(1, 4):
        lost.hand_out(f"r{loss}", NOW)
        lost.settle("lost")
        assert lost.lose(2, NOW) is (loss == 3)
    assert (lost.attempt, lost.reason) == (1, POISONED)
    assert lost.settled_before("r3", "lost") is Settled.DEAD
    assert [failure.attempt for failure in lost.history] == [1, 1, 1]


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
