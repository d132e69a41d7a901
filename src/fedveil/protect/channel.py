"""How LDP-FL's bits reach the server: none, model shuffling, or parameter shuffling, on a virtual clock.

With parameter shuffling every weight is its own message (id, bit), sent after its own delay U(0, T). A
client that expects to be ready early first waits T_W = T_S - (its compute and network time), T_S being the
slowest client's, so that all arrivals are uniform on [T_S, T_S + T] and mix. Nothing here is per-message
Python: the server's view is produced in time order, window by window, in bounded memory. The real network
counterpart is `flower.shuffler`.

Random delays make linking hard but are no shuffler with a proof; what is promised is decided elsewhere
(per reported weight epsilon; client level d * T * epsilon).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedveil import keys
from fedveil.errors import UserError, did_you_mean
from fedveil.protect import ldp

if TYPE_CHECKING:
    from fedveil.models.layout import Layout

Channel = Literal["none", "shuffle-models", "shuffle-parameters"]
CHANNELS: tuple[Channel, ...] = ("none", "shuffle-models", "shuffle-parameters")
TICKS = 2**32  # time resolution: T / TICKS
AT_ONCE = 2**22  # messages held in memory while the server's view is produced


@dataclass(frozen=True)
class Timing:
    """One round's clock, in (virtual) seconds since the broadcast.

    spread: T, the longest random delay. predicted: each client's announced compute + network time (empty:
    all 0).
    actual: what it took in fact (empty: as predicted). wait: whether early clients wait T_W.
    slack: the server stops listening at T_S + T + slack (T_S + slack where nothing is delayed).
    """

    spread: float = 1.0
    predicted: tuple[float, ...] = ()
    actual: tuple[float, ...] = ()
    wait: bool = True
    slack: float = 0.0

    def __post_init__(self) -> None:
        if not self.spread > 0:
            raise UserError(f"channel.spread = {self.spread}: the delay T must be above 0 seconds.")
        if self.actual and len(self.actual) != len(self.predicted):
            raise UserError("channel timing: give as many actual as predicted times.")

    def slowest(self) -> float:
        """T_S: the slowest client's announced time."""
        return max(self.predicted, default=0.0)

    def ready(self, client: int) -> float:
        """When the client's delays begin, as seen by the server: after its work, network and waiting time."""
        if not self.predicted:
            return 0.0
        took = self.actual[client] if self.actual else self.predicted[client]
        return took + (self.slowest() - self.predicted[client] if self.wait else 0.0)

    def deadline(self, delayed: bool) -> float:
        """When the server stops listening. A hair later than the sum: whoever keeps to its word is never late by rounding."""
        return (self.slowest() + (self.spread if delayed else 0.0) + self.slack) * (1 + 1e-9)


@dataclass(frozen=True)
class Clock:
    """What clients say about time, each its own number of seconds (repeated in turn); public, and not from their data.

    proposals: of T. compute, network: what a client announces for its round. overrun: by how much it really takes longer.
    slack: how much longer than T_S + T the server listens.
    """

    proposals: tuple[float, ...] = ()
    compute: tuple[float, ...] = ()
    network: tuple[float, ...] = ()
    overrun: tuple[float, ...] = ()
    slack: float = 0.0

    @property
    def punctual(self) -> bool:
        """Does everybody keep to its announced time, so that no message can be late?"""
        return not any(self.overrun)

    def timing(self, clients: Sequence[int]) -> Timing:
        """The clock of a round with these clients: T is the median of their proposals, T_S their slowest announced time."""

        def of(values: tuple[float, ...], client: int) -> float:
            return values[client % len(values)] if values else 0.0

        predicted = tuple(of(self.compute, c) + of(self.network, c) for c in clients)
        actual = tuple(time + of(self.overrun, c) for time, c in zip(predicted, clients, strict=True))
        spread = agree_spread([of(self.proposals, c) for c in clients]) if self.proposals else 1.0
        return Timing(spread, predicted, actual, slack=self.slack)


def agree_spread(proposals: Sequence[float]) -> float:
    """T as the median of the clients' proposals: one dishonest client cannot move it past its neighbours."""
    if not len(proposals) or not all(np.isfinite(p) and p > 0 for p in proposals):
        raise UserError("delay_proposals: at least one is needed, all of them finite and above 0 seconds.")
    return float(np.median(proposals))


@dataclass(frozen=True)
class View:
    """What the server sees of parameter shuffling, in order of arrival. `senders` is the truth that only a
    simulation knows (for tests that try to recover it); it is None unless asked for."""

    times: np.ndarray
    ids: np.ndarray
    bits: np.ndarray
    senders: np.ndarray | None = None


