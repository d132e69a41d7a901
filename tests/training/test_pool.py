"""The dispatcher: engine choice, streams, worker processes; and what the noise looks like from outside."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from engine_cases import build, everything, largest_difference, mlp, plan, same_bits, train, works
from scipy import stats
from torch import nn

from fedveil.errors import UserError
from fedveil.models import nets
from fedveil.protect import noise
from fedveil.training import pool, reference
from fedveil.training.contract import ClientWork
from fedveil.training.torch import functional, layers, stacked
from fedveil.training.torch.many_normals import Normals

PRIVATE = {"clip": "layer", "noise": "gaussian"}
TORCH = ("stacked", "functional", "reference")


def native_missing() -> bool:
    return pool._why_not_native(mlp().module, plan(), "cpu", torch.float32) is not None


@pytest.fixture(scope="module")
def workers():
    with pool.Workers(2) as workers:
        yield workers


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


@pytest.mark.parametrize(
    ("make", "engine", "expected"),
    [
        (lambda: mlp().module, "torch", "stacked"),
        (lambda: mlp().module, "functional", "functional"),
        (lambda: mlp().module, "reference", "reference"),
        (Custom, "torch", "graph"),
        (Custom, "auto", "graph"),
    ],
)
def test_choose_names_the_engine_in_one_line(make, engine, expected):
    name, message = pool.choose(make(), plan(), engine)
    assert name == expected
    assert message.startswith("Engine: ") and "\n" not in message
    if make is Custom and engine == "auto":
        assert "Custom" in message


@pytest.mark.skipif(native_missing(), reason="the compiled extension is not installed")
def test_auto_prefers_native_on_the_cpu_in_float32():
    assert pool.choose(mlp().module, plan())[0] == "native"
    name, message = pool.choose(mlp().module, plan(), dtype=torch.float64)
    assert name == "stacked" and "float64" in message


def test_without_the_extension_auto_says_so(monkeypatch):
    monkeypatch.setattr(pool, "_native_module", lambda: None)
    name, message = pool.choose(mlp().module, plan())
    assert name == "stacked" and "not installed" in message
    with pytest.raises(UserError, match="not installed"):
        pool.choose(mlp().module, plan(), "native")


@pytest.mark.parametrize(
    ("engine", "make", "word"),
    [
        ("nativ", lambda: mlp().module, "Did you mean 'native'"),
        ("stacked", Custom, "Custom"),
        ("auto", lambda: nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3)), "replace_batch_norm"),
    ],
)
def test_engines_that_cannot_train_are_refused(engine, make, word):
    with pytest.raises(UserError, match=word):
        pool.choose(make(), plan(), engine)


@pytest.mark.parametrize("engine", TORCH)
def test_train_is_the_engine_itself(engine):
    case, what = mlp(), plan(**PRIVATE)
    work = works(case)
    direct = train(
        {"stacked": stacked, "functional": functional, "reference": reference}[engine], case, work, what
    )
    assert same_bits(direct, train(pool, case, work, what, engine=engine))


@pytest.mark.skipif(native_missing(), reason="the compiled extension is not installed")
def test_native_through_the_dispatcher_equals_torch_up_to_rounding():
    case, what = everything(), plan(**PRIVATE)
    work = works(case)
    one = train(pool, case, work, what, engine="native")
    assert largest_difference(train(pool, case, work, what, engine="torch"), one) < 1e-5
    assert same_bits(one, train(pool, case, work, what, engine="native", chunk=2))


def test_stream_reads_no_further_than_its_chunk_and_keeps_the_order():
    case, what = mlp(), plan(**PRIVATE)
    work, read = works(case, clients=9), []

    def generate():
        for one in work:
            read.append(one.client)
            yield one

    stream = pool.stream(case.module, case.start, case.x, case.y, generate(), what, engine="stacked", chunk=2)
    first = next(stream)
    assert first.delta.shape[0] == 2 and len(read) == 2
    rest = [first, *stream]
    assert [len(part.delta) for part in rest] == [2, 2, 2, 2, 1]
    whole = train(pool, case, work, what, engine="stacked")
    assert np.array_equal(np.concatenate([part.delta for part in rest]), whole.delta)


@pytest.mark.parametrize("engine", ["stacked", "functional"])
def test_bits_do_not_depend_on_the_number_of_workers(workers, engine):
    case, what = everything(), plan(**PRIVATE)
    work = works(case, clients=7, poisson=True)
    alone = train(pool, case, work, what, engine=engine)
    for chunk in (None, 1, 3):
        assert same_bits(alone, train(pool, case, work, what, engine=engine, workers=workers, chunk=chunk))


def test_bits_do_not_depend_on_torchs_threads():
    case, what = everything(), plan(**PRIVATE)
    work, before = works(case, clients=3), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(train(pool, case, work, what, engine="stacked"))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert same_bits(*results)


def test_a_pool_serves_new_data_and_passes_errors_on(workers):
    case, other = mlp(), mlp(seed=5)
    for one in (case, other, case):
        work = works(one)
        expected = train(pool, one, work, plan(), engine="stacked")
        assert same_bits(expected, train(pool, one, work, plan(), engine="stacked", workers=workers))
    case.y[0] = 99
    wrong = build(Custom, (7,), 3)
    wrong.y[:] = 99
    with pytest.raises(UserError, match="Labels"):
        train(pool, wrong, works(wrong), plan(), engine="functional", workers=workers)
    good = train(pool, other, works(other), plan(), engine="stacked", workers=workers)
    assert good.finite.all()


def test_a_lost_worker_is_a_clear_error_not_a_hang():
    case = mlp()
    with pool.Workers(2) as workers:
        train(pool, case, works(case), plan(), engine="stacked", workers=workers)
        for process in workers.processes():
            os.kill(process, signal.SIGKILL)
        with pytest.raises(UserError, match="worker process ended"):
            train(pool, case, works(case), plan(), engine="stacked", workers=workers)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
            import time
            from engine_cases import mlp, plan, train, works
            from fedveil.training import pool
            if __name__ == "__main__":
                case = mlp()
                workers = pool.Workers(2)
                train(pool, case, works(case), plan(), engine="stacked", workers=workers)
                print(*workers.processes(), flush=True)
                time.sleep(60)
        """)
    )
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert children
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"clip": "layer", "bounds": (1.0,)}, "plan.bounds has 1 values for 3 steps"),
        ({"noised": plan(noise="gaussian").noised[:2]}, "plan.noised has 2 values for 3 steps"),
        ({"noised": plan(noise="gaussian").noised, "clip": "flat", "bound_rule": "median"}, "at_norm"),
        ({"expected_batch": 0.0}, "expected_batch"),
    ],
)
def test_plans_that_do_not_fit_are_refused(changes, word):
    case = mlp()
    with pytest.raises(UserError, match=word):
        train(pool, case, works(case), plan(**changes))


