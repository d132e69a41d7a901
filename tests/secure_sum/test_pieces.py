"""Shamir's shares, masks, messages, parameters, noise shares and the journal, each alone."""

import math
import os
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
from sums import MODEL, identities, session
from test_refusals import Stage

from fedveil.errors import UserError
from fedveil.privacy import accountants
from fedveil.privacy.accountants import answer
from fedveil.protect import exact
from fedveil.protect import noise as streams
from fedveil.secure_sum import graph, journal, masks, messages, noise, parameters, party, shamir
from fedveil.secure_sum.parameters import Parameters


def test_the_published_example_of_shamirs_scheme():
    """Secret 1234, polynomial 1234 + 166 x + 94 x^2, modulo 1613 (Wikipedia, "Shamir's secret sharing")."""
    shares = shamir.split(1234, [166, 94], range(1, 7), 1613)
    assert shares == {1: 1494, 2: 329, 3: 965, 4: 176, 5: 1188, 6: 775}
    assert shamir.combine({2: 329, 4: 176, 5: 1188}, 1613) == 1234


def test_any_threshold_of_shares_gives_the_secret_and_one_less_gives_nothing():
    draw = random.Random("shamir")
    for _ in range(50):
        needed, count = draw.randint(1, 8), draw.randint(8, 12)
        secret = draw.choice([0, 2**256 - 1, draw.getrandbits(256)])
        coefficients = [draw.randrange(shamir.PRIME) for _ in range(needed - 1)]
        shares = shamir.split(secret, coefficients, range(1, count + 1))
        some = draw.sample(sorted(shares), needed)
        assert shamir.combine({p: shares[p] for p in some}) == secret
        if needed > 1:  # for every other secret there is a polynomial through the same fewer shares
            other, few = draw.getrandbits(256), some[:-1]
            through = {**{p: shares[p] for p in few}, 0: other}
            rebuilt = _interpolate(through, few[0])
            assert rebuilt == shares[few[0]]


def _interpolate(points: dict[int, int], at: int) -> int:
    total = 0
    for p, value in points.items():
        term = value
        for q in points:
            if q != p:
                term = term * (at - q) * pow(p - q, -1, shamir.PRIME) % shamir.PRIME
        total += term
    return total % shamir.PRIME


def test_the_field_is_of_a_prime_that_holds_every_32_byte_secret():
    assert shamir.PRIME > 2**256 and shamir.PRIME < 256**shamir.WIDTH
    assert all(pow(a, shamir.PRIME - 1, shamir.PRIME) == 1 for a in (2, 3, 5, 7, 11, 13))
    with pytest.raises(ValueError):
        shamir.split(1, [2], [0])
    with pytest.raises(ValueError):
        shamir.weights([1, 1])


