"""Accountants against other libraries, exact formulas and each other; running compositions; refusals."""

import math
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy import signal, special, stats

from fedveil.errors import UserError
from fedveil.privacy import formulas, pld, renyi
from fedveil.privacy.accountants import (
    ACCOUNTANTS,
    SLACK,
    Composition,
    answer,
    participation_epsilon,
    with_samplers,
)
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.privacy.mechanisms import Gaussian, Laplace, Staircase

FEW = settings(max_examples=25, deadline=None)
SOUND = ("moments", "rdp", "pld")


def event(sigma, rate=1.0, steps=1, mechanism="gaussian", **more):
    sampling = Sampling("poisson", rate) if rate < 1 else Sampling()
    return Event(Noise(mechanism, sigma), sampling, steps=steps, **more)


def epsilon(events, delta=1e-5, accountant="pld"):
    return answer(events if isinstance(events, list) else [events], delta, accountant).epsilon


# --- against others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("sigma", [0.6, 1.3, 5.0])
def test_renyi_agrees_with_two_libraries(rate, sigma):
    orders = (1.5, 2.0, 2.7, 5.0, 17.0, 64.0)
    mine = renyi.poisson(Noise("gaussian", sigma), rate, orders)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opacus = opacus_rdp.compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=list(orders))
    assert mine == pytest.approx(np.array(opacus), rel=1e-6)
    judge = rdp_privacy_accountant.RdpAccountant([a for a in orders if a == int(a)])
    judge.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)))
    assert mine[[1, 3, 4, 5]] == pytest.approx(np.array(judge.rdp), rel=1e-7)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps"), [(0.01, 6.0, 3000), (0.1, 1.0, 50), (0.5, 2.0, 20), (0.02, 0.7, 30)]
)
def test_loss_distributions_agree_with_dp_accounting(rate, sigma, steps):
    fine = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=2e-5 if sigma > 2 else 1e-4
    )
    expected = fine.self_compose(steps).get_epsilon_for_delta(1e-5)
    assert epsilon(event(sigma, rate, steps)) == pytest.approx(expected, rel=5e-4)


@pytest.mark.parametrize(("scale", "rate", "steps"), [(1.0, 1.0, 3), (0.5, 0.1, 10), (4.0, 0.2, 100)])
def test_laplace_losses_agree_with_dp_accounting(scale, rate, steps):
    other = privacy_loss_distribution.from_laplace_mechanism(scale, sampling_prob=rate)
    expected = other.self_compose(steps).get_epsilon_for_delta(1e-5)
    assert epsilon(event(scale, rate, steps, "laplace")) == pytest.approx(expected, rel=5e-4)


def test_conversion_is_todays():
    sampled = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(2.0))
    judge = rdp_privacy_accountant.RdpAccountant([a for a in renyi.TODAY if a == int(a)])
    judge.compose(dp_accounting.SelfComposedDpEvent(sampled, 500))
    assert epsilon(event(2.0, 0.01, 500), accountant="rdp") == pytest.approx(
        judge.get_epsilon(1e-5), rel=2e-3
    )
    assert epsilon(event(2.0, 0.01, 500), accountant="rdp") <= judge.get_epsilon(1e-5)


# --- against exact values -----------------------------------------------------------------------------------------


@FEW
@given(st.floats(0.05, 100), st.integers(1, 100_000), st.sampled_from([1e-2, 1e-5, 1e-9]))
def test_composed_gaussians_are_one_gaussian(sigma, steps, delta):
    exact = formulas.gaussian_epsilon(sigma / math.sqrt(steps), delta)
    found = epsilon(event(sigma, 1.0, steps), delta)
    assert exact <= found * (1 + 1e-9) + 1e-12
    assert found <= exact * (1 + 1e-3) + 1e-9


@FEW
@given(st.floats(0.3, 8), st.floats(1e-4, 0.9), st.floats(1e-8, 1e-2))
def test_one_sampled_gaussian_step_is_exact(sigma, rate, delta):
    found = pld.solve({pld.Sampled(Gaussian(sigma).pair(), rate): 1}).epsilon(delta)
    if found > 0:
        inner = math.log1p(math.expm1(found) / rate)  # the sampled curve is q times the plain one, shifted
        truth = rate * formulas.gaussian_delta(sigma, inner)
        assert truth <= delta * (1 + 1e-7)
        assert truth == pytest.approx(delta, rel=0.02)