def test_start_weights_of_another_model_are_refused():
    case = mlp()
    with pytest.raises(UserError, match="weights"):
        pool.train(case.module, case.start[:-1], case.x, case.y, works(case), plan())


def test_no_clients_give_an_empty_result():
    case = mlp()
    assert train(pool, case, [], plan(), engine="torch").delta.shape == (0, case.start.size)


# What the noise looks like from outside. With learning rate 1, expected batch 1 and empty batches, delta is
# minus the sum over steps of bound * multiplier * noise, whatever the model.

ENGINES = [
    *TORCH,
    pytest.param(
        "native", marks=pytest.mark.skipif(native_missing(), reason="the extension is not installed")
    ),
]


def noise_of(engine: str, steps: int, clients: int, **changes: object) -> np.ndarray:
    case = build(lambda: nn.Sequential(nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 10)), (60,), 10)
    draw = np.random.default_rng(11)
    nothing = np.full((steps, 2), -1, np.int32)
    work = [ClientWork(k, nothing, draw.bytes(16)) for k in range(clients)]
    what = plan(steps=steps, clip="layer", learning_rate=1.0, expected_batch=1.0, **{
        "noise": "gaussian", "bounds": (0.5,) * steps, "multipliers": (3.0,) * steps, **changes,
    })  # fmt: skip
    return -train(pool, case, work, what, engine=engine).delta.astype(float)