def test_the_mask_stream_is_aes_256_in_counter_mode():
    """SP 800-38A, F.5.5: the counter block there is not zero, so the block cipher itself is compared at zero."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    blocks = b"".join(k.to_bytes(16, "big") for k in range(4))
    expected = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)
    assert masks.stream(key, 64) == expected
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    first = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counter)
    assert first == bytes.fromhex("0bdf7df1591716335e9a8b15c860c502")


@pytest.mark.parametrize("word", [32, 64])
@pytest.mark.parametrize("size", [1, 3, 1 << 15, (1 << 15) + 1, 100_003])
def test_a_mask_is_the_key_stream_and_taking_it_off_gives_the_words_back(word, size):
    words = np.random.default_rng(1).integers(0, 2**32, size).astype(f"<u{word // 8}")
    masked = words.copy()
    masks.add_all(masked, [(b"k" * 32, 1)])
    stream = np.frombuffer(masks.stream(b"k" * 32, words.nbytes), words.dtype)
    assert np.array_equal(masked, words + stream)
    masks.add_all(masked, [(b"k" * 32, -1)])
    assert np.array_equal(masked, words)


@pytest.mark.parametrize("cipher", ["vaes512", "vaes", "aes", "best"])
@pytest.mark.parametrize("word", [32, 64])
def test_the_compiled_masks_are_those_of_the_library(cipher, word):
    """Every size around tiles of 256 and 512 bytes and a piece of 4,096, several keys at once, both signs."""
    native = streams._native
    if cipher != "best" and cipher not in getattr(native, "mask_ciphers", tuple)():
        pytest.skip(f"this processor or build has no '{cipher}'")
    draw = np.random.default_rng(2)
    for size in (0, 1, 2, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 4099, 70_001):
        words = draw.integers(0, 2**word, size, np.uint64).astype(f"<u{word // 8}")
        seeds = [(draw.bytes(32), int(sign)) for sign in draw.choice([-1, 1], 5)]
        expected, found = words.copy(), words.copy()
        masks._add_with_library(expected, seeds)
        if cipher == "best":
            masks.add_all(found, seeds)
        else:
            keys, signs = b"".join(seed for seed, _ in seeds), bytes(sign > 0 for _, sign in seeds)
            native.add_masks(found, keys, signs, cipher)
        assert np.array_equal(found, expected)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks where glibc puts freed memory")
def test_no_key_is_left_in_memory_after_its_mask_was_added():
    """Three schedules of 256 bytes go where a block of that size was freed last; the first 16 bytes are the allocator's own."""
    native = streams._native
    if not getattr(native, "mask_ciphers", tuple)():
        pytest.skip("this processor or build has no ciphers for masks")
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer ends a process that looks at freed memory, which is what this test does")
    import ctypes

    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    keys, words = bytes(range(96)), np.zeros(4, np.uint32)
    block = library.malloc(ctypes.c_size_t(768))
    ctypes.memset(block, 0xAA, 768)
    library.free(block)
    native.add_masks(words, keys, b"\1\1\1", native.mask_ciphers()[0])
    left = ctypes.string_at(block + 16, 752)
    if left == b"\xaa" * 752:
        pytest.skip("this allocator put the schedules elsewhere")
    assert not any(keys[at : at + 16] in left for at in range(0, 96, 16))


def test_compiled_masks_refuse_keys_and_words_that_they_cannot_use():
    if not getattr(streams._native, "mask_ciphers", tuple)():
        pytest.skip("this processor or build has no ciphers for masks")
    best = streams._native.mask_ciphers()[0]
    with pytest.raises(ValueError, match="32 bytes"):
        streams._native.add_masks(np.zeros(4, np.uint32), bytes(31), b"\1", best)
    with pytest.raises(ValueError, match="no cipher"):
        streams._native.add_masks(np.zeros(4, np.uint32), bytes(32), b"\1", "rot13")
    with pytest.raises(TypeError):
        streams._native.add_masks(np.zeros(4, np.float32), bytes(32), b"\1", best)


def _bodies():
    yield messages.Keys(b"a" * 32, b"b" * 32, b"c" * 32, (2, 5))
    yield messages.Shares(((1, b"x" * 82), (3, b"")))
    yield messages.Header(b"d" * 32, b"e" * 32)
    yield messages.Agreement(b"f" * 32)
    yield messages.Reveal(((1, 1, 5), (2, 2, shamir.PRIME - 1)))
    yield messages.KeyBundle((1, 2), ((1, b"k"), (2, b"kk")))
    yield messages.ShareBundle((1, 2), ((2, b"box"),))
    yield messages.Request((1, 2), ((2, b"h"),))
    yield messages.Proof(((1, b"s" * 64), (4, b"t" * 64)))


