from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from fedveil.attacks import metrics
from fedveil.attacks.leakage.objective import Leak, fast_matcher, infer_labels, predictor
from fedveil.attacks.leakage.search import METHODS, RETRIES, _Problem, attack
from fedveil.data.datasets import load
from fedveil.errors import UserError
from fedveil.models.layout import flatten, layout_of, unflatten


def small_net(classes=10):
    """A sigmoid net for 8x8 digits with the papers' weight scale."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(512, classes),
    )  # fmt: skip
    for p in net.parameters():
        nn.init.uniform_(p, -0.5, 0.5)
    return net


@pytest.fixture(scope="module")
def setting():
    data, net = load("digits"), small_net()
    return net, torch.as_tensor(flatten(net)), torch.as_tensor(data.x), torch.as_tensor(data.y)


def naive_gradient(net, x, y):
    net.zero_grad()
    cross_entropy(net(x), y).backward()
    return torch.cat([p.grad.reshape(-1) for p in net.parameters()]).clone()


def leaked(net, x, y, batch=1, **more):
    values = torch.stack(
        [naive_gradient(net, x[i : i + batch], y[i : i + batch]) for i in range(0, len(x), batch)]
    )
    return Leak(values, layout_of(net), batch=batch, **more)


def test_prediction_is_the_gradient_that_autograd_gives(setting):
    net, w, x, y = setting
    predict = predictor(net, w, Leak(torch.zeros(1, w.numel()), layout_of(net), batch=3))
    made = predict(x[:6].view(2, 3, *x.shape[1:]), one_hot(y[:6], 10).float().view(2, 3, 10))
    torch.testing.assert_close(made[0], naive_gradient(net, x[:3], y[:3]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made[1], naive_gradient(net, x[3:6], y[3:6]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip", ["layer", "flat"])
@pytest.mark.parametrize("clip_on", ["example", "whole"])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_aware_prediction_clips_as_the_recipe_does(setting, clip, clip_on, norm):
    net, w, x, y = setting
    layout, bound = layout_of(net), 0.5
    leak = Leak(
        torch.zeros(1, w.numel()), layout, batch=2, clip=clip, bound=bound, clip_norm=norm, clip_on=clip_on
    )
    made = predictor(net, w, leak)(x[None, :2], one_hot(y[None, :2], 10).float())[0]
    parts = layout.layer_slices() if clip == "layer" else (slice(None),)

    def clipped(g):
        g = g.clone()
        for part in parts:
            g[part] *= min(1.0, bound / float(g[part].norm(p=int(norm[1]))))
        return g

    each = [naive_gradient(net, x[i : i + 1], y[i : i + 1]) for i in range(2)]
    expected = sum(map(clipped, each)) / 2 if clip_on == "example" else clipped(sum(each) / 2)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-6)


def test_the_compiled_loss_is_not_used_where_it_does_not_know_the_clip(setting):
    net, w, _, _ = setting
    leak = Leak(torch.zeros(1, w.numel()), layout_of(net), clip="flat", bound=1.0, clip_norm="l1")
    assert fast_matcher(net, w, leak, (1, 8, 8), aware=True) is None


@pytest.mark.parametrize("mapped", [False, True])
def test_unrolled_prediction_follows_the_local_steps(setting, mapped):
    net, w, x, y = setting
    at, rate = w.clone(), 0.1
    shift, scale = torch.full_like(w, 0.01), torch.linspace(0.5, 2.0, w.numel())
    for step in range(3):
        vector = at.clone().requires_grad_()
        rows = slice(2 * step, 2 * step + 2)
        out = torch.func.functional_call(net, unflatten(vector, layout_of(net)), (x[rows],))
        at = at - rate * torch.autograd.grad(cross_entropy(out, y[rows]), vector)[0]
    leak = Leak((at - w)[None], layout_of(net), kind="update", batch=2, steps=3, learning_rate=rate)
    if mapped:
        leak = replace(leak, values=(leak.values + 3 * rate * shift) / scale, shift=shift, scale=scale)
    made = predictor(net, w, leak, unroll=True)(x[None, :6], one_hot(y[None, :6], 10).float())
    torch.testing.assert_close(made, leak.as_gradient().values, rtol=1e-3, atol=1e-5)


def test_labels_of_single_examples_are_read_off(setting):
    net, w, x, y = setting
    labels = infer_labels(net, w, leaked(net, x[:20], y[:20]), torch.rand(4, 1, 8, 8), 1, 10)
    np.testing.assert_array_equal(labels[:, 0], y[:20])


def test_labels_of_batches_are_counted(setting):
    net, w, x, y = setting
    leak = leaked(net, x[:48], y[:48], batch=8)
    found = infer_labels(net, w, leak, x[1000:1008], 8, 10)
    assert metrics.label_accuracy(y[:48].view(6, 8).numpy(), found.numpy()) >= 0.9


@pytest.mark.parametrize("method", ["cpl", "idlg", "veil"])
def test_unprotected_gradients_give_the_image_back(setting, method):
    net, w, x, y = setting
    found = attack(method, net, w, leaked(net, x[:8], y[:8]), shape=(1, 8, 8), classes=10, seed=3)
    scores = metrics.score(x[:8].numpy(), found.images[:, 0].numpy())
    assert scores.success().mean() == 1.0
    assert found.iterations.max() <= 300 and not found.failed.any()


def test_dlg_finds_the_label_together_with_the_image(setting):
    net, w, x, y = setting
    found = attack("dlg", net, w, leaked(net, x[:8], y[:8]), shape=(1, 8, 8), classes=10, seed=3)
    good = metrics.score(x[:8].numpy(), found.images[:, 0].numpy()).success()
    assert good.mean() >= 0.5
    np.testing.assert_array_equal(found.labels[:, 0].numpy()[good], y[:8].numpy()[good])


def test_gradinv_stays_in_the_pixel_range_and_comes_near(setting):
    net, w, x, y = setting
    found = attack(
        "gradinv", net, w, leaked(net, x[:4], y[:4]), shape=(1, 8, 8), classes=10, seed=3, iterations=400
    )
    assert found.images.min() >= 0 and found.images.max() <= 1
    assert metrics.mse(x[:4].numpy(), found.images[:, 0].numpy()).mean() < 0.05


def test_a_batch_gradient_gives_several_images_back(setting):
    net, w, x, y = setting
    rows = [int(torch.nonzero(y == c)[0]) for c in range(3)]
    leak = leaked(net, x[rows], y[rows], batch=3)
    found = attack("veil", net, w, leak, shape=(1, 8, 8), classes=10, seed=3, iterations=600)
    order = metrics.match(x[rows].numpy(), found.images[0].numpy())
    assert metrics.mse(x[rows].numpy(), found.images[0].numpy()[order]).max() < 0.02


def test_clipping_alone_protects_nothing_against_an_aware_attacker(setting):
    net, w, x, y = setting
    layout = layout_of(net)
    leak = leaked(net, x[:4], y[:4], clip="layer", bound=0.1)
    for part in layout.layer_slices():
        leak.values[:, part] *= (0.1 / leak.values[:, part].norm(dim=1, keepdim=True)).clamp(max=1)
    found = attack("veil", net, w, leak, shape=(1, 8, 8), classes=10, seed=3)
    assert metrics.score(x[:4].numpy(), found.images[:, 0].numpy()).success().mean() >= 0.75


def test_strong_noise_stops_the_attack(setting):
    net, w, x, y = setting
    leak = leaked(net, x[:4], y[:4], noise=24.0)
    noise = torch.randn(leak.values.shape, generator=torch.Generator().manual_seed(0))
    leak = Leak(leak.values + 24.0 * noise, leak.layout, noise=24.0)
    found = attack("veil", net, w, leak, shape=(1, 8, 8), classes=10, seed=3, iterations=60)
    assert metrics.score(x[:4].numpy(), found.images[:, 0].numpy()).success().sum() == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_leak_that_is_not_finite_is_a_failed_attack_for_that_victim_only(setting, method):
    net, w, x, y = setting
    leak = leaked(net, x[:3], y[:3])
    leak.values[1, 5] = float("nan")
    found = attack(method, net, w, leak, shape=(1, 8, 8), classes=10, seed=3, iterations=6)
    assert found.failed.tolist() == [False, True, False]
    assert torch.isfinite(found.images).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_leak_of_zeros_is_a_victim_that_was_not_rebuilt_and_no_failure(setting, method):
    net, w, x, y = setting
    leak = leaked(net, x[:2], y[:2])
    leak.values[1] = 0
    found = attack(method, net, w, leak, shape=(1, 8, 8), classes=10, seed=3, iterations=20)
    assert not found.failed.any() and torch.isfinite(found.images).all()


def poison(monkeypatch, bad):
    """Victim 1's matching loss is NaN where bad(how many objectives were made, evaluations of this one) says so."""
    made, real = [], _Problem.objective

    def objective(self, distance, form):
        evaluate, number, calls = real(self, distance, form), len(made), []
        made.append(form)

        def wrapped(points, rows):
            value, gradient = evaluate(points, rows)
            calls.append(1)
            if bad(number, len(calls)):
                value = torch.where(rows == 1, float("nan"), value)
            return value, gradient

        wrapped.images_of = evaluate.images_of
        return wrapped

    monkeypatch.setattr(_Problem, "objective", objective)
    return made


