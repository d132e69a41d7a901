"""Runs whose sum is opened under masks: same recipe, same sum, promises from the honest shares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.federation import loop, sums
from fedveil.federation.config import make_config
from fedveil.federation.round import Upload, merge, moment_of, noised_of, start
from fedveil.federation.view import view
from fedveil.keys import derive
from fedveil.secure_sum import noise

BASE = {
    "recipe": "sum-cdp", "dataset": "cancer", "clients": 6, "partition": "iid", "rounds": 2, "local_steps": 1,
    "batch_size": 100, "learning_rate": 0.5, "protect": {"sampling": "full", "cohort": "all", "sigma": 4.0},
}  # fmt: skip


def _config(**changes):
    return make_config(BASE, {"secure_sum": True, "report": False, **changes})


def test_a_run_under_masks_ends_with_sound_rows_for_the_server_with_its_colluders(tmp_path):
    loop.run(_config(sum_threshold=5, sum_colluders=2), tmp_path / "run")
    written = (tmp_path / "run" / "ledger.jsonl").read_text()
    assert "the server with up to 2 nodes" in written and "noise of 3 honest nodes" in written
    prepared = loop.prepare(_config(sum_threshold=5, sum_colluders=2))
    now = moment_of(prepared.task, start(prepared.task, prepared.initial))
    claims = [c for _, group in loop.release_of(prepared, now, np.arange(6)).groups for c in group]
    rows = {c.observer: c.verdict for c in claims if c.unit == "example"}
    assert rows == {"server": "sound", "participants": "sound", "public": "sound", "client-process": "none"}


def test_the_promise_is_that_of_central_noise_and_rounding_is_paid_for_with_noise():
    masked, plain = loop.prepare(_config()), loop.prepare(_config(secure_sum=False))
    found = []
    for prepared in (masked, plain):
        now = moment_of(prepared.task, start(prepared.task, prepared.initial))
        release = loop.release_of(prepared, now, np.arange(6))
        found.append(next(c for c in release.groups[0][1] if c.observer == "server" and c.unit == "example"))
    ratio = found[0].event.noise.multiplier / found[1].event.noise.multiplier
    assert 1 - 1e-5 < ratio < 1 + 1e-9
    (noised,) = noised_of(masked.task, now, -1, masked.task.setting.examples)
    assert noised.scale < sums.parameters_of(masked.task, noised, bytes(32)).deviation < 1.01 * noised.scale
    assert found[0].event.sampling == found[1].event.sampling


def test_with_the_noise_of_the_middle_in_one_share_the_next_model_is_the_same_bit_for_bit(monkeypatch):
    """Updates on the grid, so that rounding parts and rounding the total agree; the noise is injected here."""
    config = _config(protect={**BASE["protect"], "grid": 2.0**-12, "clip.bound": 1.0})
    masked = loop.prepare(config).task
    plain = replace(masked, secure=None)
    state = start(masked, loop.prepare(config).initial)
    now = moment_of(masked, state)
    (noised,) = noised_of(masked, now, -1, masked.setting.examples)
    draw = np.random.default_rng(1)
    uploads = [
        Upload(c, (draw.integers(-4000, 4000, masked.layout.size) * noised.grid).astype(np.float32))
        for c in range(6)
    ]
    key = derive(plain.root, "server-noise", now.number)[:16]
    units = np.rint(noised.add(np.zeros(masked.layout.size), key) / noised.grid).astype(np.int64)
    first = sums.share_key(masked, now, 0)
    monkeypatch.setattr(noise, "share", lambda p, key: units if key == first else np.zeros_like(units))
    one, facts = merge(masked, state, now, uploads)
    other, _ = merge(plain, state, now, uploads)
    assert np.array_equal(one.weights, other.weights) and not np.array_equal(one.weights, state.weights)
    assert facts["sum_survivors"] == 6
    assert facts["bytes_up"] > 6 * 4 * masked.layout.size


def test_what_has_no_secure_sum_is_refused_with_the_reason():
    for changes, reason in (
        ({"recipe": "fed-cdp"}, "where = sum"),
        ({"cohort_size": 3}, "everyone on the roster"),
    ):
        with pytest.raises(UserError, match=reason):
            make_config({**BASE, "secure_sum": True}, changes)
    with pytest.raises(UserError, match="both be signed"):
        prepared = loop.prepare(_config(sum_threshold=3))
        now = moment_of(prepared.task, start(prepared.task, prepared.initial))
        loop.release_of(prepared, now, np.arange(6))


def test_the_server_of_a_run_under_masks_sees_words_that_say_nothing_about_the_upload():
    """Correlation over P weights: below 5 / sqrt(P) but for a chance of 6e-7; without masks and with next to no
    noise it is near 1."""
    prepared = loop.prepare(_config())
    state = start(prepared.task, prepared.initial)
    seen = view(prepared.task, state, "type0", 2).values[0]
    update = view(prepared.task, state, "type1", 2).values[0]
    assert abs(np.corrcoef(seen, update)[0, 1]) < 5 / np.sqrt(update.size)
    plain = loop.prepare(_config(secure_sum=False, protect={"sampling": "full", "cohort": "all", "sigma": 1e-3})).task
    assert np.corrcoef(view(plain, state, "type0", 2).values[0], update)[0, 1] > 0.99


def test_the_promise_is_about_the_grid_that_is_played():
    """With many examples words have no room for the recipe's grid: the coarser one is played, and counted."""
    prepared = loop.prepare(_config(dataset="digits"))
    task = prepared.task
    now = moment_of(task, start(task, prepared.initial))
    (shared,) = noised_of(task, now, -1, task.setting.examples)
    played = sums.parameters_of(task, shared, bytes(32))
    assert played.grid > shared.grid
    ((_, said),) = loop.release_of(prepared, now, np.arange(1)).groups
    (claim,) = [c for c in said if (c.observer, c.unit, c.verdict) == ("server", "example", "sound")]
    (own,) = task.recipe.place.noised(task.recipe, task.setting, now, prepared.partition.size(0))
    assert claim.event.noise.multiplier == noise.multiplier(replace(played, bound=own.bound))
    assert f"grid of {played.grid:g}" in claim.reason
