"""The noise streams: bits, laws, tails.

Statistical tests fix their keys. Stated false-alarm rates are those of a fresh key.
"""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.errors import UserError
from fedveil.protect import noise

KEY = bytes(range(16))
MANY = 1_000_000
GOLDEN = [
    ["bf903bb3", "3fa5bc93", "be876546"],
    ["be586c50", "bd090529", "c02063bc"],
    ["4055c5cd", "be67c2d1", "c03392de"],
]
needs_native = pytest.mark.skipif(noise._native is None, reason="the compiled extension is not installed")


# Bits


def test_words_are_aes_of_the_counter_blocks():
    counter = b"".join(n.to_bytes(4, "little") for n in (9, 5, 7, 3))
    expected = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor().update(counter)
    assert noise.words(KEY, 7, 3, np.array([9], np.uint32), 5).tobytes() == expected


def test_the_streams_do_not_change():
    """Golden bits: seeds of published runs must keep giving the same noise."""
    got = [
        noise.numpy_normals(KEY, 3, 3),
        noise.numpy_laplaces(KEY, 3, 3),
        noise.numpy_staircases(KEY, 3, 3, 1.0, 0.4),
    ]
    assert [[f"{bits:08x}" for bits in values.view(np.uint32)] for values in got] == GOLDEN


@pytest.mark.parametrize("isa", noise._native.instruction_sets() if noise._native else ["none"])
@needs_native
def test_compiled_streams_have_the_bits_of_the_definition(isa):
    native = noise._native
    for first, count in [(0, 20_000), (5, 1), (33, 2000), (31, 64), (7, 0)]:
        pairs = [
            (native.normals(KEY, 7, count, first, 2, isa), noise.numpy_normals(KEY, 7, count, first, 2)),
            (native.laplaces(KEY, 7, count, first, 2, 2, isa), noise.numpy_laplaces(KEY, 7, count, first, 2)),
        ]
        for lam, nu in [(1.0, 0.3), (1e-7, 0.5), (5.0, 0.01)]:
            constants = [c.item() for c in noise._staircase_constants(lam, nu)]
            got = native.staircases(KEY, 7, count, first, 2, *constants, isa)
            pairs.append((got, noise.numpy_staircases(KEY, 7, count, lam, nu, first, 2)))
        for got, expected in pairs:
            assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


@needs_native
@settings(max_examples=50, deadline=None)
@given(key=st.binary(min_size=16, max_size=16), step=st.integers(0, 2**32 - 1), first=st.integers(0, 2**30))
def test_any_place_of_any_stream_has_the_same_bits(key, step, first):
    got, expected = noise.normals(key, step, 40, first), noise.numpy_normals(key, step, 40, first)
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_a_part_of_a_stream_is_that_part():
    whole = noise.normals(KEY, 1, 1000)
    assert np.array_equal(noise.normals(KEY, 1, 300, first=123), whole[123:423])


def test_streams_differ_by_key_step_and_example():
    one = noise.normals(KEY, 1, 64)
    for other in (
        noise.normals(bytes(16), 1, 64),
        noise.normals(KEY, 2, 64),
        noise.normals(KEY, 1, 64, example=1),
    ):
        assert not np.any(one == other)


def test_a_key_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        noise.numpy_normals(b"short", 0, 4)


# The arithmetic


@pytest.mark.parametrize("low_bits", [0, 1])
def test_the_exponential_is_right_to_one_part_in_a_million_at_both_ends(low_bits):
    draw = np.random.default_rng(0)
    ends = np.concatenate([np.arange(4096), 2**31 - 1 - np.arange(4096), draw.integers(0, 2**31, 100_000)])
    near = 1518500250 + np.arange(-2000, 2000)
    h = np.concatenate([ends, near]).astype(np.uint64)
    got = noise.exponential_of_word((h * 2 + low_bits).astype(np.uint32)).astype(np.float64)
    expected = -np.log1p(-((2**31 - 1 - h).astype(np.float64) + 0.5) / 2**31)
    expected = np.where(h < 2**30, -np.log((h.astype(np.float64) + 0.5) / 2**31), expected)
    assert np.max(np.abs(got / expected - 1)) < 3e-7


def test_radius_is_never_zero_and_the_tail_ends_where_documented():
    """The extreme words themselves, not a sample."""
    extreme = np.array([0, 1, 2**32 - 1, 2**32 - 2], np.uint32)
    values = noise.exponential_of_word(extreme)
    assert values.min() > 2.0**-33 and values.max() <= noise.LARGEST_EXPONENTIAL
    assert math.sqrt(2 * float(values.max())) <= noise.LARGEST_NORMAL
    assert 2 * stats.norm.sf(math.sqrt(2 * float(values.max()))) < 2.8e-11


