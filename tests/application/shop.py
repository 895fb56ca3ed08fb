"""A registry whose handlers note what they do."""

from __future__ import annotations

import threading

from taskqueue_core import Context, Tasks


class Failure(Exception):
    """The exception of a handler of these tests."""


class Shop:
    """A registry whose handlers note in ``log`` what they do."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.tasks = tasks = Tasks(prefix="shop.")

        @tasks.task
        async def charge(order: int, amount: int = 5) -> int:
            self.log.append(f"charge {order}")
            await self.mail.publish(f"buyer of {order}")
            return amount

        @tasks.task
        def mail(to: str) -> str:
            self.log.append(f"mail to {to}")
            return threading.current_thread().name

        @tasks.task
        def fail(context: Context, times: int) -> int:
            self.log.append(f"fail {context.attempt}")
            if context.attempt <= times:
                raise Failure(f"attempt {context.attempt}")
            return context.attempt

        self.charge, self.mail, self.fail = charge, mail, fail
