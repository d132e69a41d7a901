"""Augmentation: an example's copies are one gradient before the clip, the same in every engine, and the noise does not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import build, everything, everything_net, plan, train, works
from torch import nn

import fedveil as fv
from fedveil.errors import UserError
from fedveil.federation import loop
from fedveil.federation.config import make_config
from fedveil.federation.round import start
from fedveil.federation.view import view
from fedveil.training import pool, reference
from fedveil.training.augment import NONE, Augment, copies_of, parse
from fedveil.training.torch import functional, graph, stacked

MIXED = Augment(True, 2, 3)
ENGINES = [stacked, graph, functional]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(98, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.two(self.drop(x + torch.tanh(self.one(x))).flatten(1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip", ["flat", "layer", "none"])
@pytest.mark.parametrize("augment", [MIXED, Augment(True), Augment(crop=1, copies=2)], ids=["flip+crop", "one flip", "crop"])
def test_one_step_of_every_engine_is_the_references(engine, clip, augment):
    case = everything()
    what = plan(1, clip=clip, augment=augment, noise="none" if clip == "none" else "gaussian")
    work = works(case, 3, 1, poisson=True)
    found, wanted = (train(e, case, work, what) for e in (engine, reference))
    assert np.abs(found.delta - wanted.delta).max() < 1e-5 and np.abs(wanted.delta).max() > 1e-3
    assert np.allclose(found.norm_mean, wanted.norm_mean, atol=1e-5) and np.allclose(found.loss, wanted.loss, atol=1e-5)
    without = train(reference, case, work, replace(what, augment=NONE))
    assert np.abs(without.delta - wanted.delta).max() > 1e-4


@pytest.mark.parametrize("more", [{"bound_rule": "median"}, {"sensitivity": "l2-max"}, {"clip_norm": "l1"}])
@pytest.mark.parametrize("engine", ENGINES)
def test_rules_that_look_at_norms_see_those_of_the_mean(engine, more):
    case, what = everything(), plan(1, clip="flat", augment=MIXED, noise="gaussian", **more)
    work = works(case, 2, 1)
    assert np.abs(train(engine, case, work, what).delta - train(reference, case, work, what).delta).max() < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_adaclip_maps_the_mean(engine):
    case, what = everything(), plan(1, clip="flat", augment=MIXED, noise="gaussian")
    work = works(case, 2, 1, vectors=("shift", "scale"))
    assert np.abs(train(engine, case, work, what).delta - train(reference, case, work, what).delta).max() < 1e-5


def test_dropout_and_copies_agree_with_the_reference():
    case, what = build(Residual, (2, 7, 7), 3), plan(1, clip="flat", augment=MIXED)
    case.module.train()
    work = works(case, 2, 1)
    assert np.abs(train(graph, case, work, what).delta - train(reference, case, work, what).delta).max() < 1e-5


def test_a_large_batch_in_parts_is_the_same_as_one_by_one():
    """Places go on across passes: with more rows than a pass holds, each image still has its own draws."""
    case, what = build(everything_net, (2, 7, 7), 3, rows=60), plan(1, clip="flat", augment=MIXED, bounds=(0.01,))
    (work,) = works(case, 1, 1, batch=50)
    assert np.abs(train(stacked, case, [work], what).delta - train(reference, case, [work], what).delta).max() < 1e-5


@pytest.mark.parametrize("engine", [*ENGINES, reference])
@pytest.mark.parametrize("scale", [1e-3, 1e4, 1e15])
def test_an_example_adds_at_most_the_bound(engine, scale):
    """However large the inputs and however the copies differ: the norm of what one example adds, of every engine."""
    case = everything()
    hostile = replace(case, x=(case.x * scale).astype(np.float32))
    what = replace(plan(1, clip="flat", augment=Augment(True, 3, 5), learning_rate=1.0, expected_batch=1.0), only_sum=True)
    for work in works(case, 4, 1, batch=1):
        found = train(engine, hostile, [work], what)
        assert np.linalg.norm(found.delta[0].astype(np.float64)) <= what.bounds[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_neighbour_does_not_change_what_an_example_adds(engine):
    case = everything()
    what = replace(plan(1, clip="flat", augment=MIXED, learning_rate=1.0, expected_batch=1.0), only_sum=True)
    (work,) = works(case, 1, 1, batch=2)
    both = train(engine, case, [work], what).delta[0].astype(np.float64)
    first = train(engine, case, [replace(work, rows=work.rows[:, :1])], what).delta[0].astype(np.float64)
    assert np.linalg.norm(both - first) <= what.bounds[0] * (1 + 1e-6)


@pytest.mark.parametrize("engine", [*ENGINES, reference])
def test_the_noise_is_the_same_with_and_without(engine):
    case, work = everything(), works(everything(), 2, 1)
    drawn = []
    for augment in (NONE, MIXED):
        what = {"clip": "flat", "augment": augment}
        quiet = train(engine, case, work, plan(1, **what))
        noisy = train(engine, case, work, plan(1, **what, noise="gaussian", grid=2.0**-20))
        assert noisy.noise_scale.min() > 0
        drawn.append(noisy.delta - quiet.delta)
    assert np.abs(drawn[0]).max() > 1e-3 and np.abs(drawn[0] - drawn[1]).max() < 1e-6


def test_copies_are_moved_and_mirrored_images():
    image = torch.arange(1.0, 26.0).reshape(1, 1, 5, 5)
    keys = [bytes([k]) * 16 for k in range(40)]
    found = copies_of(Augment(True, 1, 4), image.repeat(40, 1, 1, 1), keys, 0, 0)
    wide = torch.nn.functional.pad(image[0], (1, 1, 1, 1))
    possible = [w[:, y : y + 5, x : x + 5] for y in range(3) for x in range(3) for w in (wide,)]
    possible += [p.flip(2) for p in possible]
    seen = {next(i for i, p in enumerate(possible) if torch.equal(one, p)) for one in found}
    assert found.shape == (160, 1, 5, 5) and len(seen) == 18


def test_draws_depend_on_key_step_and_place_alone():
    images = torch.randn(4, 2, 6, 6)
    one, other = bytes(16), bytes([1]) * 16
    together = copies_of(MIXED, images, [one, other], 3, 0)
    apart = torch.cat([copies_of(MIXED, images[i : i + 1], [[one, other][i // 2]], 3, i % 2) for i in range(4)])
    assert torch.equal(together, apart)
    assert not torch.equal(together, copies_of(MIXED, images, [one, other], 4, 0))


def test_native_hands_over_with_the_reason():
    name, told = pool.choose(everything().module, plan(1, augment=MIXED))
    assert name == "stacked" and ("no augmentation" in told or "not installed" in told)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"augment": "spin"}, "write flip"), ({"augment": "crop:0"}, "write flip"), ({"augment": "flip+flip"}, "write flip"),
     ({"augment": "crop:8"}, "out of sight"), ({"augment": "flip", "features": "standard"}, "one of the two"),
     ({"augment": "flip", "data": "cancer"}, "no images"), ({"augment": "flip", "augment_copies": 65}, "augment_copies")],
)  # fmt: skip
def test_wrong_settings_are_refused_with_what_to_write(settings, said):
    with pytest.raises(UserError, match=said):
        fv.run("fed-cdp-sound", **{"data": "digits", "rounds": 1, "local_steps": 1, "clients": 2, **settings})


def test_a_run_promises_the_same_and_repeats(tmp_path):
    quick = {"data": "digits", "rounds": 1, "local_steps": 2, "clients": 4, "report": False}
    plain = fv.run("fed-cdp-sound", out=tmp_path / "plain", **quick)
    first, again = (fv.run("fed-cdp-sound", augment="flip+crop:1", out=tmp_path / str(i), **quick) for i in range(2))
    assert first.epsilon() == plain.epsilon() is not None
    pairs = list(zip(first.state_dict().values(), again.state_dict().values(), plain.state_dict().values(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs) and any(not torch.equal(a, c) for a, _, c in pairs)
    with pytest.raises(UserError, match="augmented copies"):
        fv.attack(first, kind="gradient")


def test_an_observer_of_gradients_sees_the_mean_of_the_copies():
    values = {"dataset": "digits", "clients": 3, "rounds": 1, "local_steps": 1}
    seen = []
    for augment in ("flip+crop:1", ""):
        prepared = loop.prepare(make_config({"recipe": "non-private"}, {**values, "augment": augment}))
        seen.append(view(prepared.task, start(prepared.task, prepared.initial), "type2", 0, np.arange(3)).values)
    assert seen[0].shape == seen[1].shape and np.abs(seen[0] - seen[1]).max() > 1e-4


def test_text_is_read():
    assert parse("flip+crop:4", 8) == Augment(True, 4, 8) and parse("", 8) == NONE