@pytest.mark.parametrize("body", list(_bodies()), ids=lambda b: type(b).__name__)
def test_a_message_has_one_spelling_and_every_other_is_refused(body):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secrets = identities(5, 1)
    here = session(secrets, 4, 0)
    key = Ed25519PrivateKey.from_private_bytes(secrets[2])
    sender = 3 if isinstance(body, messages.SIGNED) else 0
    data = messages.pack(here.context, sender, body, key)
    assert messages.unpack(here.context, data, here.roster) == (sender, body)
    draw = random.Random(f"spelling {type(body).__name__}")
    for _ in range(300):
        changed = bytearray(data)
        way = draw.randrange(3)
        if way == 0:
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif way == 1:
            changed = changed[: draw.randrange(len(data))]
        else:
            changed += draw.randbytes(draw.randint(1, 5))
        try:
            _, found = messages.unpack(here.context, bytes(changed), here.roster)
        except messages.BadMessage:
            continue
        assert sender == 0 and found != body  # unsigned: another value, never another spelling of this one


def test_lists_that_are_too_long_unsorted_or_doubled_are_refused():
    here = session(identities(5, 1), 4, 0)
    for ids in ((2, 1), (1, 1), (0, 1), tuple(range(1, 5000))):
        data = messages.pack(here.context, 0, messages.KeyBundle(ids, ()))
        with pytest.raises(messages.BadMessage):
            messages.unpack(here.context, data, here.roster)


def test_every_parameter_changes_the_digest():
    base = Parameters(MODEL, 10, 0.1, 1.0, 2.0, 9, 7, 2)
    others = [
        replace(base, **{name: value})
        for name, value in {
            "model": bytes(32), "size": 11, "grid": 0.2, "bound": 1.5, "deviation": 3.0, "nodes": 10, "threshold": 8,
            "colluders": 1, "word": 64, "rate": 0.5, "unit": "client", "degree": 5, "share_threshold": 4,
        }.items()
    ]  # fmt: skip
    digests = {parameters.digest(p) for p in [base, *others]}
    assert len(digests) == len(others) + 1 == len(parameters.fields(base)) + 1


@pytest.mark.parametrize(
    "change, reason",
    [({"grid": 0.0}, "grid"), ({"deviation": math.nan}, "deviation"), ({"word": 16}, "word"), ({"size": 0}, "size"),
     ({"rate": 0.0}, "rate"), ({"nodes": 1}, "roster"), ({"model": b""}, "digest"), ({"unit": "person"}, "unit"),
     ({"degree": 3, "share_threshold": 9}, "graph"), ({"degree": 4, "share_threshold": 2}, "single vector")],
)  # fmt: skip
def test_parameters_that_make_no_sum_are_refused_with_the_reason(change, reason):
    base = Parameters(MODEL, 10, 0.1, 1.0, 2.0, 9, 7, 2)
    parameters.check(base)
    with pytest.raises(UserError, match=reason):
        parameters.check(replace(base, **change))


def test_shares_of_noise_add_up_to_the_promised_deviation():
    """5,000 sums of h shares; a chi-square with 20,000 degrees leaves ±5% with probability below 1e-6."""
    p = Parameters(MODEL, 20_000, 2.0**-6, 1.0, 3.0, 12, 9, 2)
    total = sum(noise.share(p, bytes([k] * 16)) for k in range(p.honest)) * p.grid
    assert total.std() == pytest.approx(3.0, rel=0.05)
    assert noise.share_deviation(p) ** 2 * p.honest == pytest.approx(9.0)


def test_claims_count_the_honest_shares_and_a_participant_knows_its_own():
    p = Parameters(MODEL, 100, 2.0**-12, 1.0, 4.0, 10, 8, 2)
    found = {c.observer: c for c in noise.claims(p)}
    assert all(c.verdict == "sound" for c in found.values())
    z = found["server"].event.noise.multiplier
    assert 3.9 < z < 4.0 and "up to 2 nodes" in found["server"].reason
    alone = replace(p, colluders=0)
    less = {c.observer: c for c in noise.claims(alone)}
    assert less["participants"].event.noise.multiplier < less["server"].event.noise.multiplier
    assert less["participants"].event.noise.multiplier == pytest.approx(4.0 * math.sqrt(7 / 8), rel=0.01)
    single = Parameters(MODEL, 100, 2.0**-12, 1.0, 4.0, 2, 2, 0)
    assert {c.observer: c.verdict for c in noise.claims(replace(single, threshold=2))}[
        "participants"
    ] == "sound"
    assert {c.unit for c in noise.claims(replace(p, unit="client"))} == {"client"}