@dataclass(frozen=True)
class Tally:
    """A round's reports as the server can use them: per weight how many arrived and how many were ones.

    sent/dropped/late count messages (without parameter shuffling a message is a whole update): sent =
    arrived + dropped + late. payload_bytes: what all clients put on the wire, packed, without transport
    framing.
    seconds: virtual time of the last message used. moved: where clients have radii of their own, per weight the sum of the
    arrived reports' signs, each times its client's radius.
    """

    ones: np.ndarray
    arrived: np.ndarray
    sent: int
    dropped: int
    late: int
    payload_bytes: int
    seconds: float
    moved: np.ndarray | None = None


def check_channel(name: str) -> str:
    """Return a known channel name or say which exist."""
    if name not in CHANNELS:
        raise UserError(
            f"channel = {name!r} is unknown; use one of {', '.join(CHANNELS)}.{did_you_mean(name, CHANNELS)}"
        )
    return name


def message_bits(size: int) -> int:
    """Bits of one (id, value) message: ceil(log2 d) for the id and one for the value."""
    return max(size - 1, 1).bit_length() + 1


def pack_messages(ids: np.ndarray, bits: np.ndarray, size: int) -> bytes:
    """Messages as a dense bit string of `message_bits(size)` each, padded to whole bytes."""
    words = (np.asarray(ids, dtype=">u4") * 2 + np.asarray(bits, dtype=">u4")).astype(">u4")
    return np.packbits(
        np.unpackbits(words.view(np.uint8).reshape(-1, 4), axis=1)[:, -message_bits(size) :]
    ).tobytes()


