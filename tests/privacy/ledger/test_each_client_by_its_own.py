"""One client's law of noise decides about that client only."""

from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Claim, Event, Noise, Release, Sampling
from fedveil.privacy.ledger import Header, Ledger

GAUSSIAN = Event(Noise("gaussian", 1.2), Sampling("poisson", 0.05), steps=300)
LAPLACE = Event(Noise("laplace", 4.0, dimension=1000), Sampling("poisson", 0.05), steps=300)


def test_noise_that_pld_refuses_does_not_loosen_the_bounds_of_other_clients(tmp_path):
    header = Header(delta=1e-5, clients=3, sizes=(100, 100, 100))
    with Ledger.create(tmp_path / "ledger.jsonl", header) as ledger:
        gaussian, laplace = (Claim("server", "example", "sound", "", e) for e in (GAUSSIAN, LAPLACE))
        ledger.spend(Release(1, (((0, 2), (gaussian,)), ((1,), (laplace,)))))
        found = ledger.epsilon("server", "example")
    exact, renyi = (answer([GAUSSIAN], 1e-5, name).epsilon for name in ("pld", "rdp"))
    other = answer([LAPLACE], 1e-5, "rdp").epsilon
    assert (
        other < exact < renyi
    )  # the Gaussian clients are the worst, and what PLD says of them is below Renyi's bound
    assert found == exact
