"""`python tools/fuzz_wire.py`: send mutated frames and half-open connections to the Kafka listener of a live cluster.

A new cluster (one controller, one broker) gets requests until it has checked `--frames` of them, by its metrics. Frames
after one that ends its connection do not count. Requests are those of `tests/golden/wire` and empty ones of each API,
with flipped bits, wrong lengths, missing ends, and any key and version, alone or pipelined, in one piece or several, on
connections that are closed, reset or left half open. A valid client sends requests on its own connection, which must
not break. At the end the same processes must run, with at most `--growth-mib` more memory than after a tenth of the
frames, and respond on a new connection. `--seed` replays the frames.
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
"""Number of concurrent senders."""
HALF_OPEN_MAX = 100
FRAMES_A_CONNECTION = (1, 1, 2, 4, 40)
"""Choices of the number of frames. Most are small, because the broker checks no frame after a malformed one."""
RESPONSE_SECONDS_MAX = 30.0
STALL_SECONDS_MAX = 60.0
POLL_SECONDS = 0.2
"""Interval of polling the broker's metrics."""
API_KEYS = 75
INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
HONEST = struct.pack(">hhih6s", 3, 4, 77, 6, b"honest") + struct.pack(">i??", -1, False, False)[:5]
"""A valid request: Metadata version 4 of all topics, without topic creation."""


class FuzzError(Exception):
    """The broker violated an expectation, which the message states."""


def corpus() -> list[bytes]:
    """Return requests without length prefix: recorded ones of clients, and zeros for each API key and version.

    Recorded ones are repeated until they are about as many as the others.
    """
    found = [each.read_bytes() for each in sorted(CORPUS.glob("*.request"))]
    empty = [struct.pack(">hhih4s", key, version, 1, 4, b"fuzz") for key in range(API_KEYS) for version in range(14)]
    # Recorded requests are repeated until they are as many as the empty ones.
    return found * (len(empty) // max(len(found), 1)) + [each + bytes(24) for each in empty]


def mutate(source: random.Random, frame: bytes, others: Sequence[bytes]) -> bytes:
    """Return a copy of the frame with up to four random mutations. `others` are frames to splice in."""
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
                data[at : at + 5] = b"\xff\xff\xff\xff\x0f"  # the maximum of a varint length
    return bytes(data)


def framed(source: random.Random, frame: bytes) -> bytes:
    """Return the frame with its length prefix, which is random or off by one in 2 % of the cases."""
    size = len(frame)
    if source.random() < 0.02:
        size = source.choice((0, 1, size + 1, size - 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, source.randrange(1 << 32)))
    return struct.pack(">I", size & 0xFFFFFFFF) + frame


class Honest:
    """A valid client that sends Metadata requests on one connection, which must not break."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.responses = 0
        self.slowest_s = 0.0

    async def run(self) -> None:
        """Send a request every 0.1 s until cancelled.

        Raises FuzzError if a response is missing for RESPONSE_SECONDS_MAX or wrong, TimeoutError or OSError if it
        cannot connect.
        """
        async with asyncio.timeout(RESPONSE_SECONDS_MAX):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            while True:
                begin = time.monotonic()
                await self._request(reader, writer)
                self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
                self.responses += 1
                await asyncio.sleep(0.1)
        finally:
            writer.close()

    async def once(self) -> None:
        """Send one request on a new connection. Raises FuzzError if the response is missing or wrong, or OSError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await self._request(reader, writer)
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack(">I", len(HONEST)) + HONEST)
        try:
            async with asyncio.timeout(RESPONSE_SECONDS_MAX):
                (size,) = struct.unpack(">I", await reader.readexactly(4))
                response = await reader.readexactly(size)
        except (OSError, EOFError, TimeoutError) as error:
            raise FuzzError(f"the valid client got no response: {error!r}") from None
        if response[:4] != struct.pack(">i", 77):
            raise FuzzError(f"the valid client got a response with another correlation id: {response[:16].hex()}")


class Fuzz:
    """Concurrent senders of mutated frames, which run until `is_over` is set.

    Counts frames (`sent`) and connections: `opened`, left half open, and `closed` by the broker.
    """

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
        """Number of connections that the broker closed."""

    async def run(self) -> None:
        """Send until `is_over`, then reset the connections that are half open."""
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
        if end == 0:  # the rest is never sent
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
    raise FuzzError(f"process {pid} has ended")


def checked_frames(http: str) -> int:
    """Return the number of frames that the broker has checked, by its metrics at `http` (host:port).

    These are requests with a response, and malformed frames. Frames after a malformed one do not count, because it ends
    its connection. Raises OSError if the metrics cannot be read.
    """
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=RESPONSE_SECONDS_MAX) as response:
        families = text_string_to_metric_families(response.read().decode())
    names = ("kafka_network_requestmetrics_requests_total", "kipmesh_wire_malformed_frames_total")
    return int(sum(sample.value for family in families for sample in family.samples if sample.name in names))


