"""The shuffler as its own party: it sees senders but only ciphertexts, the server sees values but no senders.

    python -m fedveil.flower.shuffler --listen unix:/run/shuffler.sock --server-key server.pub --weights
    21840 --minimum 10

Each client seals every (id, bit) message of its reports to the server's key (X25519, HKDF-SHA256,
ChaCha20-Poly1305). All frames have the same length. The shuffler collects the frames of a round, forgets
who sent what, permutes them with operating-system entropy and hands them over as one batch. It refuses to
release a round with fewer than `minimum` senders. Unlike random delays this is a uniform permutation, so
timing and order carry nothing. With a roster (--roster) every sender signs what it hands in, and only nodes of the
roster take part, each under its own number.

Sharp edges. The server must not run the shuffler, and must not be the one who writes its roster: whoever can
register many fake senders can leave one honest client alone in the crowd. `group` > 1 packs several weights of one
client into one frame: cheaper, but those weights are linkable to each other. Traffic is not wrapped in TLS here;
frames and batches are sealed, headers (round and sender) are not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedveil import keys
from fedveil.errors import UserError
from fedveil.flower import identity, limits
from fedveil.flower.roster import Roster, read_roster
from fedveil.jsons import Document, JsonObject
from fedveil.protect import channel, ldp

OVERHEAD = 32 + 16  # ephemeral public key and authentication tag
HEADER = 4096  # bytes of a request's first line
FIRST, WHOLE = 10.0, 120.0  # seconds until a caller's first line, and its whole request, are in
OPEN_ROUNDS = 4  # of one sender at a time
KNOWN_ROUNDS = 100_000  # numbers of closed rounds that are remembered
SIGNED_AS = "shuffler put"
_COUNT = 2  # bytes at the start of a frame's plaintext: how many messages it holds


# --- sealing ---


def new_private_key() -> bytes:
    """A server's secret key (32 bytes from the operating system). Keep it on the server."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The key that clients seal to."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def seal(public: bytes, message: bytes, context: bytes = b"") -> bytes:
    """Encrypt for the holder of the secret key; the fresh one-time key of a message identifies nobody.

    `context` (e.g. the round) is authenticated but not sent: `unseal` fails under another one.
    """
    one_time = X25519PrivateKey.generate()
    sender = one_time.public_key().public_bytes_raw()
    shared = one_time.exchange(X25519PublicKey.from_public_bytes(public))
    # The derived key is used once, so the constant nonce is safe.
    return sender + ChaCha20Poly1305(_stretch(shared, sender, public)).encrypt(bytes(12), message, context)


def unseal(private: bytes, sealed: bytes, context: bytes = b"") -> bytes:
    """Inverse of `seal`; raises ValueError for a frame that was not sealed to this key and context."""
    secret = X25519PrivateKey.from_private_bytes(private)
    try:
        shared = secret.exchange(X25519PublicKey.from_public_bytes(sealed[:32]))
        key = _stretch(shared, sealed[:32], secret.public_key().public_bytes_raw())
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed[32:], context)
    except InvalidTag as error:
        raise ValueError("the frame was not sealed to this key and round, or was changed") from error


def _stretch(shared: bytes, sender: bytes, receiver: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"fedveil seal v1" + sender + receiver).derive(shared)


# --- reports as equal-size frames ---