@pytest.mark.parametrize("z", [0.4, 1.0, 6.0])
def test_the_strip_that_one_neighbour_cannot_reach_is_within_the_documented_bound(z):
    """docs/noise.md: changes of norm 1/z, spread over m of d coordinates."""
    d, edge = 35_000, noise.LARGEST_NORMAL
    strips = [
        m * (stats.norm.sf(edge - 1 / (z * math.sqrt(m))) - stats.norm.sf(edge)) for m in (1, 2, 5, 100, d)
    ]
    assert max(strips) <= math.sqrt(d) / z * stats.norm.pdf(edge - 1 / z)
    assert z != 0.4 or max(strips) > 1e-5  # not a detail: more than a usual delta, in one step


def test_directions_lie_on_the_circle_evenly():
    words = np.linspace(0, 2**32 - 1, 100_001).astype(np.uint64).astype(np.uint32)
    cosine, sine = (v.astype(np.float64) / math.sqrt(2) for v in noise._direction_of_word(words))
    assert np.max(np.abs(np.hypot(cosine, sine) - 1)) < 3e-7
    turns = np.sort(np.mod(np.arctan2(sine, cosine) / (2 * np.pi), 1))
    assert np.max(np.abs(turns - np.linspace(0, 1, len(turns)))) < 2e-5


# The laws. Each p-value below 1e-4 fails: false alarm 1e-4 for each assertion with a fresh key.


def assert_moments(values: np.ndarray, variance: float, fourth: float) -> None:
    """Mean, variance and fourth moment within 4.5 standard errors each: false alarm 7e-6 for each of three."""
    n, v = len(values), values.astype(np.float64)
    assert abs(v.mean()) < 4.5 * math.sqrt(variance / n)
    assert abs((v**2).mean() - variance) < 4.5 * math.sqrt((fourth - variance**2) / n)
    spread = np.std(v**4) / math.sqrt(n)
    assert abs((v**4).mean() - fourth) < 4.5 * spread


def test_normals_are_normal():
    z = noise.normals(KEY, 11, MANY)
    assert_moments(z, 1.0, 3.0)
    assert stats.kstest(z, "norm").pvalue > 1e-4
    beyond = int((np.abs(z) > 4).sum())  # tail: 63.3 expected
    assert stats.binomtest(beyond, MANY, 2 * stats.norm.sf(4)).pvalue > 1e-4


def test_the_two_values_of_a_pair_and_neighbours_are_independent():
    z = noise.normals(KEY, 12, 32 * 30_000).reshape(-1, 2, 16)
    cosine, sine = z[:, 0].ravel(), z[:, 1].ravel()
    for a, b in [
        (cosine, sine),
        (cosine**2, sine**2),
        (cosine[1:], cosine[:-1]),
        (cosine[1:] ** 2, sine[:-1] ** 2),
    ]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / math.sqrt(len(a))  # false alarm 7e-6 each


def test_laplaces_have_scale_one():
    x = noise.laplaces(KEY, 13, MANY)
    assert_moments(x, 2.0, 24.0)
    assert stats.kstest(x, "laplace").pvalue > 1e-4


@pytest.mark.parametrize(("lam", "nu"), [(1.0, 0.3), (0.2, None), (4.0, None), (1.0, 0.9)])
def test_staircases_have_the_geometric_steps(lam, nu):
    """Counts in the inner and outer part of the first periods against the density."""
    x = np.abs(noise.staircases(KEY, 14, MANY, lam, nu).astype(np.float64))
    nu = noise.default_nu(lam) if nu is None else nu
    b = math.exp(-lam)
    top = (1 - b) / (2 * (nu + b * (1 - nu)))
    edges, mass = [0.0], []
    for k in range(20):
        edges += [k + nu, k + 1.0]
        mass += [2 * top * b**k * nu, 2 * top * b ** (k + 1) * (1 - nu)]
    mass = np.array([*mass, 1 - sum(mass)])
    counts = np.histogram(x, [*edges, np.inf])[0]
    few = mass * MANY < 10
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(mass[~few], mass[few].sum()) * MANY
    use = expected > 0
    assert stats.chisquare(counts[use], expected[use] * counts[use].sum() / expected[use].sum()).pvalue > 1e-4
    inside = x[(x > 1) & (x < 1 + nu)]
    assert stats.kstest((inside - 1) / nu, "uniform").pvalue > 1e-4


def test_signs_are_even_and_independent_of_size():
    for x in (noise.laplaces(KEY, 15, MANY), noise.staircases(KEY, 15, MANY, 1.0, 0.4)):
        for part in (x, x[np.abs(x) > 1], x[np.abs(x) < 0.3]):
            assert stats.binomtest(int((part > 0).sum()), len(part)).pvalue > 1e-4


