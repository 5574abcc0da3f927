"""`python tools/fuzz_wire.py`: mutated frames and half-open connections against the Kafka listener of a live mesh.

A mesh of its own (one controller, one broker) gets requests until it has looked into `--frames` of them, by its own
count, which leaves out what comes behind one that ends its connection: whole ones from `tests/golden/wire` and empty
ones of each API, of which bits are flipped, lengths lie, ends are missing, keys and versions are any; alone or in
pipelines, whole or in pieces, on connections that are closed, reset, or left half open. Meanwhile an honest client asks
on a connection of its own, which must never break. In the end the same processes must run, with no more memory than
`--growth-mib` above what they had after a first tenth, and must answer on a new one. The seed replays what is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import struct
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kipmesh.cluster import LocalCluster, NodeInfo, Role

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "golden" / "wire"
CONNECTIONS = 48
"""Senders at once."""
HALF_OPEN_MAX = 100
FRAMES_A_CONNECTION = (1, 1, 2, 4, 40)
"""Few, for most are looked into no further than the first that is refused."""
ANSWER_SECONDS_MAX = 30.0
STALL_SECONDS_MAX = 60.0
LOOK_SECONDS = 0.2
"""Between two looks at how far the broker is."""
API_KEYS = 75
INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
HONEST = struct.pack(">hhih6s", 3, 4, 77, 6, b"honest") + struct.pack(">i??", -1, False, False)[:5]
"""Metadata, version 4, of all topics; it creates none."""


class FuzzError(Exception):
    """What must not happen; the text says it."""


def corpus() -> list[bytes]:
    """Requests without their length: as clients of others sent them, and each API in each version with zeros."""
    found = [each.read_bytes() for each in sorted(CORPUS.glob("*.request"))]
    empty = [struct.pack(">hhih4s", key, version, 1, 4, b"fuzz") for key in range(API_KEYS) for version in range(14)]
    # Those that clients sent come as often as the others, of which there are more.
    return found * (len(empty) // max(len(found), 1)) + [each + bytes(24) for each in empty]


def mutate(source: random.Random, frame: bytes, others: Sequence[bytes]) -> bytes:
    """One to four changes."""
    data = bytearray(frame)
    for _ in range(source.randint(1, 4)):
        if not data:
            break
        at = source.randrange(len(data))
        match source.randrange(9):
            case 0:
                data[at] ^= 1 << source.randrange(8)
            case 1:
                data[at] = source.randrange(256)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = source.randbytes(source.randint(1, 40))
            case 4:
                number = source.choice(INTERESTING)
                size = source.choice((1, 2, 4))
                data[at : at + size] = (number & (256**size - 1)).to_bytes(size, "big")
            case 5:
                other = source.choice(others)
                data[at:] = other[source.randrange(len(other)) :]
            case 6:
                del data[at : at + source.randint(1, 8)]
            case 7:
                data[2:4] = source.randrange(16).to_bytes(2, "big")  # another version
            case _:
                data[at : at + 5] = b"\xff\xff\xff\xff\x0f"  # the longest length that a varint has
    return bytes(data)


def framed(source: random.Random, frame: bytes) -> bytes:
    """With its length, which lies now and then."""
    size = len(frame)
    if source.random() < 0.02:
        size = source.choice((0, 1, size + 1, size - 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, source.randrange(1 << 32)))
    return struct.pack(">I", size & 0xFFFFFFFF) + frame


class Honest:
    """A client that asks for metadata all the time, on a connection that must last."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.answers = 0
        self.slowest_s = 0.0

    async def run(self) -> None:
        """Until it is cancelled; FuzzError."""
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            while True:
                begin = time.monotonic()
                await self._ask(reader, writer)
                self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
                self.answers += 1
                await asyncio.sleep(0.1)
        finally:
            writer.close()

    async def once(self) -> None:
        """On a new connection; FuzzError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await self._ask(reader, writer)
        finally:
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack(">I", len(HONEST)) + HONEST)
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                (size,) = struct.unpack(">I", await reader.readexactly(4))
                answer = await reader.readexactly(size)
        except (OSError, EOFError, TimeoutError) as error:
            raise FuzzError(f"an honest client got no answer: {error!r}") from None
        if answer[:4] != struct.pack(">i", 77):
            raise FuzzError(f"an honest client got another's answer: {answer[:16].hex()}")


class Fuzz:
    """Senders of one run, which go on until `is_over`."""

    def __init__(self, port: int, seed: int) -> None:
        self.is_over = False
        self._port = port
        self._seed = seed
        self._connections = 0
        self._corpus = corpus()
        self._half_open: list[asyncio.StreamWriter] = []
        self.sent = 0
        self.opened = 0
        self.half_open = 0
        self.closed = 0
        """Connections that the broker ended."""

    async def run(self) -> None:
        """Send until it is over."""
        await asyncio.gather(*(self._sender() for _ in range(CONNECTIONS)))
        for writer in self._half_open:
            writer.transport.abort()

    async def _sender(self) -> None:
        while not self.is_over:
            self._connections += 1
            source = random.Random(self._seed * 1_000_003 + self._connections)
            number = source.choice(FRAMES_A_CONNECTION)
            with contextlib.suppress(OSError):
                await self._connection(source, number)
            self.sent += number

    async def _connection(self, source: random.Random, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.opened += 1
        data = b"".join(
            framed(source, mutate(source, source.choice(self._corpus), self._corpus)) for _ in range(number)
        )
        end = source.randrange(5)
        if end == 0:  # never the rest of it
            data = data[: -source.randint(1, min(len(data), 20))]
        pieces = source.choice((1, 1, 1, 3))
        for place in range(pieces):
            writer.write(data[len(data) * place // pieces : len(data) * (place + 1) // pieces])
            async with asyncio.timeout(5):
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
        if end == 0 and len(self._half_open) < HALF_OPEN_MAX:
            self._half_open.append(writer)
            self.half_open += 1
            return
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(source.choice((0.02, 0.1, 0.3))):
                while await reader.read(1 << 16):
                    pass
                self.closed += 1
        if end == 1:
            writer.transport.abort()
        else:
            writer.close()


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise FuzzError(f"process {pid} is gone")


def taken(http: str) -> int:
    """Frames that the broker looked into so far: requests that it answered, and frames that it refused.

    What comes behind a refused frame is not among them, for there its connection ends.
    """
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=ANSWER_SECONDS_MAX) as answer:
        text = answer.read().decode()
    names = ("kafka_network_requestmetrics_requests_total", "kipmesh_wire_malformed_frames_total")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return int(sum(sample.value for sample in samples if sample.name in names))


class Run:
    """Sends until the broker has looked into so many frames, and checks what must hold."""

    def __init__(self, broker: NodeInfo, port: int, pids: Sequence[int], seed: int) -> None:
        self._broker = broker
        self._pids = pids
        self._honest = Honest(port)
        self._fuzz = Fuzz(port, seed)
        self._looked_into = 0

    async def go(self, frames: int, growth_mib: int) -> str:
        """A line about it; FuzzError."""
        begun, idle = time.monotonic(), self._memory_mib()
        tasks = [asyncio.create_task(self._honest.run()), asyncio.create_task(self._fuzz.run())]
        try:
            await self._until(frames // 10, tasks)
            early = self._memory_mib()
            await self._until(frames, tasks)
            self._fuzz.is_over = True
            await tasks[1]
            await self._honest.once()
            late = self._memory_mib()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not self._honest.answers:
            raise FuzzError("the honest client was never answered")
        grown = max(after - before for after, before in zip(late, early, strict=True))
        if grown > growth_mib:
            raise FuzzError(f"a process has {grown:.0f} MiB more than after the first tenth")
        sizes = zip(("controller", "broker"), idle, early, late, strict=True)
        memory = ", ".join(f"{name} {' to '.join(f'{size:.0f}' for size in found)}" for name, *found in sizes)
        fuzz, honest = self._fuzz, self._honest
        return (
            f"{self._looked_into:,} frames looked into of {fuzz.sent:,} in {time.monotonic() - begun:.0f} s, on "
            f"{fuzz.opened:,} connections, {fuzz.half_open:,} left half open, {fuzz.closed:,} ended by the broker; "
            f"{honest.answers:,} honest answers (slowest {honest.slowest_s:.2f} s); "
            f"MiB at first, after a tenth, in the end: {memory}"
        )

    async def _until(self, frames: int, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Both tasks go on till then, unless one fails."""
        progressed = time.monotonic()
        while self._looked_into < frames:
            before = self._looked_into
            try:
                self._looked_into = await asyncio.to_thread(taken, str(self._broker.http)) - self._honest.answers
            except OSError as error:
                raise FuzzError(f"the broker's metrics do not come: {error!r}") from None
            if self._looked_into > before:
                progressed = time.monotonic()
            elif time.monotonic() - progressed > STALL_SECONDS_MAX:
                raise FuzzError(f"no frame was looked into for {STALL_SECONDS_MAX:g} s")
            done, _ = await asyncio.wait(tasks, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task

    def _memory_mib(self) -> list[float]:
        return [_resident_bytes(pid) / (1 << 20) for pid in self._pids]


def run(frames: int, seed: int, growth_mib: int = 128) -> str:
    """On a mesh of its own; FuzzError."""
    with LocalCluster(mode="processes", controllers=1, leaders=1, followers=0) as cluster:
        (broker,) = (node for node in cluster.nodes if node.role is Role.LEADER)
        log = Path(str(broker.log))
        assert cluster.kafka_bootstrap is not None
        port = int(cluster.kafka_bootstrap.rpartition(":")[2])
        pids = [node.pid for node in cluster.nodes if node.pid is not None]
        try:
            told = asyncio.run(Run(broker, port, pids, seed).go(frames, growth_mib))
        except FuzzError as error:
            raise FuzzError(f"seed {seed}: {error}\n{log.read_text(errors='replace')[-2000:]}") from None
        if [node.pid for node in cluster.nodes if node.pid is not None] != pids:
            raise FuzzError(f"seed {seed}: a process ended")
        errors = [line for line in log.read_text(errors="replace").splitlines() if "Traceback" in line]
        if errors:
            raise FuzzError(f"seed {seed}: {len(errors)} tracebacks in {log}: {errors[0]}")
    return f"seed {seed}: {told}"


def main(given: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--growth-mib", type=int, default=128)
    options = parser.parse_args(given)
    try:
        sys.stdout.write(f"{run(options.frames, options.seed, options.growth_mib)}\n")
    except FuzzError as error:
        sys.stderr.write(f"fuzz: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