class Run:
    """Sends frames until the broker has checked enough of them, and checks the expectations (see the module)."""

    def __init__(self, broker: NodeInfo, port: int, pids: Sequence[int], seed: int) -> None:
        self._broker = broker
        self._pids = pids
        self._honest = Honest(port)
        self._fuzz = Fuzz(port, seed)
        self._checked = 0

    async def go(self, frames: int, growth_mib: int) -> str:
        """Send frames until the broker has checked `frames` of them, and return a summary in one line.

        Raises FuzzError if the broker stops checking frames, fails a valid client, or a process ends or grows by more
        than `growth_mib` MiB after the first tenth of the frames.
        """
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
        if not self._honest.responses:
            raise FuzzError("the valid client got no response")
        grown = max(after - before for after, before in zip(late, early, strict=True))
        if grown > growth_mib:
            raise FuzzError(f"a process grew by {grown:.0f} MiB after a tenth of the frames; the limit is {growth_mib}")
        sizes = zip(("controller", "broker"), idle, early, late, strict=True)
        memory = ", ".join(f"{name} {' to '.join(f'{size:.0f}' for size in found)}" for name, *found in sizes)
        fuzz, honest = self._fuzz, self._honest
        return (
            f"{self._checked:,} frames checked of {fuzz.sent:,} sent in {time.monotonic() - begun:.0f} s, on "
            f"{fuzz.opened:,} connections, {fuzz.half_open:,} left half open, {fuzz.closed:,} closed by the broker; "
            f"{honest.responses:,} valid responses (slowest {honest.slowest_s:.2f} s); "
            f"MiB at the start, after a tenth, at the end: {memory}"
        )

    async def _until(self, frames: int, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait until the broker has checked `frames` frames.

        Raises FuzzError if the metrics cannot be read or do not grow for STALL_SECONDS_MAX, or the error of a task.
        """
        progressed = time.monotonic()
        while self._checked < frames:
            before = self._checked
            try:
                self._checked = await asyncio.to_thread(checked_frames, str(self._broker.http)) - self._honest.responses
            except OSError as error:
                raise FuzzError(f"the metrics of the broker cannot be read: {error!r}") from None
            if self._checked > before:
                progressed = time.monotonic()
            elif time.monotonic() - progressed > STALL_SECONDS_MAX:
                raise FuzzError(f"the broker checked no frame for {STALL_SECONDS_MAX:g} s")
            done, _ = await asyncio.wait(tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task

    def _memory_mib(self) -> list[float]:
        return [_resident_bytes(pid) / (1 << 20) for pid in self._pids]


def run(frames: int, seed: int, growth_mib: int = 128) -> str:
    """Run on a new cluster and return a summary in one line.

    Raises FuzzError, with the seed, if an expectation is violated, or ClusterError if the cluster does not start.
    """
    with LocalCluster(mode="processes", controllers=1, leaders=1, followers=0) as cluster:
        (broker,) = (node for node in cluster.nodes if node.role is Role.LEADER)
        log = Path(str(broker.log))
        assert cluster.kafka_bootstrap is not None
        port = int(cluster.kafka_bootstrap.rpartition(":")[2])
        pids = [node.pid for node in cluster.nodes if node.pid is not None]
        try:
            summary = asyncio.run(Run(broker, port, pids, seed).go(frames, growth_mib))
        except FuzzError as error:
            raise FuzzError(f"seed {seed}: {error}\n{log.read_text(errors='replace')[-2000:]}") from None
        if [node.pid for node in cluster.nodes if node.pid is not None] != pids:
            raise FuzzError(f"seed {seed}: a process ended")
        errors = [line for line in log.read_text(errors="replace").splitlines() if "Traceback" in line]
        if errors:
            raise FuzzError(f"seed {seed}: {len(errors)} tracebacks in {log}: {errors[0]}")
    return f"seed {seed}: {summary}"


def main(given: Sequence[str]) -> int:
    """Run, and print the summary, or the FuzzError on stderr. Return 1 after a FuzzError, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=200_000, help="frames that the broker must check (200,000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the frames (1)")
    parser.add_argument("--growth-mib", type=int, default=128, help="maximum growth of a process in MiB (128)")
    options = parser.parse_args(given)
    try:
        sys.stdout.write(f"{run(options.frames, options.seed, options.growth_mib)}\n")
    except FuzzError as error:
        sys.stderr.write(f"fuzz: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