@pytest.mark.parametrize("count", [1, 3])
def test_the_joint_staircase_has_its_radial_law(count):
    """The l1 norm against its density r^(d-1) e^(-lam K(r)), and for d = 1 the scalar law."""
    lam, nu, draws = 1.5, 0.35, 4000
    r = np.array(
        [np.abs(noise.joint_staircase(KEY, s, count, lam, nu)).astype(float).sum() for s in range(draws)]
    )
    edges = np.sort(np.concatenate([np.arange(0, 40), np.arange(0, 40) + nu]))
    density = np.exp(-lam * np.round(np.floor(edges[:-1] + 1e-9) + ((edges[:-1] + 1e-9) % 1 >= nu)))
    mass = density * (edges[1:] ** count - edges[:-1] ** count)
    mass /= mass.sum()
    counts = np.histogram(r, edges)[0]
    few = mass * draws < 8
    counts, mass = np.append(counts[~few], counts[few].sum()), np.append(mass[~few], mass[few].sum())
    assert stats.chisquare(counts, mass * counts.sum()).pvalue > 1e-4


@given(deviation=st.floats(10, 400), shift=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_discrete_noise_is_never_worse_than_the_multiplier_it_is_counted_with(deviation, shift):
    """Exact hockey-stick divergences of two discrete Gaussians `shift` steps apart against the continuous ones."""
    z = noise.snapped_multiplier(deviation, shift - 1.0, 1.0, 1)  # one coordinate: snapping adds 1
    assert z < deviation / shift
    y = np.arange(-math.ceil(14 * deviation) - shift, math.ceil(14 * deviation) + shift + 1.0)
    p, q = (np.exp(-((y - at) ** 2) / (2 * deviation**2)) for at in (0.0, float(shift)))
    p, q = p / p.sum(), q / q.sum()
    for epsilon in np.linspace(0, 1 / z**2 + 6 / z, 25):
        discrete = np.maximum(p - math.exp(epsilon) * q, 0).sum()
        low, high = stats.norm.sf(epsilon * z - 0.5 / z), stats.norm.sf(epsilon * z + 0.5 / z)
        assert discrete <= (low - math.exp(epsilon) * high) * (1 + 1e-6) + 1e-13


def test_counting_discrete_noise_as_continuous_of_the_same_deviation_would_be_wrong():
    """Why `snapped_multiplier` takes something off: noise 10 steps wide, neighbours 5 steps apart, epsilon between
    two possible losses."""
    deviation, shift = 10.0, 5
    y = np.arange(-200, 201.0)
    p, q = (np.exp(-((y - at) ** 2) / (2 * deviation**2)) for at in (0, shift))
    p, q = p / p.sum(), q / q.sum()
    worse = 0.0
    for epsilon in np.linspace(0, 2, 401):
        z = deviation / shift
        continuous = stats.norm.sf(epsilon * z - 0.5 / z) - math.exp(epsilon) * stats.norm.sf(
            epsilon * z + 0.5 / z
        )
        worse = max(worse, np.maximum(p - math.exp(epsilon) * q, 0).sum() / continuous - 1)
    assert 1e-4 < worse < 0.05


@pytest.mark.parametrize(("lam", "nu"), [(0.0, 0.5), (-1.0, 0.5), (1.0, 0.0), (1.0, 1.0), (math.inf, 0.5)])
def test_impossible_staircases_are_refused(lam, nu):
    with pytest.raises(UserError, match="lambda"):
        noise.staircases(KEY, 0, 4, lam, nu)


@given(
    bound=st.floats(0.01, 10),
    count=st.integers(1, 200),
    power=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_snapped_neighbours_stay_within_the_snapped_bound(bound, count, power, seed):
    draw = np.random.default_rng(seed)
    a = draw.normal(size=count)
    step = draw.normal(size=count)
    b = a + step * bound / np.linalg.norm(step)
    grid = 2.0**-power
    change = np.linalg.norm((noise.snap(a, grid) - noise.snap(b, grid)) * grid)
    assert change <= noise.snapped_bound(bound, grid, count) * (1 + 1e-12)


def test_a_module_compiled_from_another_version_is_not_used_and_says_what_to_do(tmp_path):
    """As after `git pull`: the package is new, what was compiled is old."""
    code = (
        "import sys, types; old = types.ModuleType('fedveil._native'); old.VERSION = -1; sys.modules['fedveil._native'] = old\n"
        "import fedveil; fedveil._native = old\n"
        "from torch import nn; from fedveil.training import pool; from fedveil.training.contract import LocalPlan\n"
        "print(pool.choose(nn.Sequential(nn.Linear(3, 2)), LocalPlan(1, 0.1, 4.0))[1])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert "another version" in said and "install fedveil again" in said