@pytest.mark.parametrize(("lam", "rate", "steps"), [(1.0, 0.01, 400), (0.5, 0.1, 200), (2.0, 1.0, 40)])
def test_composed_staircase_is_a_multinomial_sum(lam, rate, steps):
    atoms = np.array(Staircase(lam).pair().atoms)
    p, q = atoms[:, 1], atoms[:, 1] * np.exp(-atoms[:, 0])
    found = epsilon(event(1 / lam, rate, steps, "staircase"))
    for first, second in ((rate * p + (1 - rate) * q, q), (q, rate * p + (1 - rate) * q)):
        ups, downs = np.meshgrid(np.arange(steps + 1), np.arange(steps + 1), indexing="ij")
        rest = steps - ups - downs
        keep = rest >= 0
        ups, downs, rest = ups[keep], downs[keep], rest[keep]
        logs = special.gammaln(steps + 1) - sum(special.gammaln(n + 1) for n in (ups, downs, rest))
        logs = logs + ups * math.log(first[0]) + rest * math.log(first[1]) + downs * math.log(first[2])
        loss = np.log(first / second)
        total = ups * loss[0] + rest * loss[1] + downs * loss[2]
        over = total > found
        truth = np.exp(logs[over]) @ -np.expm1(found - total[over])
        assert truth <= 1e-5 * (1 + 1e-6)
    assert found <= epsilon(event(1 / lam, rate, steps, "staircase"), accountant="rdp")


@FEW
@given(st.floats(0.2, 5), st.lists(st.floats(0.02, 1), min_size=1, max_size=6), st.floats(0, 1))
def test_laplace_on_a_vector_is_dominated_by_one_coordinate(scale, parts, at):
    """Random splits of an L1 change, by convolving the coordinates' losses; the scalar curve must be above."""
    shifts = np.array(parts) / sum(parts)
    whole = pld.discretise(pld.Sampled(Laplace(scale).pair(1.0)), 1e-3)
    split = {}
    for s in shifts:
        one = pld.Sampled(Laplace(scale).pair(float(s)))
        split[one] = 1
    composed = pld.solve(split)
    point = at / scale
    # both curves are upper estimates; the split one is off by less than a few grid steps
    assert composed.delta(point) <= pld.delta_at(whole.up, 1e-3, point) + 2e-3


# --- properties -------------------------------------------------------------------------------------------------

SETTINGS = st.tuples(st.floats(0.5, 8), st.sampled_from([0.003, 0.05, 0.4, 1.0]), st.integers(1, 3000))


@FEW
@given(SETTINGS, st.floats(1.01, 3), st.sampled_from(SOUND))
def test_more_noise_less_sampling_fewer_steps_larger_delta_never_cost_more(setting, factor, accountant):
    sigma, rate, steps = setting
    base = epsilon(event(sigma, rate, steps), 1e-5, accountant) * (1 + 1e-3) + 1e-9  # the grid may change
    assert epsilon(event(sigma * factor, rate, steps), 1e-5, accountant) <= base
    assert epsilon(event(sigma, rate / factor, steps), 1e-5, accountant) <= base
    assert epsilon(event(sigma, rate, max(1, int(steps / factor))), 1e-5, accountant) <= base
    assert epsilon(event(sigma, rate, steps), min(1e-5 * factor**3, 0.5), accountant) <= base


@FEW
@given(SETTINGS, SETTINGS, st.sampled_from([*SOUND, "basic", "advanced", "optimal", "zcdp"]))
def test_a_composition_costs_at_least_its_parts(one, two, accountant):
    first, second = event(*one), event(*two)
    both = epsilon([first, second], 1e-5, accountant) * (1 + 1e-3) + 1e-9
    assert both >= epsilon(first, 1e-5, accountant)
    assert both >= epsilon(second, 1e-5, accountant)


@FEW
@given(SETTINGS)
def test_the_sharper_accountant_is_never_above(setting):
    sigma, rate, steps = setting
    values = [epsilon(event(sigma, rate, steps), 1e-5, name) for name in ("pld", "rdp", "moments")]
    assert values[0] <= values[1] * (1 + 1e-3) + 1e-9 and values[1] <= values[2] * (1 + 1e-9)
    for name in ("basic", "advanced", "advanced-tanh", "optimal"):
        honest = answer([event(sigma, rate, steps)], 1e-5, name, honest=True)
        if honest.verdict != "none":
            assert honest.verdict == "sound" and honest.delta <= 1e-5 * (1 + 1e-9)
            assert honest.epsilon >= values[0] * (1 - 1e-4)  # exact for one step