def three_attacked(setting, method, **more):
    net, w, x, y = setting
    leak = leaked(net, x[:3], y[:3])
    return attack(method, net, w, leak, shape=(1, 8, 8), classes=10, seed=3, iterations=8, **more)


OBJECTIVES = {"dlg": 1, "idlg": 1, "cpl": 1, "gradinv": 1, "veil": 3}  # of all regular tries together


@pytest.mark.parametrize("method", METHODS)
def test_a_try_without_a_finite_loss_starts_again_and_no_other_victim_notices(setting, method, monkeypatch):
    plain = three_attacked(setting, method)
    made = poison(monkeypatch, lambda number, _: number < OBJECTIVES[method])
    found = three_attacked(setting, method)
    assert not found.failed.any() and len(made) > OBJECTIVES[method]
    assert not torch.equal(found.images[1], plain.images[1])
    torch.testing.assert_close(found.images[[0, 2]], plain.images[[0, 2]], rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_new_starts_after_non_finite_values_are_limited(setting, method, monkeypatch):
    made = poison(monkeypatch, lambda *_: True)
    assert three_attacked(setting, method).failed.tolist() == [False, True, False]
    each = 2 if method == "veil" else 1
    assert len(made) == OBJECTIVES[method] + RETRIES * each


def test_adam_that_broke_down_on_its_way_starts_again_and_keeps_the_better(setting, monkeypatch):
    made = poison(monkeypatch, lambda number, calls: number == 0 and calls > 4)
    found = three_attacked(setting, "gradinv")
    assert len(made) == 2 and not found.failed.any()
    assert found.iterations.tolist() == [8, 4 + 8, 8]


def test_a_leak_that_is_not_finite_is_not_tried_again(setting, monkeypatch):
    net, w, x, y = setting
    made = poison(monkeypatch, lambda *_: False)
    leak = leaked(net, x[:2], y[:2])
    leak.values[1, 5] = float("nan")
    attack("cpl", net, w, leak, shape=(1, 8, 8), classes=10, seed=3, iterations=4)
    assert len(made) == 1


def test_same_seed_same_pictures(setting):
    net, w, x, y = setting
    leak = leaked(net, x[:2], y[:2])
    first, second = (
        attack("veil", net, w, leak, shape=(1, 8, 8), classes=10, seed=9, iterations=20) for _ in range(2)
    )
    torch.testing.assert_close(first.images, second.images, rtol=0, atol=0)


def test_the_choice_never_looks_at_the_truth(setting):
    """watch is for measuring: with or without it the result is the same."""
    net, w, x, y = setting
    leak, seen = leaked(net, x[:2], y[:2]), []
    plain = attack("cpl", net, w, leak, shape=(1, 8, 8), classes=10, seed=9, iterations=20)
    watched = attack("cpl", net, w, leak, shape=(1, 8, 8), classes=10, seed=9, iterations=20,
                     watch=lambda rows, images, iteration: seen.append(int(iteration.max())))  # fmt: skip
    torch.testing.assert_close(plain.images, watched.images, rtol=0, atol=0)
    assert max(seen) >= 10


def test_unknown_method_is_a_clear_error(setting):
    net, w, x, y = setting
    with pytest.raises(UserError, match="Did you mean 'veil'"):
        attack("viel", net, w, leaked(net, x[:1], y[:1]), shape=(1, 8, 8), classes=10, seed=0)