def unpack_messages(data: bytes, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of `pack_messages`: (ids uint32, bits uint8) of `count` messages."""
    width = message_bits(size)
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count * width).reshape(count, width)
    wide = np.zeros((count, 32), dtype=np.uint8)
    wide[:, -width:] = bits
    words = np.packbits(wide, axis=1).view(">u4").reshape(-1).astype(np.uint32)
    return words >> np.uint32(1), (words & np.uint32(1)).astype(np.uint8)


def arrivals(
    packed: np.ndarray,
    size: int,
    key: bytes,
    timing: Timing,
    *,
    loss: float = 0.0,
    at_once: int = AT_ONCE,
    with_senders: bool = False,
) -> Iterator[View]:
    """The server's view of parameter shuffling as chunks in time order; lost messages never appear.

    packed: uint8 [K, ceil(size/8)] from `ldp.encode`. Each (client, id) has its own keyed delay (and fate,
    when loss > 0), so the messages and their order do not depend on `at_once`. Memory is about 40 bytes per
    message of a window (`at_once`), whatever K * size is. Ties in time are ordered by (id, bit), not by
    sender.
    """
    if size >= 2**31:
        raise UserError(f"parameter shuffling carries at most 2^31 - 1 weights, this model has {size}.")
    clients, tick = len(packed), timing.spread / TICKS
    ready = [timing.ready(i) for i in range(clients)]
    origin = min(ready, default=0.0)
    base = [round((r - origin) / tick) for r in ready]
    width = max(1, min(TICKS, at_once * TICKS // max(1, clients * size)))
    low, end = 0, max(base, default=-TICKS) + TICKS
    while low < end:
        active = [i for i in range(clients) if base[i] < low + width and low < base[i] + TICKS]
        if not active:  # nobody sends for a while: go to the next client that does
            low = min(b for b in base if b > low)
            continue
        parts = [_window(packed[i], size, key, i, low - base[i], width, loss) for i in active]
        words = np.concatenate(parts)
        senders = None
        if with_senders:
            order = np.argsort(words, kind="stable")
            senders = np.repeat(np.array(active, dtype=np.int32), [len(p) for p in parts])[order]
            words = words[order]
        else:
            words.sort()
        if len(words):
            times = origin + ((words >> np.uint64(32)) + np.float64(low)) * tick
            lower = words.astype(np.uint32)  # keeps the low half: id and bit
            yield View(times, lower >> np.uint32(1), (lower & np.uint32(1)).astype(np.uint8), senders)
        low += width


def _window(
    row: np.ndarray, size: int, key: bytes, client: int, low: int, width: int, loss: float
) -> np.ndarray:
    """One client's messages with delay in [low, low + width) ticks, as words (ticks after low, id, bit)."""
    delay = _words32(keys.derive(key, "delay", client), size)
    first, last = max(low, 0), min(low + width, TICKS)
    # Unsigned wrap-around: one comparison for both ends. (The last tick is inclusive: TICKS has no uint32.)
    ids = np.flatnonzero((delay - np.uint32(first)) <= np.uint32(last - first - 1))
    if loss > 0:
        fate = _words32(keys.derive(key, "loss", client), size)[ids]
        ids = ids[fate >= np.float64(loss) * TICKS]
    bits = (row[ids >> 3] >> (7 - (ids & 7)).astype(np.uint8)) & 1
    after = delay[ids].astype(np.int64) - low
    made: np.ndarray = (after.astype(np.uint64) << np.uint64(32)) | (ids.astype(np.uint64) << np.uint64(1)) | bits
    return made


def deliver(
    channel: str,
    packed: np.ndarray,
    size: int,
    key: bytes,
    timing: Timing | None = None,
    *,
    loss: float = 0.0,
    at_once: int = AT_ONCE,
    radii: Sequence[float] | None = None,
) -> Tally:
    """Send every client's packed reports through the channel and count what the server can use.

    loss: each message is lost with this probability; messages after the deadline are late. Neither is used,
    both are counted. radii: of each client's own ranges; single weights without a sender cannot have them.
    """
    check_channel(channel)
    timing = timing or Timing()
    if not 0 <= loss <= 1:
        raise UserError(f"channel.loss = {loss}: a probability between 0 and 1 is needed.")
    packed = np.asarray(packed, dtype=np.uint8)
    if packed.ndim != 2 or packed.shape[1] != -(-size // 8):
        raise UserError(
            f"reports have shape {packed.shape}, expected [clients, {-(-size // 8)}] for {size} weights."
        )
    if timing.predicted and len(timing.predicted) != len(packed):
        raise UserError(f"channel timing is for {len(timing.predicted)} clients, {len(packed)} sent reports.")
    if radii is not None and (channel == "shuffle-parameters" or len(radii) != len(packed)):
        raise UserError("radii of single clients: give one per client, and a channel that keeps a client's reports together.")
    ones, arrived = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    moved = None if radii is None else np.zeros(size)
    got = late = 0
    seconds = 0.0
    if channel == "shuffle-parameters":
        deadline = timing.deadline(delayed=True)
        for view in arrivals(packed, size, key, timing, loss=loss, at_once=at_once):
            use = int(np.searchsorted(view.times, deadline, side="right"))
            late += len(view.times) - use
            got += use
            if use:
                ids = view.ids[:use]
                arrived += np.bincount(ids, minlength=size)
                ones += np.bincount(ids[view.bits[:use] == 1], minlength=size)
                seconds = float(view.times[use - 1])
        sent = len(packed) * size
        payload = len(packed) * -(-size * message_bits(size) // 8)
    else:
        deadline = timing.deadline(delayed=channel == "shuffle-models")
        for client, when in _upload_times(channel, len(packed), key, timing):
            if loss > 0 and _words32(keys.derive(key, "loss", client), 1)[0] < loss * TICKS:
                continue
            if when > deadline:
                late += 1
                continue
            got, seconds = got + 1, when
            bits = np.unpackbits(packed[client], count=size)
            ones += bits
            arrived += 1
            if moved is not None and radii is not None:
                moved += radii[client] * (2.0 * bits - 1.0)
        sent, payload = len(packed), packed.size
    return Tally(ones, arrived, sent, sent - got - late, late, payload, seconds, moved)


def model_order(clients: int, key: bytes, timing: Timing | None = None) -> list[int]:
    """The order in which model shuffling delivers whole updates (truth known to the simulation only)."""
    return [client for client, _ in _upload_times("shuffle-models", clients, key, timing or Timing())]


def _upload_times(channel: str, clients: int, key: bytes, timing: Timing) -> list[tuple[int, float]]:
    """(client, arrival) of whole updates, in order of arrival; without shuffling nobody waits."""
    if channel == "none":
        took = timing.actual or timing.predicted or (0.0,) * clients
        times = list(took)
    else:
        tick = timing.spread / TICKS
        times = [
            timing.ready(i) + tick * int(_words32(keys.derive(key, "delay", i), 1)[0]) for i in range(clients)
        ]
    return sorted(enumerate(times), key=lambda pair: pair[1])


def average(
    tally: Tally, ranges: ldp.Ranges, epsilon: float, layout: Layout, previous: np.ndarray
) -> np.ndarray:
    """The server's average per weight over the reports that arrived (float32); a weight of which no report
    arrived keeps its previous value. Unbiased for the mean of the clipped weights of those reports."""
    centre, radius = ldp.per_weight(ranges, layout)
    arrived, factor = np.maximum(1, tally.arrived), ldp.amplitude(epsilon)
    if tally.moved is None:
        mean = centre + radius * factor * (2.0 * (tally.ones / arrived) - 1.0)
    else:
        mean = centre + factor * (tally.moved / arrived)
    return np.where(tally.arrived > 0, mean, np.asarray(previous, dtype=np.float64)).astype(np.float32)


def _words32(key: bytes, count: int) -> np.ndarray:
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(4 * count)), dtype="<u4")