@pytest.mark.parametrize("scale", [1e-3, 1e-1, 1e1, 1e3, 1e5])
def test_tiny_and_huge_epsilons_keep_their_accuracy(scale):
    found = epsilon(event(scale, 1.0, 7))
    assert found == pytest.approx(formulas.gaussian_epsilon(scale / math.sqrt(7), 1e-5), rel=1e-3, abs=1e-9)


# --- running compositions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", list(ACCOUNTANTS))
def test_a_running_composition_equals_a_fresh_one(accountant):
    running, events = Composition.start(accountant), []
    for k, steps in enumerate((100, 100, 5, 300, 1)):
        more = [event(4.0 - 0.3 * k, 0.02, steps)]
        running, events = running.add(more), events + more
        assert running.answer(1e-5).epsilon == pytest.approx(
            answer(events, 1e-5, accountant).epsilon, rel=1e-3
        )


def test_adding_leaves_the_old_composition_alone():
    first = Composition.start("pld").add([event(3.0, 0.1, 10)])
    before = first.answer(1e-5)
    second = first.add([event(3.0, 0.1, 90)])
    assert second.answer(1e-5).epsilon > before.epsilon
    assert first.answer(1e-5) == before
    assert first.add([]) is first and first.add([event(1.0, steps=0)]) is first


def test_equal_events_are_merged():
    together = Composition.start().add([event(3.0, 0.1, 10)])
    apart = Composition.start().add([event(3.0, 0.1, 4)]).add([event(3.0, 0.1, 6)])
    assert together.counts() == apart.counts()
    assert together.answer(1e-5).epsilon == pytest.approx(apart.answer(1e-5).epsilon, rel=1e-9)


def test_ten_thousand_different_sigmas_are_quick_and_never_understated():
    sigmas = np.linspace(15, 4.85, 10_000)
    start = time.process_time()
    running = Composition.start("pld")
    for sigma in sigmas:
        running = running.add([event(float(sigma), 0.01)])
    found = running.answer(1e-5)
    assert time.process_time() - start < 3
    assert "rounded down" in found.reason
    start = time.process_time()
    more = running.add([event(4.8, 0.01, 100)]).answer(1e-5)
    assert time.process_time() - start < 0.3
    assert more.epsilon > found.epsilon
    # 125 values, each below the true sigmas it stands for or above them: brackets the truth
    blocks = sigmas.reshape(125, 80)
    low = epsilon([event(float(b.min()), 0.01, 80) for b in blocks])
    high = epsilon([event(float(b.max()), 0.01, 80) for b in blocks])
    assert high <= found.epsilon <= low * 1.02


def test_nothing_costs_nothing():
    empty = Composition.start().answer(1e-5)
    assert (empty.epsilon, empty.verdict) == (0.0, "sound")
    assert answer([event(1.0, steps=0)], 1e-5).epsilon == 0


# --- verdicts and refusals -------------------------------------------------------------------------------------------


def test_verdicts_and_the_delta_really_paid():
    run = [event(6.0, 0.01, 10_000)]
    found = {name: answer(run, 1e-5, name) for name in ACCOUNTANTS}
    assert {n for n, a in found.items() if a.verdict == "nominal"} == {
        "basic", "advanced", "advanced-tanh", "optimal", "zcdp"}  # fmt: skip
    assert found["basic"].delta == pytest.approx(1e-3) and found["optimal"].delta == pytest.approx(1.01e-3)
    assert all(a.reason for a in found.values())


def test_zcdp_without_sampling_is_sound():
    found = answer([event(6.0, steps=10)], 1e-5, "zcdp")
    assert found.verdict == "sound" and found.epsilon >= epsilon(event(6.0, steps=10))


def test_pure_noise_pays_no_step_deltas():
    run = [event(20.0, 1.0, 100, "laplace")]
    summed = answer(run, 1e-5, "basic")
    assert (summed.epsilon, summed.delta, summed.verdict) == (pytest.approx(5.0), 0.0, "sound")
    assert answer(run, 1e-5, "advanced").verdict == "sound"
    assert answer(run, 0.0, "pld").epsilon == pytest.approx(5.0)
    assert answer([event(1.0)], 0.0).verdict == "none"