def frame_bytes(size: int, group: int = 1) -> int:
    """Length of every sealed frame for a model of `size` weights, `group` messages per frame."""
    return OVERHEAD + _COUNT + -(-group * channel.message_bits(size) // 8)


def frames_per_sender(size: int, group: int = 1) -> int:
    """How many frames each client sends per round (always the same number)."""
    return -(-size // group)


def seal_reports(
    public: bytes, packed: np.ndarray, size: int, round_number: int, group: int = 1
) -> list[bytes]:
    """A client's packed reports as sealed frames of equal size, ids in random order.

    group = 1: every weight is its own frame and cannot be linked to any other weight.
    """
    if not 1 <= group <= 2**16 - 1:
        raise UserError(f"group = {group}: a frame holds between 1 and 65535 messages.")
    bits = np.unpackbits(np.asarray(packed, dtype=np.uint8), count=size)
    order = _permutation(size, keys.entropy())
    room, context = frame_bytes(size, group) - OVERHEAD - _COUNT, _context(round_number, size, group)
    frames = []
    for start in range(0, size, group):
        ids = np.sort(order[start : start + group])
        body = channel.pack_messages(ids, bits[ids], size).ljust(room, b"\0")
        frames.append(seal(public, len(ids).to_bytes(_COUNT, "big") + body, context))
    return frames


def open_reports(
    private: bytes, frames: Sequence[bytes], size: int, round_number: int, senders: int, group: int = 1
) -> channel.Tally:
    """The server's side: open shuffled frames and count ones and arrivals per weight.

    Frames that are repeated, of another round, damaged or name an unknown id count as dropped.
    """
    ones, arrived = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    context = _context(round_number, size, group)
    for frame in dict.fromkeys(frames):  # a replayed frame is byte-identical
        try:
            plain = unseal(private, frame, context)
            count = int.from_bytes(plain[:_COUNT], "big")
            if not 0 < count <= group:
                continue
            ids, bits = channel.unpack_messages(plain[_COUNT:], count, size)
        except ValueError:
            continue
        known = ids < size
        np.add.at(arrived, ids[known], 1)
        np.add.at(ones, ids[known], bits[known])
    sent = senders * size
    return channel.Tally(ones, arrived, sent, sent - int(arrived.sum()), 0, sum(map(len, frames)), 0.0)


def _context(round_number: int, size: int, group: int) -> bytes:
    return f"fedveil report round={round_number} weights={size} group={group}".encode()


# --- shuffling ---


def _permutation(count: int, key: bytes) -> np.ndarray:
    """A uniform permutation: sort by random 64-bit words (a tie among n has chance below n^2 / 2^65)."""
    return np.argsort(ldp.random_words(key, count), kind="stable")


@dataclass
class Mixer:
    """What the shuffler holds in memory: frames of open rounds and batches ready to be handed over.

    Frames must have exactly `length` bytes and each sender hands in exactly `per_sender` of them, once. A
    round closes `deadline` seconds after its first sender, or when `expected` senders are in; it is
    released only with at least `minimum` senders, otherwise discarded. After closing nobody, the shuffler
    included, can say who sent which frame.
    """

    length: int
    per_sender: int
    minimum: int = 2
    expected: int | None = None
    deadline: float = 60.0
    keep: int = 4  # closed rounds kept for a server that asks again
    _open: dict[int, dict[str, list[bytes]]] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)
    _closed: dict[int, JsonObject] = field(default_factory=dict)
    _late: dict[int, int] = field(default_factory=dict)

    def put(self, round_number: int, sender: str, frames: Sequence[bytes], now: float) -> None:
        """Take one sender's frames; raises ValueError (with the reason) if they are not acceptable."""
        self.close_due(now)
        if round_number in self._closed:
            self._late[round_number] = self._late.get(round_number, 0) + 1
            raise ValueError(f"round {round_number} is closed")
        if len(frames) != self.per_sender or any(len(f) != self.length for f in frames):
            raise ValueError(f"need exactly {self.per_sender} frames of {self.length} bytes")
        mine = [number for number, waiting in self._open.items() if sender in waiting]
        if round_number in mine:
            raise ValueError("this sender has already handed in its frames")
        if len(mine) >= OPEN_ROUNDS:
            raise ValueError(f"this sender already takes part in {OPEN_ROUNDS} open rounds")
        waiting = self._open.setdefault(round_number, {})
        self._since.setdefault(round_number, now)
        waiting[sender] = list(frames)
        if self.expected is not None and len(waiting) >= self.expected:
            self._close(round_number)

    def take(self, round_number: int, now: float) -> Document:
        """The shuffled round {"frames", "senders", "late"}; ValueError while it is open or if discarded."""
        self.close_due(now)
        if round_number not in self._closed:
            raise ValueError(f"round {round_number} is not closed yet")
        batch = self._closed[round_number]
        if batch["frames"] is None:
            raise ValueError(f"round {round_number} is gone; it had {batch['senders']} senders")
        return {**batch, "late": self._late.get(round_number, 0)}

    def close_due(self, now: float) -> None:
        for number in [n for n, since in self._since.items() if now - since >= self.deadline]:
            self._close(number)

    def _close(self, number: int) -> None:
        by_sender = self._open.pop(number)
        del self._since[number]
        frames: list[bytes] | None = None
        if len(by_sender) >= self.minimum:
            together = [frame for sent in by_sender.values() for frame in sent]
            frames = [together[i] for i in _permutation(len(together), keys.entropy())]
        self._closed[number] = {"frames": frames, "senders": len(by_sender)}
        for old in sorted(self._closed)[: -self.keep]:  # the number stays known: no round opens twice
            if self._closed[old]["frames"]:
                self._closed[old] = {"frames": None, "senders": self._closed[old]["senders"]}
        while len(self._closed) > KNOWN_ROUNDS:
            del self._closed[next(iter(self._closed))]


# --- on the network ---
# One request per connection: a JSON line, then bytes. Answers likewise.


_PUT: dict[str, limits.Check] = {
    "do": limits.is_one_of(["put"]),
    "round": limits.is_int(0, 2**62),
    "sender": limits.is_text(100, 1),
    "count": limits.is_int(0, 2**31),
}
_TAKE: dict[str, limits.Check] = {"do": limits.is_one_of(["take"]), "round": limits.is_int(0, 2**62)}


async def _put(
    mixer: Mixer, roster: Roster | None, request: object, reader: asyncio.StreamReader
) -> JsonObject:
    """Take a sender's frames into the mix, signed by its key where there is a roster."""
    told = limits.fields(request, "request", _PUT, {"signature": limits.is_hex(64)})
    if told["count"] != mixer.per_sender:
        raise ValueError(f"need exactly {mixer.per_sender} frames of {mixer.length} bytes")
    public = None if roster is None else _sender_key(roster, told["sender"])
    data = await asyncio.wait_for(reader.readexactly(mixer.per_sender * mixer.length), WHOLE)
    signature = bytes.fromhex(told.get("signature", ""))
    if public is not None and not identity.verify(
        public, SIGNED_AS, put_payload(told["round"], told["sender"], data), signature
    ):
        raise ValueError(f"not signed by the key of node {told['sender']}")
    frames = [data[i : i + mixer.length] for i in range(0, len(data), mixer.length)]
    mixer.put(told["round"], told["sender"], frames, time.monotonic())
    return {"ok": True}


async def _reply_to(
    mixer: Mixer, server_key: bytes, roster: Roster | None, reader: asyncio.StreamReader
) -> tuple[JsonObject, bytes]:
    """The answer to one request, and the bytes that follow it."""
    request = limits.read_json(await asyncio.wait_for(reader.readline(), FIRST), HEADER)
    what = request.get("do") if isinstance(request, dict) else None
    if what == "put":
        return await _put(mixer, roster, request, reader), b""
    if what == "take":
        batch = mixer.take(limits.fields(request, "request", _TAKE)["round"], time.monotonic())
        body = seal(server_key, b"".join(batch["frames"]), b"fedveil batch")
        return {"ok": True, "bytes": len(body), "senders": batch["senders"], "late": batch["late"]}, body
    if what == "info":
        facts = {"frame_bytes": mixer.length, "frames": mixer.per_sender, "minimum": mixer.minimum}
        return {"ok": True, **facts, "server_key": server_key.hex()}, b""
    raise ValueError("unknown request; use put, take or info")


async def serve(
    address: str,
    mixer: Mixer,
    server_key: bytes,
    started: asyncio.Event | None = None,
    *,
    roster: Roster | None = None,
) -> None:
    """Run the shuffler at `tcp:HOST:PORT` or `unix:PATH` until cancelled.

    Batches are sealed once more, as a whole, to the server's key, so only the server can read even the
    ciphertexts. roster: who may hand in; without one anybody may, under any name.
    """
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = b""
        try:
            reply, body = await _reply_to(mixer, server_key, roster, reader)
        except asyncio.IncompleteReadError:
            reply = {"ok": False, "error": "the connection ended before all frames arrived; none were used"}
        except (TimeoutError, asyncio.TimeoutError):
            reply = {"ok": False, "error": "the request took too long"}
        except ConnectionError:
            return
        except ValueError as error:
            reply = {"ok": False, "error": limits.plain(error)}
        with contextlib.suppress(ConnectionError, TimeoutError, asyncio.TimeoutError):
            writer.write(json.dumps(reply).encode() + b"\n" + body)
            await asyncio.wait_for(writer.drain(), WHOLE)
            writer.close()
            await writer.wait_closed()

    kind, where = address_of(address)
    if kind == "unix":
        with contextlib.suppress(FileNotFoundError):
            os.unlink(where)
        server = await asyncio.start_unix_server(answer, path=where, limit=HEADER)
    else:
        host, port = where
        server = await asyncio.start_server(answer, host=host, port=port, limit=HEADER)
    async with server:
        if started is not None:
            started.set()
        await server.serve_forever()


def put_payload(round_number: int, sender: str, data: bytes) -> bytes:
    """What a sender signs."""
    return f"{round_number} {sender} {hashlib.sha256(data).hexdigest()}".encode()


def _sender_key(roster: Roster, sender: str) -> bytes:
    found = [m.identity for m in roster.members if str(m.number) == sender]
    if not found:
        raise ValueError("this sender is not in the roster")
    return found[0]


async def send_round(
    address: str, round_number: int, sender: str, frames: Sequence[bytes], secret: bytes | None = None
) -> None:
    """A client hands in its frames, signed if it has an identity; ConnectionError says why the shuffler refuses."""
    data = b"".join(frames)
    header: JsonObject = {"do": "put", "round": round_number, "sender": sender, "count": len(frames)}
    if secret is not None:
        header["signature"] = identity.sign(secret, SIGNED_AS, put_payload(round_number, sender, data)).hex()
    await _ask(address, header, data)


async def take_round(address: str, round_number: int, private: bytes) -> tuple[list[bytes], Document]:
    """The server fetches a closed round: (shuffled frames, {"senders", "late"})."""
    reply, body = await _ask(address, {"do": "take", "round": round_number})
    info, _ = await _ask(address, {"do": "info"})
    data, length = unseal(private, body, b"fedveil batch"), info["frame_bytes"]
    return [data[i : i + length] for i in range(0, len(data), length)], reply


async def facts_of(address: str) -> Document:
    """What a shuffler says about itself: frame_bytes, frames, minimum, server_key."""
    return (await _ask(address, {"do": "info"}))[0]


async def _ask(address: str, header: JsonObject, data: bytes = b"") -> tuple[Document, bytes]:
    kind, where = address_of(address)
    if kind == "unix":
        reader, writer = await asyncio.open_unix_connection(where)
    else:
        reader, writer = await asyncio.open_connection(*where)
    try:
        writer.write(json.dumps(header).encode() + b"\n")
        with contextlib.suppress(
            ConnectionError
        ):  # a refusal may come before all frames are out; it is read below
            writer.write(data)
            await asyncio.wait_for(writer.drain(), WHOLE)
        reply = limits.read_json(await asyncio.wait_for(reader.readline(), WHOLE), 2**16)
        if not isinstance(reply, dict) or not isinstance(reply.get("ok"), bool):
            raise ConnectionError("the shuffler's answer makes no sense")
        size = reply.get("bytes", 0)
        if not limits.is_int(0, 2**36)(size):
            raise ConnectionError("the shuffler's answer makes no sense")
        body = await asyncio.wait_for(reader.readexactly(size), 10 * WHOLE) if size else b""
    except (limits.Malformed, asyncio.IncompleteReadError, TimeoutError, asyncio.TimeoutError) as wrong:
        raise ConnectionError(
            f"the shuffler's answer is cut, late or makes no sense ({type(wrong).__name__})"
        ) from None
    finally:
        writer.close()
    if not reply["ok"]:
        raise ConnectionError(f"the shuffler refused to {header['do']}: {limits.plain(reply.get('error'))}")
    return reply, body


def address_of(text: str) -> tuple[str, Any]:
    """("unix", path) or ("tcp", (host, port))."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        return "unix", rest
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdigit():
        return "tcp", (host, int(port))
    raise UserError(f"address {text!r}: use tcp:HOST:PORT or unix:PATH.")


def read_key(text: str) -> bytes:
    """A 32-byte key given as 64 hex digits or as a file that contains them."""
    content = text
    if len(text) != 64:
        try:
            content = limits.read_file(text, "key", 200).decode("ascii", "replace").strip()
        except (UserError, ValueError) as error:
            raise UserError(f"key {text!r}: not 64 hex digits and no readable file ({error}).") from error
    try:
        key = bytes.fromhex(content)
    except ValueError as error:
        raise UserError(f"key {text!r}: expected 64 hex digits.") from error
    if len(key) != 32:
        raise UserError(f"key {text!r}: expected 32 bytes, got {len(key)}.")
    return key


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fedveil.flower.shuffler",
        description=(
            "Collect sealed reports, forget who sent them, hand them to the server in random order."
        ),
    )
    parser.add_argument("--listen", required=True, help="tcp:HOST:PORT or unix:PATH")
    parser.add_argument("--server-key", required=True, help="server's public key: 64 hex digits or a file")
    parser.add_argument("--weights", required=True, type=int, help="number of weights of the model")
    parser.add_argument("--group", type=int, default=1, help="weights per frame (1: nothing is linkable)")
    parser.add_argument("--minimum", type=int, default=2, help="never release a round with fewer senders")
    parser.add_argument("--expected", type=int, help="close a round as soon as so many senders are in")
    parser.add_argument("--roster", help="file of the nodes' numbers and keys; only they may hand in")
    parser.add_argument("--roster-digest", default="", help="the roster's digest, if it is pinned")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds after a round's first sender")
    options = parser.parse_args(arguments)
    try:
        if options.weights < 1 or options.group < 1 or options.minimum < 2:
            raise UserError("--weights and --group must be at least 1, --minimum at least 2.")
        if options.expected is not None and options.expected < options.minimum:
            raise UserError(f"--expected {options.expected} is below --minimum {options.minimum}.")
        model = (options.weights, options.group)
        mixer = Mixer(
            frame_bytes(*model),
            frames_per_sender(*model),
            options.minimum,
            options.expected,
            options.deadline,
        )
        address_of(options.listen)
        server_key = read_key(options.server_key)
        roster = read_roster(options.roster, pinned=options.roster_digest) if options.roster else None
        if roster is None:
            print(
                "UNAUTHENTICATED: anybody who reaches this address can hand in, under any name (--roster)",
                file=sys.stderr,
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for ending in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # also where a shell started it in the background, deaf to SIGINT
        signal.signal(ending, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options.listen, mixer, server_key, roster=roster))
    return 0


if __name__ == "__main__":
    sys.exit(main())