def test_a_grid_on_which_shares_do_not_add_up_is_refused():
    p = Parameters(MODEL, 100, 2.0, 1.0, 4.0, 10, 8, 2)
    with pytest.raises(UserError, match="grid"):
        noise.claims(p)


def test_more_honest_survivors_never_mean_less_noise_than_claimed():
    p = Parameters(MODEL, 100, 2.0**-12, 1.0, 4.0, 20, 15, 3)
    assert noise.multiplier(p, p.honest) <= noise.multiplier(p, p.honest + 1)


def test_wrapping_around_is_unlikely_with_room_and_sure_without():
    p = Parameters(MODEL, 10**6, 3e-5, 1.0, 5.0, 100, 70, 5)
    assert noise.wrap_chance(p, 600.0) < 1e-9
    assert noise.wrap_chance(p, 1e9) == 1.0


def test_sparse_graphs_guarantee_nearly_all_honest_survivors_and_refuse_thin_ones():
    for n in (150, 500, 1000):
        t, c, lost = int(0.8 * n), int(0.05 * n), int(0.05 * n)
        degree, needed = graph.choose(n, t, c, lost)
        assert 0 < degree < n / 2
        assert 0.95 * (t - c) <= graph.guaranteed(n, t, c, degree, needed) <= t - c
        assert graph.shortfall(n, lost, degree, needed) <= 1e-6
    assert graph.guaranteed(1000, 800, 50, 10, 6) == 0
    assert graph.choose(60, 40, 5, 5) == (0, 0)
    assert graph.guaranteed(60, 40, 5, 0, 0) == 35


def test_the_bound_for_sparse_graphs_covers_what_random_graphs_do():
    """Small enough to fail at times: the union bound must lie above the frequency (1,000 graphs)."""
    nodes, threshold, degree, needed = 12, 9, 3, 3
    draw = np.random.default_rng(5)
    hits = 0
    for _ in range(1000):
        drawn = [
            set(draw.choice([j for j in range(nodes) if j != i], degree, replace=False)) for i in range(nodes)
        ]
        hits += _smallest_closed(drawn, threshold, needed) < threshold
    m = np.arange(needed, threshold, dtype=float)
    bound = float(np.exp(graph._log_opened(m, nodes, nodes, threshold, degree, needed - 1)).sum())
    assert hits / 1000 <= min(1.0, bound) + 0.05


def _smallest_closed(drawn: list[set[int]], threshold: int, needed: int) -> int:
    """Over random survivor sets: the smallest set that is closed under draws inside the survivors and can be opened."""
    draw, smallest, nodes = random.Random(1), len(drawn), len(drawn)
    for _ in range(60):
        alive = set(draw.sample(range(nodes), threshold))
        for start in alive:
            group, todo = {start}, [start]
            while todo:
                for j in drawn[todo.pop()] & alive:
                    if j not in group:
                        group.add(j)
                        todo.append(j)
            if all(len(drawn[i] & group) >= needed - 1 for i in group):
                smallest = min(smallest, len(group))
    return smallest


def test_draws_are_uniform_without_the_node_itself():
    p = Parameters(MODEL, 1, 1.0, 1.0, 100.0, 30, 25, 1, degree=10, share_threshold=9)
    counts = np.zeros(31)
    for k in range(600):
        found = party.draws(p, 7, k.to_bytes(32, "little"))
        assert len(set(found)) == 10 and 7 not in found and found == tuple(sorted(found))
        counts[list(found)] += 1
    others = counts[[j for j in range(1, 31) if j != 7]]
    assert abs(others - 600 * 10 / 29).max() < 6 * math.sqrt(600 * (10 / 29) * (19 / 29))


