"""A hostile peer for fuzzing: it sends valid frames at the wrong time, broken frames, and bytes that are not frames."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import msgspec

from tests.server.observed import Observed
from tests.server.rude import BINARY, CLOSE, CONT, PING, PONG, TEXT, RawSocket, frame
from tests.server.test_session_fuzz import BROKEN, FIELDS, KINDS, STRINGS

_BURST = 40


class Noise:
    """A peer that connects, sends bursts of frames, and reconnects after it was disconnected.

    It never subscribes to the key of the well-behaved worker.
    """

    def __init__(self, it: Observed, chance: random.Random, stolen: list[str]) -> None:
        """``stolen`` contains receipts that were issued to another worker."""
        self._it = it
        self._chance = chance
        self._stolen = stolen
        self.sent = 0
        self._raw: RawSocket | None = None
        self._reading: asyncio.Task[int | None] | None = None
        self._rude = 0.0

    async def make(self, frames: int) -> None:
        """Send ``frames`` frames, then close the connection."""
        end = self.sent + frames
        try:
            while self.sent < end:
                raw = await self._connected()
                count = min(_BURST, end - self.sent)
                data = b"".join(self._frame() for _ in range(count))
                with contextlib.suppress(OSError):
                    await raw.send(data)
                self.sent += count
                await asyncio.sleep(0)
        finally:
            await self._disconnect()

    async def _connected(self) -> RawSocket:
        if self._raw is not None and self._reading is not None and not self._reading.done():
            return self._raw
        await self._disconnect()
        while True:
            with contextlib.suppress(ConnectionError):
                self._raw = await RawSocket.opened(self._it.port)
                break
        # Most bursts start with a valid hello, so that many frames reach a session; a few start with anything.
        self._rude = self._chance.choice([0.0005, 0.002, 0.01, 0.3])
        if self._chance.random() < 0.97:
            self._raw.say(
                "hello",
                worker_id=self._chance.choice(["w", "w2", "a:b"]),
                keys=["k"],
                credit=self._chance.choice([0, 5, 10_000]),
                holding=self._stolen if self._chance.random() < 0.3 else [],
            )
        self._reading = asyncio.create_task(self._raw.end())
        return self._raw

    async def _disconnect(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._raw is not None:
            self._raw.close(reset=self._chance.random() < 0.3)
        self._raw = self._reading = None

    def _frame(self) -> bytes:
        chance = self._chance
        if chance.random() < self._rude:
            return self._broken()
        kind = chance.random()
        if kind < 0.1:
            return frame(chance.randbytes(chance.randrange(126)), chance.choice([PING, PONG]))
        text = msgspec.json.encode(self._proper())
        if kind < 0.2 and len(text) > 4:
            at = chance.randrange(1, len(text))
            ping = frame(b"", PING) if chance.random() < 0.3 else b""
            return frame(text[:at], TEXT, fin=False) + ping + frame(text[at:], CONT)
        mask = chance.randbytes(4) if kind < 0.4 else bytes(4)
        return frame(text, mask=mask)

    def _proper(self) -> dict[str, Any]:
        """Return a frame that is valid at any time but names receipts that do not exist or belong to another worker."""
        chance = self._chance
        some = [self._receipt() for _ in range(chance.randrange(4))]
        one = self._receipt()
        frames: list[dict[str, Any]] = [
            {"type": "ack", "receipts": some, "results": {r: self._value() for r in some}},
            {"type": "redeliver", "receipts": some},
            {"type": "retry", "receipt": one, "error": "e", "delay": 1},
            {"type": "retry", "receipt": one},
            {"type": "dead_letter", "receipt": one, "reason": "r"},
            {"type": "progress", "receipt": one, "value": 0.5},
            {"type": "progress", "receipt": one, "value": "half"},
            {"type": "ping", "n": chance.randrange(1 << 40)},
            {"type": "pong"},
            {"type": chance.choice(["from_the_future", "Hello", "\x1b"]), "x": self._value()},
        ]
        found = chance.choice(frames)
        if chance.random() < 0.2:
            found[chance.choice(["x", "y", "token"])] = self._value()
        return found

    def _receipt(self) -> str:
        return self._chance.choice([*self._stolen, "r", "x.1", "😀" * 50, "nobody"])

    def _value(self, depth: int = 0) -> Any:
        chance = self._chance
        simple = [None, True, 1 << 63, -1, 0.5, chance.choice(STRINGS), chance.randrange(20)]
        if depth > 2 or chance.random() < 0.8:
            return chance.choice(simple)
        if chance.random() < 0.5:
            return [self._value(depth + 1) for _ in range(chance.randrange(4))]
        return {chance.choice(STRINGS): self._value(depth + 1) for _ in range(chance.randrange(4))}

    def _broken(self) -> bytes:
        chance = self._chance
        bits = chance.randbytes(chance.randrange(1, 60))
        fields = {chance.choice(FIELDS): self._value() for _ in range(chance.randrange(5))}
        turned = bytearray(frame(msgspec.json.encode(self._proper())))
        for _ in range(chance.randrange(1, 4)):
            turned[chance.randrange(len(turned))] = chance.randrange(256)
        return chance.choice(
            [
                bits,
                bytes(turned),
                frame(chance.choice(BROKEN).encode(errors="surrogatepass")),
                frame(bits, chance.randrange(16)),
                frame(bits, fin=False),
                frame(b'{"type":"ping"}', BINARY),
                frame(chance.randbytes(2), CLOSE),
                frame(b'{"type":"bye"}'),
                frame(msgspec.json.encode({"type": chance.choice(KINDS), **fields})),
            ]
        )