@pytest.mark.parametrize("engine", ENGINES)
def test_noise_has_the_promised_mean_variance_and_shape(engine):
    """Seeded. False-alarm rate per engine about 3e-4 (three tests at 1e-4) if the seed were drawn anew."""
    values = noise_of(engine, steps=1, clients=8).ravel() / (0.5 * 3.0)
    n = values.size
    assert abs(values.mean()) * np.sqrt(n) < stats.norm.isf(0.5e-4)
    low, high = stats.chi2.ppf([0.5e-4, 1 - 0.5e-4], n)
    assert low < (values**2).sum() < high
    assert stats.kstest(values, "norm").pvalue > 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_noise_is_independent_across_clients_and_steps(engine):
    """Seeded. Correlations of independent normals times sqrt(n) are near N(0, 1); 28 client pairs and 1 variance at
    a joint false-alarm rate of about 1e-4 (Bonferroni) if the seed were drawn anew."""
    one = noise_of(engine, steps=1, clients=8)
    limit = stats.norm.isf(0.5e-4 / 29)
    for a, b in itertools.combinations(range(8), 2):
        assert abs(np.corrcoef(one[a], one[b])[0, 1]) * np.sqrt(one.shape[1]) < limit
    # The sum over 4 steps has 4 times the variance only if steps are independent; its first step is the same stream.
    four = noise_of(engine, steps=4, clients=8)
    ratio = (four**2).sum() / (four.size * 4 * 1.5**2)
    assert abs(ratio - 1) * np.sqrt(four.size / 2) < limit
    later = four - one
    assert abs(np.corrcoef(one.ravel(), later.ravel())[0, 1]) * np.sqrt(one.size) < limit


@pytest.mark.parametrize(
    "changes",
    [{}, {"noise": "laplace"}, {"noise": "staircase"}, {"noise": "joint-staircase"}, {"grid": 2.0**-20}],
    ids=str,
)
def test_all_engines_add_the_same_noise(changes):
    expected = noise_of("reference", steps=2, clients=2, **changes)
    assert np.abs(expected).max() > 1
    for engine in ("stacked", "functional", *([] if native_missing() else ["native"])):
        np.testing.assert_allclose(
            noise_of(engine, steps=2, clients=2, **changes), expected, rtol=1e-5, atol=1e-5
        )


def test_without_the_extension_the_noise_has_the_same_bits(monkeypatch):
    monkeypatch.setattr(layers, "compiled", lambda *_: None)  # products may differ in their last bits
    case = everything()
    work = works(case, poisson=True)
    for options in ({}, {"noise_on": "example"}, {"noise_on": "mean"}, {"grid": 2.0**-20}):
        what = plan(clip="layer", noise="gaussian", **options)
        expected = train(pool, case, work, what, engine="stacked")
        with monkeypatch.context() as patch:
            patch.setattr(noise, "_native", None)
            assert same_bits(expected, train(pool, case, work, what, engine="stacked", chunk=2))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 9000, 40000])
def test_many_normals_are_the_streams_of_the_definition(count, native, monkeypatch):
    if not native:
        monkeypatch.setattr(noise, "_native", None)
    keys = [bytes([k] * 16) for k in range(3)]
    streams, out = Normals(keys, count), np.empty((3, count), np.float32)
    factors = np.array([1.0, 0.3, 7.0], np.float32)
    for step in (0, 5, 2**31 + 1):
        streams.draw(step, factors, out)
        for key, factor, row in zip(keys, factors, out, strict=True):
            assert np.array_equal(row, noise.numpy_normals(key, step, count) * factor)


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in nets.model_names()), ("resnet18-gn", {"stem": "printed"})]
)
def test_every_built_in_model_gives_the_references_update(name, options):
    options = {"width": 16, **options} if name == "resnet18-gn" else {}
    shape, classes = ((3, 24, 1), None) if name in ("wind-cnn", "linear") else ((1, 28, 28), 10)
    case = build(lambda: nets.build(name, shape, classes, 0, **options), shape, classes, rows=6)
    loss = "statistics" if name == "adassp" else "squared" if classes is None else "cross-entropy"
    work, what = (
        works(case, clients=2, steps=1, batch=2),
        plan(steps=1, loss=loss, clip="layer", noise="gaussian"),
    )
    expected = train(pool, case, work, what, engine="reference")
    for engine in ("auto", "torch", "functional"):
        assert largest_difference(expected, train(pool, case, work, what, engine=engine)) < 1e-5, engine
