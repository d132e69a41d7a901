import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

import fedveil.attacks.leakage.measure as measure_module
import fedveil.attacks.leakage.search as search_module
from fedveil.attacks.leakage.measure import measure, victims_of
from fedveil.attacks.leakage.objective import predictor
from fedveil.errors import UserError
from fedveil.federation.config import make_config
from fedveil.federation.loop import prepare
from fedveil.federation.round import start


def prepared(recipe="non-private", protect=None, **changes):
    values = {
        "recipe": recipe, "dataset": "digits", "model": "cpl-lenet", "clients": 8, "partition": "iid", "local_steps": 1,
        "batch_size": 2, "protect": protect or {}, "learning_rate": 0.1,
    }  # fmt: skip
    made = prepare(make_config({**values, **changes}))
    return made, start(made.task, made.initial)


def naive(made, x, y):
    module = made.task.module
    module.zero_grad()
    cross_entropy(module(torch.as_tensor(x)), torch.as_tensor(y)).backward()
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])


def test_type2_victims_belong_to_their_gradients():
    made, state = prepared()
    found = victims_of(made, state, "type2", 5, seed=1)
    assert found.images.shape == (5, 1, 1, 8, 8)
    for v in range(5):
        torch.testing.assert_close(
            found.leak.values[v], naive(made, found.images[v], found.labels[v]), rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("method", ["cpl", "veil"])
def test_an_error_without_clamping_is_that_of_the_images_as_the_search_left_them(monkeypatch, method):
    left = []
    real = search_module._best_of
    monkeypatch.setattr(search_module, "_best_of", lambda *a, **k: left.append(real(*a, **k)) or left[-1])
    made, state = prepared("fed-cdp-example", {"sigma": 6.0})
    outcome = measure(made, state, method=method, victims=5, seed=1, iterations=20)
    [(images, *_)] = left
    own = np.median([np.sqrt(((outcome.truth[v] - images[v].numpy()) ** 2).mean()) for v in range(5)])
    assert outcome.figures["rmse_unclamped"] == pytest.approx(own, rel=1e-6)
    assert outcome.guess.min() >= 0 and outcome.guess.max() <= 1
    if method == "cpl":  # the other keeps its pixels in their box by itself
        assert own > 1 > outcome.figures["rmse"]


def test_an_update_of_one_step_is_the_batch_gradient():
    made, state = prepared()
    found = victims_of(made, state, "type0", 3, seed=1)
    gradient = found.leak.as_gradient().values
    for v in range(3):
        torch.testing.assert_close(
            gradient[v], naive(made, found.images[v], found.labels[v]), rtol=1e-2, atol=1e-4
        )


def test_what_the_recipe_did_is_public_knowledge_of_the_leak():
    made, state = prepared("fed-cdp-example", {"sigma": 2.0})
    leak = victims_of(made, state, "type2", 4, seed=1).leak
    assert (leak.clip, leak.bound, leak.clip_on, leak.layer_noise[0]) == ("layer", 4.0, "example", pytest.approx(8.0))
    made, state = prepared("fed-sdp")
    leak = victims_of(made, state, "type0-sanitised", 2, seed=1).leak
    assert (leak.kind, leak.clip, leak.clip_on, leak.layer_noise[0]) == ("update", "layer", "whole", 24.0)
    made, state = prepared("gradient-pruning", {"prune": 0.5})
    leak = victims_of(made, state, "type0", 2, seed=1).leak
    assert leak.clip_norm == "l2"
    assert leak.pruned and float((leak.values == 0).float().mean()) == pytest.approx(0.5, abs=0.01)


def test_the_noise_scale_said_is_the_noise_scale_seen():
    """Standard deviation over 10,000 coordinates: within 5% (7 sigma)."""
    made, state = prepared("fed-cdp-example", {"sigma": 100.0})
    found = victims_of(made, state, "type2", 2, seed=1)
    assert float(found.leak.values.std()) == pytest.approx(found.leak.layer_noise[0], rel=0.05)


def later_adaclip(**changes):
    """A run of AdaClip whose statistics have moved, hardly noised."""
    made, state = prepared("adaclip", {"sigma": 1e-7}, **changes)
    size = made.task.layout.size
    moved = replace(
        state.clip,
        mean=np.linspace(-0.01, 0.02, size, dtype=np.float32),
        square=np.linspace(0.5, 2.0, size, dtype=np.float32) / size,
    )
    return made, replace(state, clip=moved)


def test_adaclip_is_attacked_in_its_own_space():
    for made, state in (prepared("adaclip"), later_adaclip()):
        assert measure(made, state, victims=3, seed=1).figures["success_rate"] == 1.0


def test_an_update_of_adaclip_is_taken_back_to_its_own_space():
    """Its clip scales gradients: whoever compares unclipped ones sees protection where there is none."""
    made, state = later_adaclip()
    found = victims_of(made, state, "type0", 3, seed=1)
    predict = predictor(made.task.module, torch.as_tensor(state.weights), found.leak)
    soft = one_hot(torch.as_tensor(found.labels), 10).float()
    expected = found.leak.as_gradient().values
    torch.testing.assert_close(predict(torch.as_tensor(found.images), soft), expected, rtol=1e-2, atol=1e-4)
    made, state = later_adaclip(batch_size=1)
    assert measure(made, state, tap="type0", victims=3, seed=1).figures["success_rate"] == 1.0


@pytest.mark.parametrize("recipe", ["udp-fl-gaussian", "udp-fl-laplace", "udp-fl-staircase-joint"])
def test_a_clip_in_either_norm_hides_nothing_where_the_sum_is_noised(recipe):
    made, state = prepared(recipe)
    assert made.task.recipe.noise_on.name == "sum"
    outcome = measure(made, state, victims=4, seed=1)
    assert outcome.figures["success_rate"] == 1.0 and outcome.figures["label_accuracy"] == 1.0


@pytest.mark.parametrize("recipe", ["quantile-clip", "adaclip"])
def test_hardly_noised_uploads_give_the_image_back(recipe):
    """Every victim of this fixed seed; the noise is 60,000 times weaker than usual."""
    made, state = prepared(recipe, {"sigma": 1e-4}, batch_size=1)
    assert measure(made, state, tap="type0", victims=4, seed=1).figures["success_rate"] == 1.0


def test_mild_pruning_does_not_stop_the_attack():
    made, state = prepared("gradient-pruning", {"prune": 0.3}, batch_size=1)
    assert measure(made, state, tap="type0", victims=3, seed=1).figures["success_rate"] == 1.0


def test_an_update_of_several_steps_says_how_it_was_treated():
    made, state = prepared(local_steps=2, batch_size=1, learning_rate=0.01)
    plain = measure(made, state, tap="type0", victims=1, seed=1, iterations=60).figures
    assert (plain["update_as"], plain["local_steps"], plain["batch"]) == ("gradient", 2, 2)
    unrolled = measure(made, state, tap="type0", victims=1, seed=1, iterations=80, update_as="unroll").figures
    assert unrolled["update_as"] == "unroll" and unrolled["mse"] < plain["mse"]


def test_fewer_images_than_the_local_steps_used_are_never_all_of_them():
    made, state = prepared(local_steps=2, learning_rate=0.01)
    figures = measure(made, state, tap="type0", victims=2, seed=1, iterations=24).figures
    assert figures["batch"] == 4 and figures["iterations"] == figures["iteration_budget"] == 24
    assert np.isfinite(figures["rmse"])


def test_the_oracle_is_labelled_and_never_worse():
    made, state = prepared("fed-cdp-example", {"sigma": 0.05})
    honest = measure(made, state, victims=2, seed=1, iterations=24).figures
    oracle = measure(made, state, victims=2, seed=1, iterations=24, oracle=True).figures
    assert "oracle" in oracle["chosen_by"] and honest["chosen_by"] == "matching loss"
    assert oracle["mse"] <= honest["mse"] + 1e-9


def broken_leaks(monkeypatch, victims):
    real = measure_module.victims_of

    def poisoned(*arguments):
        found = real(*arguments)
        found.leak.values[victims] = float("nan")
        return found

    monkeypatch.setattr(measure_module, "victims_of", poisoned)


def test_an_attack_that_failed_everywhere_says_nothing_about_the_defence(monkeypatch):
    made, state = prepared()
    broken_leaks(monkeypatch, slice(None))
    figures = measure(made, state, victims=2, seed=1, iterations=5).figures
    assert figures["failed_numerically"] == figures["victims"] == 2
    for name in ("success_rate", "rmse", "ssim", "label_accuracy", "iterations", "matching_loss"):
        assert figures[name] is None


@pytest.mark.parametrize("tap", ["type2", "type0"])
def test_victims_that_failed_numerically_count_neither_for_nor_against_the_defence(monkeypatch, tap):
    made, state = prepared(batch_size=1)
    whole = measure(made, state, tap=tap, victims=4, seed=1).figures
    broken_leaks(monkeypatch, [0, 1, 3])
    figures = measure(made, state, tap=tap, victims=4, seed=1).figures
    assert figures["failed_numerically"] == 3 and whole["failed_numerically"] == 0
    assert figures["success_rate"] == figures["label_accuracy"] == 1.0
    assert figures["rmse"] < 0.05 and figures["iterations"] < figures["iteration_budget"]


def test_a_finished_job_is_not_run_again(tmp_path):
    ran = []

    def run(job):
        ran.append(job)
        return {"value": job}

    path = tmp_path / "table.jsonl"
    measure_module.table(path, [("a", 1)], run)
    rows = measure_module.table(path, [("a", 1), ("b", 2)], run)
    assert ran == [1, 2] and [r["value"] for r in rows] == [1, 2]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2


def outcome(recipe, pictures=(10,)):
    image = np.full((3, 2, 1, 8, 8), len(recipe) / 20, np.float32)
    figures = {"recipe": recipe, "round": 0}
    return measure_module.Outcome(figures, image, image / 2, {k: image / 4 for k in pictures})


def test_what_the_gallery_needs_comes_back_from_the_disk(tmp_path):
    before = outcome("fed-cdp", (10, 100))
    measure_module.keep(before, tmp_path / "pictures" / "a.npz", show=2)
    after = measure_module.kept(tmp_path / "pictures" / "a.npz", before.figures)
    np.testing.assert_array_equal(after.truth, before.truth[:2, :1])
    np.testing.assert_array_equal(after.guess, before.guess[:2, :1])
    np.testing.assert_array_equal(after.pictures[100], before.pictures[100][:2, :1])
    assert list(after.pictures) == [10, 100]


def test_more_updates_than_clients_is_a_clear_error():
    made, state = prepared()
    with pytest.raises(UserError, match="one client each"):
        victims_of(made, state, "type0", 9, seed=0)


def test_the_last_model_is_attacked_with_the_last_round(tmp_path):
    made, state = prepared(rounds=2)
    late = replace(state, round=2)
    figures = measure(made, late, victims=2, seed=0, iterations=10).figures
    assert figures["round"] == 2 and np.isfinite(figures["rmse"])


def test_tables_are_attacked_too():
    """One row of numbers behind a dense net: solved exactly, judged by its error alone."""
    made, state = prepared(dataset="cancer", model="papers-mlp")
    figures = measure(made, state, victims=3, seed=1).figures
    assert np.isnan(figures["ssim"]) and figures["mse"] < figures["controls"]["mean"]["mse"]