def test_a_torn_end_of_a_journal_is_dropped_and_damage_inside_is_refused(tmp_path):
    path = tmp_path / "journal"
    secrets = identities(3, 1)
    here = session(secrets, 3, 0)
    first = party.begin(here, 1, secrets[0], bytes(32))
    journal.append(path, first.record)
    whole = path.read_bytes()
    for cut in (1, 5, 40):
        path.write_bytes(whole + whole[:-cut])
        assert journal.read(path) == [first.record]
    journal.append(path, b"next")
    assert journal.read(path) == [first.record, b"next"]
    damaged = bytearray(whole)
    damaged[60] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(UserError, match="damaged"):
        party.resume(here, 1, secrets[0], journal.read(path))
    with pytest.raises(UserError, match="empty"):
        party.resume(here, 1, secrets[0], [])


def test_a_damaged_vector_in_a_journal_is_refused():
    at = Stage(until="survivors")
    node = at.nodes[1]
    damaged = bytearray(node.journal[2])
    damaged[-40] ^= 1  # in the last word of the vector
    with pytest.raises(UserError, match="damaged"):
        party.resume(at.session, 1, node.secret, [*node.journal[:2], bytes(damaged)])
    assert party.resume(at.session, 1, node.secret, node.journal).stage == party.UPLOADED


def test_a_journal_of_another_attempt_is_refused():
    secrets = identities(3, 1)
    here = session(secrets, 3, 0)
    record = party.begin(here, 1, secrets[0], bytes(32)).record
    with pytest.raises(UserError, match="another attempt"):
        party.resume(replace(here, attempt=1), 1, secrets[0], [record])


def test_the_promise_of_a_sum_is_close_to_that_of_central_noise():
    p = Parameters(MODEL, 10_000, 2.0**-14, 1.0, 4.0, 100, 70, 5)
    event = noise.claims(p)[0].event
    central = replace(event, noise=replace(event.noise, multiplier=4.0))
    here, there = (accountants.answer([e], 1e-5).epsilon for e in (event, central))
    assert here <= there * 1.02


def test_claims_carry_the_samplers_errors_and_the_chance_of_a_sparse_graph():
    dense = Parameters(MODEL, 100, 2.0**-12, 1.0, 4.0, 10, 8, 2)
    noised = noise.claims(dense)[0].event.noise
    error = exact.shares_error(noise.share_deviation(dense) / dense.grid, dense.honest)
    assert (noised.ratio, noised.tail) == (100 * error.ratio, 100 * error.tail) and noised.ratio > 0
    sparse = Parameters(MODEL, 1, 2.0**-12, 1.0, 4.0, 150, 140, 1, degree=60, share_threshold=40)
    assert noise.claims(sparse)[0].event.noise.tail >= 2.0**-40
    one = noise.claims(sparse)[0].event
    exact_law = replace(one, noise=replace(one.noise, ratio=0.0, tail=0.0))
    assert answer([one], 1e-9).epsilon > answer([exact_law], 1e-9).epsilon * 1.0001


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, 1e300])
def test_values_far_out_or_not_finite_become_zero_as_a_whole_and_others_the_nearest_steps(broken):
    p = Parameters(MODEL, 40_000, 2.0**-10, 1.0, 4.0, 5, 4, 1)
    values = np.random.default_rng(1).normal(size=p.size).astype(np.float32)
    assert np.array_equal(
        noise.on_grid(p, values), np.rint(values.astype(np.float64) / p.grid).astype(np.int64)
    )
    wide = values.astype(np.float64)
    wide[-1] = broken
    assert not noise.on_grid(p, wide).any()
