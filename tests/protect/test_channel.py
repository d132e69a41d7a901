"""Channels: what arrives is counted right, and the server cannot tell who sent it."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil import keys
from fedveil.errors import UserError
from fedveil.models.layout import Layout
from fedveil.protect import channel, ldp
from fedveil.protect.channel import Timing

KEY = keys.derive(11, "channel")


def random_reports(clients: int, size: int, seed: int = 0) -> np.ndarray:
    return np.packbits(np.random.default_rng(seed).integers(0, 2, (clients, size), dtype=np.uint8), axis=1)


def true_ones(packed: np.ndarray, size: int) -> np.ndarray:
    return np.unpackbits(packed, axis=1, count=size).sum(axis=0)


def whole_view(
    packed: np.ndarray, size: int, timing: Timing, at_once: int = channel.AT_ONCE, loss: float = 0.0
):
    views = list(channel.arrivals(packed, size, KEY, timing, at_once=at_once, with_senders=True, loss=loss))
    return tuple(
        np.concatenate([getattr(v, name) for v in views]) for name in ("times", "ids", "bits", "senders")
    )


@pytest.mark.parametrize("kind", channel.CHANNELS)
def test_without_loss_every_report_arrives_exactly_once(kind: str) -> None:
    packed = random_reports(7, 1001)
    tally = channel.deliver(kind, packed, 1001, KEY)
    assert (tally.ones == true_ones(packed, 1001)).all()
    assert (tally.arrived == 7).all()
    assert tally.dropped == tally.late == 0


@pytest.mark.parametrize("at_once", [50, 999, 10**6])
def test_order_and_content_do_not_depend_on_the_window(at_once: int) -> None:
    packed = random_reports(5, 301)
    timing = Timing(2.0, predicted=(1.0, 2.0, 3.0, 4.0, 0.5), actual=(1.0, 9.5, 3.0, 4.7, 0.2))
    got, whole = whole_view(packed, 301, timing, at_once, 0.2), whole_view(packed, 301, timing, loss=0.2)
    for a, b in zip(got, whole, strict=True):
        assert np.allclose(a, b, rtol=1e-12)
    assert (np.diff(got[0]) >= 0).all()


def test_the_view_carries_the_senders_bits_at_its_ids() -> None:
    packed = random_reports(4, 77)
    bits = np.unpackbits(packed, axis=1, count=77)
    _, ids, values, senders = whole_view(packed, 77, Timing())
    assert (bits[senders, ids] == values).all()
    assert sorted(zip(senders, ids, strict=True)) == [(c, i) for c in range(4) for i in range(77)]


def test_lost_and_late_messages_are_counted_and_not_averaged() -> None:
    size, clients = 2000, 10
    packed = random_reports(clients, size)
    # Client 3 took 1.6 times T longer than it had predicted: all of its messages are late; client 4 0.25 T.
    predicted = (5.0,) * clients
    actual = tuple(5.0 + {3: 1.6, 4: 0.25}.get(i, 0.0) for i in range(clients))
    tally = channel.deliver("shuffle-parameters", packed, size, KEY, Timing(1.0, predicted, actual), loss=0.1)
    assert tally.sent == size * clients == int(tally.arrived.sum()) + tally.dropped + tally.late
    # Standard deviations: dropped 42, late 0.9 * (2000 + 500) with sd 24; bounds are 5 of them.
    assert abs(tally.dropped - 2000) < 215
    assert abs(tally.late - 2250) < 120
    assert tally.seconds <= 6.0
    layout = Layout(("w",), ((size,),), ("l",), (0,))
    ranges = ldp.fixed_ranges(layout, 0.1)
    some = int(np.flatnonzero((tally.arrived > 0) & (tally.arrived < clients))[0])
    mean = channel.average(tally, ranges, 1.0, layout, np.zeros(size))
    share = tally.ones[some] / tally.arrived[some]
    assert mean[some] == pytest.approx(0.1 * ldp.amplitude(1.0) * (2 * share - 1), rel=1e-6)


def test_whole_updates_are_lost_and_late_as_one_message() -> None:
    packed = random_reports(4, 64)
    timing = Timing(1.0, (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 9.0, 1.0))
    for kind in ("none", "shuffle-models"):
        tally = channel.deliver(kind, packed, 64, KEY, timing)
        assert (tally.sent, tally.dropped, tally.late) == (4, 0, 1)
        assert (tally.arrived == 3).all()
        assert (tally.ones == true_ones(np.delete(packed, 2, axis=0), 64)).all()
        assert channel.deliver(kind, packed, 64, KEY, timing, loss=1.0).dropped == 4


def test_a_weight_without_reports_keeps_its_previous_value() -> None:
    layout = Layout(("w",), ((3,),), ("l",), (0,))
    tally = channel.Tally(np.array([0, 1, 2]), np.array([0, 1, 2]), 9, 6, 0, 1, 0.0)
    mean = channel.average(tally, ldp.fixed_ranges(layout, 1.0), 1.0, layout, np.array([7.0, 8.0, 9.0]))
    k = ldp.amplitude(1.0)
    assert mean == pytest.approx([7.0, k, k], rel=1e-6)


@given(size=st.integers(1, 10**6), data=st.data())
def test_packed_messages_take_log2_d_plus_1_bits_and_come_back(size: int, data: st.DataObject) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    bits = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids))))
    packed = channel.pack_messages(ids, bits, size)
    assert len(packed) == -(-len(ids) * channel.message_bits(size) // 8)
    assert 2 ** (channel.message_bits(size) - 1) >= size
    back_ids, back_bits = channel.unpack_messages(packed, len(ids), size)
    assert (back_ids == ids).all() and (back_bits == bits).all()


def test_counted_bytes_are_the_length_of_what_is_packed() -> None:
    size, clients = 1000, 3
    packed = random_reports(clients, size)
    one = channel.pack_messages(np.arange(size), np.zeros(size), size)
    assert (
        channel.deliver("shuffle-parameters", packed, size, KEY).payload_bytes
        == clients * len(one)
        == 3 * 1375
    )
    assert channel.deliver("none", packed, size, KEY).payload_bytes == packed.nbytes == 3 * 125


# --- the server tries to link messages to senders ---


def link_by_time(times: np.ndarray, senders: np.ndarray, clients: int) -> float:
    """Share of messages a server names right by the best guess per time slot, trained on every second one."""
    slots = np.minimum(((times - times.min()) / np.ptp(times) * 40).astype(int), 39)
    seen, asked = slice(0, None, 2), slice(1, None, 2)
    counts = np.zeros((40, clients))
    np.add.at(counts, (slots[seen], senders[seen]), 1)
    return float((counts.argmax(axis=1)[slots[asked]] == senders[asked]).mean())


def link_by_order(senders: np.ndarray) -> float:
    """Share of neighbours in the stream that have the same sender."""
    return float((senders[1:] == senders[:-1]).mean())


CLIENTS, SIZE = 8, 4000
PREDICTED = (1.0, 1.1, 1.5, 2.0, 2.5, 2.6, 3.0, 3.3)


def test_the_server_cannot_link_shuffled_parameters_by_order_or_time() -> None:
    packed = random_reports(CLIENTS, SIZE)
    times, ids, _, senders = whole_view(packed, SIZE, Timing(1.0, PREDICTED))
    # Order: chance 1/8 minus a hair; 32000 pairs, standard error 0.0019; 5 of them.
    assert link_by_order(senders) == pytest.approx(1 / CLIENTS, abs=0.0095)
    # Time: 16000 guesses, standard error 0.0026; the trained guess may only be chance; 5 standard errors.
    assert link_by_time(times, senders, CLIENTS) == pytest.approx(1 / CLIENTS, abs=0.0135)
    # Rank of a client among the reports of one id: uniform, so each mean rank is the middle one.
    order = np.lexsort((times, ids))
    by_id = senders[order].reshape(SIZE, CLIENTS)
    ranks = np.array([np.nonzero(by_id == c)[1].mean() for c in range(CLIENTS)])
    # Standard error of a mean rank: 2.29 / sqrt(4000) = 0.036; 5 of them, 8 clients.
    assert np.abs(ranks - 3.5).max() < 0.19


def test_the_same_linking_succeeds_where_it_should() -> None:
    """Control: without waiting times slow clients stand out; unshuffled uploads are all of a piece."""
    packed = random_reports(CLIENTS, SIZE)
    times, _, _, senders = whole_view(packed, SIZE, Timing(1.0, PREDICTED, wait=False))
    assert link_by_time(times, senders, CLIENTS) > 0.25
    assert link_by_order(np.repeat(np.arange(CLIENTS), SIZE)) > 0.99


def test_all_messages_have_one_size() -> None:
    ids = np.array([0, 1, SIZE - 1])
    assert {
        len(channel.pack_messages(ids[i : i + 1], np.array([b]), SIZE)) for i in range(3) for b in (0, 1)
    } == {2}


def test_model_shuffling_delivers_in_an_order_that_depends_on_the_key_only() -> None:
    orders = {tuple(channel.model_order(5, keys.derive(s, "o"))) for s in range(60)}
    assert len(orders) > 30 and all(sorted(o) == [0, 1, 2, 3, 4] for o in orders)


def test_memory_is_bounded_by_the_window_not_by_the_number_of_messages() -> None:
    packed = random_reports(40, 50_000)  # 2 million messages
    peaks = []
    for at_once in (100_000, 2_000_000):
        tracemalloc.start()
        channel.deliver("shuffle-parameters", packed, 50_000, KEY, at_once=at_once)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 12e6 < 40e6 < peaks[1]


@pytest.mark.slow
def test_a_million_weights_from_a_hundred_clients_take_under_thirty_seconds() -> None:
    size, clients = 1_000_000, 100
    packed = random_reports(clients, size)
    start = time.process_time()  # CPU time: the machine may be busy with other things
    tally = channel.deliver("shuffle-parameters", packed, size, KEY)
    assert time.process_time() - start < 30
    assert (tally.ones == true_ones(packed, size)).all()
    assert tally.payload_bytes == clients * size * 21 // 8


@pytest.mark.parametrize("arguments", [{"loss": 2.0}, {"timing": Timing(1.0, (1.0,))}])
def test_wrong_settings_are_refused(arguments: dict) -> None:
    with pytest.raises(UserError):
        channel.deliver("none", random_reports(2, 8), 8, KEY, **arguments)
    with pytest.raises(UserError, match="Did you mean"):
        channel.deliver("shuffle-parameter", random_reports(2, 8), 8, KEY)
    with pytest.raises(UserError):
        Timing(0.0)


def test_the_longest_delay_is_the_median_of_the_proposals_of_those_present() -> None:
    assert channel.agree_spread([1.0, 2.0, 3.0]) == channel.agree_spread([1.0, 2.0, 1e9]) == 2.0
    clock = channel.Clock((1.0, 2.0, 10.0), compute=(5.0, 1.0, 2.0), network=(1.0,), overrun=(0.0, 0.5))
    assert clock.timing([0, 1, 2]).spread == 2.0 and clock.timing([1, 2]).spread == 6.0
    timing = clock.timing([1, 2, 3])  # client 3 speaks as client 0, in turn
    assert timing.predicted == (2.0, 3.0, 6.0) and timing.slowest() == 6.0
    assert [timing.ready(k) for k in range(3)] == [6.5, 6.0, 6.5]  # everybody waits for the slowest; 1 and 3 overrun
    for wrong in ([], [1.0, -1.0], [1.0, float("inf")]):
        with pytest.raises(UserError):
            channel.agree_spread(wrong)


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(0, 1e6), st.floats(0, 1e3)), min_size=1, max_size=5))
@pytest.mark.parametrize("kind", channel.CHANNELS)
def test_whoever_keeps_to_its_announced_time_is_never_late(kind: str, told: list) -> None:
    proposals, compute, network = (tuple(values) for values in zip(*told, strict=True))
    timing = channel.Clock(proposals, compute, network).timing(range(len(told)))
    tally = channel.deliver(kind, random_reports(len(told), 9), 9, KEY, timing)
    assert tally.late == tally.dropped == 0 and (tally.arrived == len(told)).all()
