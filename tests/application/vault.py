"""A registry with a codec, for tests."""

from __future__ import annotations

from cryptography.fernet import Fernet as Cipher

from taskqueue_core import (
    Codec,
    CodecChain,
    Fernet,
    Middleware,
    Reject,
    Retry,
    TaskFunction,
    Tasks,
    Unique,
    Zlib,
)
from taskqueue_core.retry import RetryPolicy

OLD, NEW = Cipher.generate_key(), Cipher.generate_key()
SECRET = "card-4711"
RUNS: list[str] = []


class Vault:
    """A registry with an encryption and a compression."""

    def __init__(self, codec: Codec | CodecChain | None = None, *middleware: Middleware) -> None:
        self.tasks = tasks = Tasks(
            prefix="vault.",
            codec=codec or CodecChain(Zlib(above=64), Fernet(keys={"new": NEW})),
            middleware=middleware,
        )

        @tasks.task
        async def charge(card: str, amount: int = 5) -> str:
            RUNS.append(card)
            return f"{card} pays {amount}"

        @tasks.task(retry=RetryPolicy(max_attempts=2, base=0, cap=0, jitter=0))
        async def fail(card: str, how: str) -> None:
            match how:
                case "reject":
                    raise Reject("no_money", f"{card} is empty")
                case "retry":
                    raise Retry(0, f"{card} is busy")
                case _:
                    raise LookupError(f"{card} is unknown")

        @tasks.task(unique=Unique(by=("card",)))
        async def renew(card: str) -> str:
            return card

        @tasks.task(batch=10)
        async def print_all(cards: list[str]) -> list[str]:
            return [card[::-1] for card in cards]

        @tasks.task
        async def measure(card: str) -> int:
            return len(card)

        @tasks.task
        async def report(card: str, day: str) -> str:
            RUNS.append(f"{card} {day}")
            return card

        self.charge, self.fail, self.renew = charge, fail, renew
        self.print_all, self.report, self.measure = print_all, report, measure


def plain_charge() -> TaskFunction[..., str]:
    """Return the task ``vault.charge`` of a registry without a codec."""
    tasks = Tasks(prefix="vault.")

    @tasks.task
    async def charge(card: str, amount: int = 5) -> str:
        return f"{card} pays {amount}"

    return charge
