"""Calibration: never above the target, close below it, fast, for every mechanism and accountant."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import UserError
from fedveil.privacy.accountants import answer
from fedveil.privacy.calibrate import calibrate, compare_mechanisms, steps_within
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.privacy.formulas import gaussian_epsilon

POISSON = Sampling("poisson", 0.05)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["gaussian", "laplace", "staircase", "joint-staircase", "two-valued"]),
    st.floats(0.05, 30),
    st.sampled_from([1e-3, 1e-5, 1e-8]),
    st.integers(1, 400),
    st.sampled_from([1.0, 0.3, 0.01]),
)
def test_reaches_the_target_from_below(mechanism, epsilon, delta, steps, rate):
    sampling = Sampling("poisson", rate) if mechanism != "two-valued" else Sampling()
    found = calibrate(epsilon, delta, steps=steps, sampling=sampling, mechanism=mechanism)
    assert 0.999 * epsilon <= found.epsilon <= epsilon
    again = answer([Event(Noise(mechanism, found.noise_multiplier), sampling, steps=steps)], delta)
    assert again.epsilon == pytest.approx(found.epsilon, rel=1e-9)


@pytest.mark.parametrize("accountant", ["basic", "advanced", "optimal", "zcdp", "moments", "rdp", "pld"])
def test_every_accountant_can_be_inverted(accountant):
    found = calibrate(3.0, 1e-5, steps=100, sampling=POISSON, accountant=accountant)
    assert 2.997 <= found.epsilon <= 3.0
    assert found.verdict == ("sound" if accountant in ("moments", "rdp", "pld") else "nominal")


def test_one_gaussian_release_needs_the_exact_noise():
    found = calibrate(1.0, 1e-5)
    assert gaussian_epsilon(found.noise_multiplier, 1e-5) <= 1.0
    assert gaussian_epsilon(found.noise_multiplier * 0.998, 1e-5) > 1.0


def test_vectors_and_norms():
    small = calibrate(2.0, 1e-5, mechanism="staircase", dimension=10, accountant="rdp")
    assert small.lam == pytest.approx(1 / small.noise_multiplier) and 0 < small.nu < 0.5
    assert small.to_json()["lambda"] == small.lam
    l1 = calibrate(2.0, 1e-5, mechanism="laplace", norm="l1", dimension=1000)
    assert l1.noise_multiplier == pytest.approx(calibrate(2.0, 1e-5, mechanism="laplace").noise_multiplier)
    with pytest.raises(UserError, match="rdp"):
        calibrate(2.0, 1e-5, mechanism="laplace", dimension=10)


def test_least_noise_first_and_the_accountant_is_named():
    once = compare_mechanisms(1.0, 1e-5)
    assert [c.mechanism for c in once][-1] == "gaussian"  # one scalar release: Staircase and Laplace win
    many = compare_mechanisms(1.0, 1e-5, steps=100)
    assert many[0].mechanism == "gaussian"  # a hundred releases: Gaussian wins even for a number
    vectors = compare_mechanisms(1.0, 1e-5, dimension=1000, mechanisms=("gaussian", "laplace", "staircase"))
    assert [c.mechanism for c in vectors] == ["gaussian", "laplace", "staircase"]
    assert [c.accountant for c in vectors] == ["pld", "rdp", "rdp"]


def test_steps_within_is_the_last_number_that_fits():
    count = steps_within(2.0, 1e-5, multiplier=1.5, sampling=POISSON)

    def epsilon(steps):
        return answer([Event(Noise("gaussian", 1.5), POISSON, steps=steps)], 1e-5).epsilon

    assert epsilon(count) <= 2.0 < epsilon(count + 1)
    assert steps_within(0.01, 1e-5, multiplier=1.0) == 0


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "staircase"])
def test_a_calibration_takes_less_than_two_seconds(mechanism):
    start = time.process_time()
    calibrate(0.7, 1e-5, steps=10_000, sampling=Sampling("poisson", 0.011), mechanism=mechanism)
    assert time.process_time() - start < 2


def test_a_schedule_of_fixed_batches_and_replace_one():
    fixed = Sampling("fixed", batch=5, population=500)
    tight = calibrate(1.0, 1e-5, steps=1000, sampling=fixed, relation="replace-one")
    loose = calibrate(1.0, 1e-5, steps=1000, sampling=fixed, relation="replace-one", accountant="rdp")
    assert tight.noise_multiplier < loose.noise_multiplier


@pytest.mark.parametrize(("change", "word"), [({"epsilon": 0.0}, "epsilon"), ({"epsilon": -1.0}, "epsilon"),
                                              ({"delta": 1.0}, "delta"), ({"steps": 0}, "steps"),
                                              ({"accountant": "rpd"}, "rdp"), ({"mechanism": "gauss"}, "gaussian"),
                                              ({"sampling": Sampling("poisson", 1.5)}, "sampling-rate")])  # fmt: skip
def test_bad_values_name_the_option(change, word):
    arguments = {"epsilon": 1.0, "delta": 1e-5, **change}
    with pytest.raises(UserError, match=word):
        calibrate(arguments.pop("epsilon"), arguments.pop("delta"), **arguments)


def test_an_epsilon_too_small_for_any_noise_is_refused_with_a_sentence():
    with pytest.raises(UserError, match="No noise reaches"):
        calibrate(1e-320, 1e-5)