@pytest.mark.parametrize(
    ("one", "accountant", "word"),
    [
        (Event(Noise("laplace", 2.0, "l2", 10)), "pld", "L1 clip"),
        (Event(Noise("staircase", 2.0, "l1", 10)), "pld", "joint-staircase"),
        (Event(Noise("gaussian", 2.0), Sampling("fixed", batch=5, population=50)), "pld", "replace-one"),
        (Event(Noise("gaussian", 2.0), Sampling("poisson", 0.1), "replace-one"), "rdp", "pld"),
        (
            Event(Noise("laplace", 2.0), Sampling("fixed", batch=5, population=50), "replace-one"),
            "rdp",
            "pld",
        ),
        (Event(Noise("laplace", 2.0), Sampling("poisson", 0.1)), "zcdp", "pld"),
        (Event(Noise("two-valued", 1.0), Sampling("poisson", 0.1)), "pld", "each report"),
        (Event(Noise("gaussian", 2.0)), "pld", "numerical floor"),
    ],
)
def test_refusals_say_why(one, accountant, word):
    delta = 1e-60 if word == "numerical floor" else 1e-5
    found = answer([one], delta, accountant)
    assert (found.epsilon, found.verdict) == (None, "none") and word in found.reason


def test_units_and_relations_do_not_mix():
    mixed = [event(2.0), event(2.0, unit="client")]
    assert answer(mixed, 1e-5).verdict == "none"
    assert answer([event(2.0), event(2.0, relation="replace-one")], 1e-5).verdict == "none"


def test_partition_is_not_amplified():
    whole = Event(Noise("gaussian", 6.0), Sampling("partition", rate=0.01), steps=10)
    assert epsilon(whole) == pytest.approx(formulas.gaussian_epsilon(6 / math.sqrt(10), 1e-5), rel=1e-3)


def test_visible_participation_averages_the_deltas():
    found = participation_epsilon(Event(Noise("gaussian", 6.0)), 30, 0.2, 1e-5).epsilon
    truth = sum(
        stats.binom.pmf(r, 30, 0.2) * formulas.gaussian_delta(6 / math.sqrt(r), found) for r in range(1, 31)
    )
    assert truth <= 1e-5 and truth == pytest.approx(1e-5, rel=0.02)
    assert participation_epsilon(Event(Noise("laplace", 6.0, "l2", 9)), 30, 0.2, 1e-5).verdict == "none"
    sure = participation_epsilon(Event(Noise("gaussian", 6.0)), 30, 1.0, 1e-5).epsilon
    assert sure == pytest.approx(epsilon(event(6.0, steps=30)), rel=1e-3)


@pytest.mark.parametrize(
    ("one", "delta", "word"),
    [
        (event(0.0), 1e-5, "noise-multiplier"),
        (event(math.nan), 1e-5, "noise-multiplier"),
        (Event(Noise("gaussian", 1.0), Sampling("poisson", 1.2)), 1e-5, "sampling-rate"),
        (Event(Noise("gaussian", 1.0), Sampling("poisson", 0.0)), 1e-5, "sampling-rate"),
        (Event(Noise("gaussian", 1.0), Sampling("fixed", batch=9, population=5)), 1e-5, "population"),
        (Event(Noise("gaussian", 1.0), Sampling("fixed")), 1e-5, "batch"),
        (Event(Noise("gaussian", 1.0), Sampling("often")), 1e-5, "sampling"),
        (event(1.0, steps=-1), 1e-5, "steps"),
        (event(1.0, steps=2.5), 1e-5, "steps"),
        (event(1.0), 1.0, "delta"),
        (event(1.0), -1e-9, "delta"),
        (event(1.0), math.nan, "delta"),
    ],
)
def test_bad_values_name_the_option_and_the_range(one, delta, word):
    with pytest.raises(UserError, match=word) as caught:
        answer([one], delta)
    assert "must be" in str(caught.value) or "needs" in str(caught.value)


def test_unknown_accountant_suggests_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'moments'"):
        answer([event(1.0)], 1e-5, "moment")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mechanism", ["laplace", "staircase", "gaussian"])
