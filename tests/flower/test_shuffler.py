"""The shuffler as its own party: equal ciphertexts in, unlinkable ciphertexts out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.flower import shuffler
from fedveil.protect import channel

SIZE = 40
SECRET = shuffler.new_private_key()
PUBLIC = shuffler.public_key(SECRET)


def reports(clients: int, seed: int = 0) -> np.ndarray:
    return np.packbits(np.random.default_rng(seed).integers(0, 2, (clients, SIZE), dtype=np.uint8), axis=1)


def mixer(**options) -> shuffler.Mixer:
    return shuffler.Mixer(shuffler.frame_bytes(SIZE), shuffler.frames_per_sender(SIZE), **options)


def test_only_the_right_key_and_round_open_a_message() -> None:
    sealed = shuffler.seal(PUBLIC, b"hello", b"round 1")
    assert shuffler.unseal(SECRET, sealed, b"round 1") == b"hello"
    with pytest.raises(ValueError, match="not sealed to this key"):
        shuffler.unseal(SECRET, sealed, b"round 2")
    with pytest.raises(ValueError, match="not sealed to this key"):
        shuffler.unseal(shuffler.new_private_key(), sealed, b"round 1")
    for place in (0, 33, len(sealed) - 1):
        broken = bytearray(sealed)
        broken[place] ^= 1
        with pytest.raises(ValueError):
            shuffler.unseal(SECRET, bytes(broken), b"round 1")


def test_sealing_the_same_message_twice_gives_unrelated_ciphertexts() -> None:
    one, two = shuffler.seal(PUBLIC, b"x" * 8), shuffler.seal(PUBLIC, b"x" * 8)
    assert len(one) == len(two) == shuffler.OVERHEAD + 8
    assert one[:32] != two[:32] and one[32:] != two[32:]


@pytest.mark.parametrize("group", [1, 7])
def test_what_goes_through_the_shuffler_is_what_the_clients_reported(group: int) -> None:
    packed = reports(5)
    mix = shuffler.Mixer(
        shuffler.frame_bytes(SIZE, group), shuffler.frames_per_sender(SIZE, group), expected=5
    )
    for client in range(5):
        frames = shuffler.seal_reports(PUBLIC, packed[client], SIZE, 1, group)
        assert {len(f) for f in frames} == {shuffler.frame_bytes(SIZE, group)}
        mix.put(1, f"client {client}", frames, now=0.0)
    batch = mix.take(1, now=0.0)
    tally = shuffler.open_reports(SECRET, batch["frames"], SIZE, 1, batch["senders"], group)
    assert (tally.ones == np.unpackbits(packed, axis=1, count=SIZE).sum(axis=0)).all()
    assert (tally.arrived == 5).all() and tally.dropped == 0
    assert tally.payload_bytes == 5 * shuffler.frames_per_sender(SIZE, group) * shuffler.frame_bytes(
        SIZE, group
    )


def test_the_server_cannot_link_the_shufflers_frames_by_order_or_size() -> None:
    """The server knows which frame is whose from the truth kept here; it looks at order and size only."""
    clients, rounds = 4, 25
    same_neighbours, places, sizes = [], Counter(), set()
    fake = [
        os.urandom(shuffler.frame_bytes(SIZE)) for _ in range(clients * SIZE)
    ]  # shuffling needs no valid seal
    owner = {frame: i // SIZE for i, frame in enumerate(fake)}
    for number in range(rounds):
        mix = mixer(expected=clients)
        for client in range(clients):
            mix.put(number, str(client), fake[client * SIZE : (client + 1) * SIZE], now=0.0)
        senders = [owner[f] for f in mix.take(number, 0.0)["frames"]]
        same_neighbours.append(np.mean(np.equal(senders[1:], senders[:-1])))
        places.update((s, i // SIZE) for i, s in enumerate(senders))
        sizes |= {len(f) for f in fake}
    # Chance that neighbours share a sender: 39/159. 25 * 159 pairs, standard error 0.0068; 5 of them.
    assert np.mean(same_neighbours) == pytest.approx(39 / 159, abs=0.034)
    # Each quarter of the stream holds each client's frames equally often: 250 expected, sd 13; 5 of them.
    assert max(abs(places[s, q] - 250) for s in range(4) for q in range(4)) < 65
    assert len(sizes) == 1


def test_clients_send_their_ids_in_random_order() -> None:
    frames = shuffler.seal_reports(PUBLIC, reports(1)[0], SIZE, 1)
    plain = [shuffler.unseal(SECRET, f, shuffler._context(1, SIZE, 1))[2:] for f in frames]
    order = [int(channel.unpack_messages(p, 1, SIZE)[0][0]) for p in plain]
    assert sorted(order) == list(range(SIZE)) and order != list(range(SIZE))


def test_replayed_foreign_and_damaged_frames_are_dropped_and_counted() -> None:
    frames = shuffler.seal_reports(PUBLIC, reports(1)[0], SIZE, 1)
    other_round = shuffler.seal_reports(PUBLIC, reports(1)[0], SIZE, 2)
    damaged = frames[1][:-1] + bytes([frames[1][-1] ^ 1])
    bag = [frames[0], frames[0], damaged, other_round[0], *frames[2:]]
    tally = shuffler.open_reports(SECRET, bag, SIZE, 1, senders=1)
    assert int(tally.arrived.sum()) == SIZE - 1 and tally.dropped == 1


def test_unequal_frames_second_tries_and_late_senders_are_refused() -> None:
    mix = mixer(expected=2)
    good = [bytes(mix.length)] * SIZE
    with pytest.raises(ValueError, match="exactly 40 frames"):
        mix.put(1, "a", good[:-1], 0.0)
    with pytest.raises(ValueError, match="exactly 40 frames"):
        mix.put(1, "a", [*good[:-1], b"longer" * 50], 0.0)
    mix.put(1, "a", good, 0.0)
    with pytest.raises(ValueError, match="already"):
        mix.put(1, "a", good, 0.0)
    with pytest.raises(ValueError, match="not closed"):
        mix.take(1, 0.0)
    mix.put(1, "b", good, 0.0)
    with pytest.raises(ValueError, match="closed"):
        mix.put(1, "c", good, 0.0)
    assert mix.take(1, 0.0)["late"] == 1


def test_a_crowd_below_the_minimum_is_discarded_not_released() -> None:
    mix = mixer(minimum=3, deadline=10.0)
    mix.put(1, "a", [bytes(mix.length)] * SIZE, 0.0)
    mix.put(1, "b", [bytes(mix.length)] * SIZE, 5.0)
    with pytest.raises(ValueError, match="not closed"):
        mix.take(1, 9.9)
    with pytest.raises(ValueError, match="2 senders"):
        mix.take(1, 10.0)


def test_old_rounds_are_forgotten_and_never_reopened() -> None:
    mix = mixer(expected=2, keep=1)
    for number in (1, 2):
        for sender in "ab":
            mix.put(number, sender, [bytes(mix.length)] * SIZE, 0.0)
    assert len(mix.take(2, 0.0)["frames"]) == 2 * SIZE
    with pytest.raises(ValueError, match="gone"):
        mix.take(1, 0.0)
    with pytest.raises(ValueError, match="closed"):
        mix.put(1, "a", [bytes(mix.length)] * SIZE, 0.0)


async def _one_round(address: str, packed: np.ndarray) -> channel.Tally:
    frames = [shuffler.seal_reports(PUBLIC, row, SIZE, 7) for row in packed]
    await asyncio.gather(*(shuffler.send_round(address, 7, f"c{i}", f) for i, f in enumerate(frames)))
    with pytest.raises(ConnectionError, match="closed"):
        await shuffler.send_round(address, 7, "too late", frames[0])
    batch, facts = await shuffler.take_round(address, 7, SECRET)
    assert facts["late"] == 1
    return shuffler.open_reports(SECRET, batch, SIZE, 7, facts["senders"])


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_round_runs_through_a_shuffler_in_a_process_of_its_own(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"unix:{tmp_path}/s.sock" if kind == "unix" else f"tcp:127.0.0.1:{port}"
    (tmp_path / "server.pub").write_text(PUBLIC.hex() + "\n")
    process = subprocess.Popen([
        sys.executable, "-m", "fedveil.flower.shuffler", "--listen", address, "--weights", str(SIZE),
        "--server-key", str(tmp_path / "server.pub"), "--minimum", "3", "--expected", "3",
    ])  # fmt: skip
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                info, _ = asyncio.run(shuffler._ask(address, {"do": "info"}))
                break
            assert process.poll() is None
            time.sleep(0.1)
        assert info["server_key"] == PUBLIC.hex() and info["frame_bytes"] == shuffler.frame_bytes(SIZE)
        packed = reports(3)
        tally = asyncio.run(_one_round(address, packed))
        assert (tally.ones == np.unpackbits(packed, axis=1, count=SIZE).sum(axis=0)).all()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_client_that_hangs_up_halfway_leaves_nothing_behind(tmp_path: Path) -> None:
    async def play() -> None:
        mix = mixer(expected=2)
        started = asyncio.Event()
        task = asyncio.create_task(shuffler.serve(f"unix:{tmp_path}/h.sock", mix, PUBLIC, started))
        await started.wait()
        _, writer = await asyncio.open_unix_connection(f"{tmp_path}/h.sock")
        writer.write(b'{"do": "put", "round": 1, "sender": "a", "count": 40}\n' + bytes(mix.length))
        await writer.drain()
        writer.close()
        for sender in ("a", "b"):
            await shuffler.send_round(f"unix:{tmp_path}/h.sock", 1, sender, [bytes(mix.length)] * SIZE)
        assert len(mix.take(1, time.monotonic())["frames"]) == 2 * SIZE
        with pytest.raises(ConnectionError, match="unknown request"):
            await shuffler._ask(f"unix:{tmp_path}/h.sock", {"do": "dance"})
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(play())


def test_wrong_options_end_with_code_2_and_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--weights", "10", "--server-key", PUBLIC.hex()]
    assert shuffler.main(["--listen", "nowhere", *common]) == 2
    assert "tcp:HOST:PORT" in capsys.readouterr().err
    assert shuffler.main(["--listen", "unix:x", "--weights", "10", "--server-key", "zz"]) == 2
    assert shuffler.main(["--listen", "unix:x", *common, "--minimum", "1"]) == 2
    with pytest.raises(UserError, match="64 hex"):
        shuffler.read_key("g" * 64)


@pytest.mark.parametrize("content", [b"\xff" * 32, b"", b"ab" * 31, b"0" * 10_000])
def test_a_file_that_holds_no_key_is_refused_with_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(UserError, match="key"):
        shuffler.read_key(str(tmp_path / "key"))
    with pytest.raises(UserError, match="no readable file"):
        shuffler.read_key("a\0b")