def test_numbers_too_extreme_for_a_grid_are_answered_or_refused_never_a_crash(mechanism):
    event = Event(Noise(mechanism, 1e-3, norm="l1" if mechanism == "laplace" else "l2"), steps=1_000_000)
    for accountant in ACCOUNTANTS:
        found = answer([event], 1e-5, accountant)
        assert (found.epsilon is None) == (found.verdict == "none")
        assert found.epsilon is None or found.epsilon > 100


@given(
    step=st.floats(1e-4, 3),
    count=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_faded_sums_are_those_of_the_recursive_filter(step, count, seed, spread):
    draw = np.random.default_rng(seed)
    probs = np.exp(draw.uniform(-spread, 0, count))
    decay = math.exp(-step)
    filtered = signal.lfilter([0.0, decay], [1.0, -decay], probs[::-1])[::-1]
    np.testing.assert_allclose(pld._faded(probs, step), filtered, rtol=1e-11)


def test_counting_epsilon_loads_nothing_slow():
    """A command line that only counts must not wait for libraries it does not use."""
    slow = (
        "torch",
        "dp_accounting",
        "scipy.signal",
        "scipy.stats",
        "scipy.optimize",
        "sklearn",
        "matplotlib",
    )
    code = (
        "import sys; from fedveil.privacy.accountants import answer; "
        "from fedveil.privacy.events import Event, Noise, Sampling; "
        "answer([Event(Noise('gaussian', 6.0), Sampling('poisson', rate=0.01), 'add-remove', 'example', 100)], 1e-5, 'pld'); "
        f"print([name for name in {slow!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def drawn(steps=1):
    """A step whose noise a sampler draws with errors, as exact noise is."""
    return Event(Noise("gaussian", 2.0, ratio=1e-12, tail=1e-18), Sampling("poisson", 0.02), steps=steps)


def test_the_books_of_a_long_run_do_not_grow_with_its_rounds():
    composition = Composition.start()
    for number in range(1, 41):
        composition = composition.add([drawn()])
        with_samplers(composition, [(drawn(), number)], 1e-5)
    for grid in composition._solved().losses.grids.values():
        for side in (grid.up, grid.down):
            assert len(side.laws) == 1 and side.laws[0][1] == 40
            assert len(side.solved) <= 3  # the given delta, and the ones left for it by samplers


@pytest.mark.parametrize("tail", [0.0, 1e-18, 1e-10, 1e-8])
def test_round_by_round_is_all_at_once_for_sampled_noise(tail):
    one = replace(drawn(), noise=replace(drawn().noise, tail=tail))
    composition = Composition.start()
    for number in range(1, 31):
        composition = composition.add([one])
        found = with_samplers(composition, [(one, number)], 1e-5)
    assert found.epsilon == pytest.approx(answer([replace(one, steps=30)], 1e-5).epsilon, rel=1e-8)


@FEW
@given(st.floats(0.8, 8), st.floats(0.001, 0.5), st.integers(1, 300), st.floats(1e-20, 1e-8), st.floats(1e-15, 1e-9))
def test_samplers_are_paid_within_delta(sigma, rate, steps, tail, ratio):
    """Whatever the errors: the promised (epsilon, delta) covers exact laws' at what is left, plus what the samplers cost."""
    one = Event(Noise("gaussian", sigma, ratio=ratio, tail=tail), Sampling("poisson", rate), steps=steps)
    found = answer([one], 1e-5)
    exact = [replace(one, noise=replace(one.noise, ratio=0.0, tail=0.0))]
    if found.epsilon is None:
        assert steps * ratio > SLACK or steps * tail * math.exp(answer(exact, 1e-5).epsilon) > 1e-7
        return
    errors, lost = steps * ratio, steps * tail * (math.exp(found.epsilon) + 1)
    least = answer(exact, (1e-5 - lost) / (1 + SLACK)).epsilon + 2 * errors
    assert least * (1 - 1e-9) <= found.epsilon
    share = SLACK + 2 * steps * tail * (math.exp(answer(exact, 1e-5).epsilon + 1) + 1) / 1e-5  # with the room of epsilon + 1
    if share < 0.25:  # rounded up to a power of two, it at most doubles
        assert found.epsilon <= (answer(exact, 1e-5 * (1 - 2 * share)).epsilon + 2 * errors) * (1 + 1e-9)
