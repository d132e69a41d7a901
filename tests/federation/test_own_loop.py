"""`make_private`: a loop of the user's own has the noise it claims, the clip it claims, and no way around the ledger."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fedveil as fv
from fedveil.attacks.audit.loop import audit_loop
from fedveil.errors import UserError
from fedveil.federation.own_rows import Rows
from fedveil.federation.practice import compared
from fedveil.privacy.ledger import Ledger
from fedveil.protect import bounded
from fedveil.training import pool

ROWS, COLUMNS, CLASSES = 40, 30, 4
CLIPS = {"flat": {}, "layer": {"clip_kind": "layer"}, "mean": {"noise_on": "mean"}}


def own_loss(module, batch):
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def data(rows=ROWS, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(rows, COLUMNS, generator=draw), torch.randint(0, CLASSES, (rows,), generator=draw)
    )


def made(tmp_path, *, batch=ROWS, rows=ROWS, steps=1000, name="a", **more):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(COLUMNS, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(data(rows), batch_size=batch)
    settings = {"sigma": 2.0, "clip_bound": 0.5, "steps": steps, "out": tmp_path / name, **more}
    return fv.make_private(module, optimizer, loader, **settings)


def gradient(private):
    return np.concatenate([p.grad.numpy().reshape(-1) for p in private.module.parameters()]).astype(np.float64)


@pytest.mark.parametrize("loss", ["cross-entropy", own_loss], ids=["engine", "one-by-one"])
@pytest.mark.parametrize("case", list(CLIPS))
def test_the_noise_that_is_added_is_the_noise_that_is_claimed(case, loss, tmp_path):
    """All rows in every step and no move of the weights: two steps differ by their noise alone."""
    private = made(tmp_path, loss=loss, sampling="full", **CLIPS[case])
    pieces = []
    for _ in range(12):
        pair = []
        for _ in range(2):
            (batch,) = private.loader
            private.backward(*batch)
            pair.append(gradient(private) * ROWS)
            private._used()  # as after a step that moved nothing
        pieces.append((pair[0] - pair[1]) / np.sqrt(2))
    found = compared(private.noised().deviation, np.concatenate(pieces))
    assert found, found


def test_engine_and_one_by_one_clip_alike(tmp_path):
    one, other = made(tmp_path, name="a", sampling="full"), made(tmp_path, name="b", sampling="full", loss=own_loss)
    sums = []
    for private in (one, other):
        (batch,) = private.loader
        sums.append(private._clipped(Rows(ROWS, batch), private._now())[0])
    np.testing.assert_allclose(sums[0], sums[1], atol=1e-5)
    assert np.linalg.norm(sums[0]) > 1  # something was summed


def test_one_example_moves_the_sum_by_no_more_than_the_bound(tmp_path):
    private = made(tmp_path, sampling="full", loss=own_loss)
    (batch,) = private.loader
    whole = private._clipped(Rows(ROWS, batch), private._now())[0]
    loud = [batch[0].clone(), batch[1].clone()]
    loud[0][3] *= 1e6
    moved = private._clipped(Rows(ROWS, tuple(loud)), private._now())[0]
    assert 0 < np.linalg.norm(moved - whole) <= 2 * 0.5 * (1 + 1e-9)
    loud[0][3] = float("nan")
    left_out = private._clipped(Rows(ROWS, tuple(loud)), private._now())[0]
    assert np.linalg.norm(left_out - whole) <= 0.5 * (1 + 1e-9)


def test_the_optimiser_takes_no_gradients_but_ours(tmp_path):
    private = made(tmp_path, batch=10)
    optimizer, module = private.optimizer, private.module
    batches = iter(private.loader)
    x, y = next(batches)
    nn.functional.cross_entropy(module(torch.randn(3, COLUMNS)), torch.tensor([0, 1, 2])).backward()
    with pytest.raises(UserError, match="without noised gradients"):
        optimizer.step()
    private.backward(x, y)
    nn.functional.cross_entropy(module(x.new_zeros(1, COLUMNS)), y.new_zeros(1)).backward()  # adds to .grad
    with pytest.raises(UserError, match=r"changes \.grad"):
        optimizer.step()
    with pytest.raises(UserError, match="closure"):
        optimizer.step(lambda: torch.tensor(0.0))


class Remembering(nn.Module):
    """A net that only the graph engine takes."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(COLUMNS, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.cell(x[:, None])[0][:, -1])


@pytest.mark.parametrize("loss", ["cross-entropy", "squared"])
def test_sums_come_from_an_engine_whose_bound_is_proven_or_the_row_says_so(loss, tmp_path, monkeypatch):
    """An engine without a proof was used here while the ledger spoke of a proven one."""
    monkeypatch.setattr(bounded, "COVERED", tuple(e for e in bounded.COVERED if e != "graph"))
    used = []
    real = pool.train
    monkeypatch.setattr(pool, "train", lambda module, *a, **k: used.append(module) or real(module, *a, **k))
    module = Remembering()
    rows = data() if loss == "cross-entropy" else TensorDataset(data().tensors[0], torch.randn(ROWS, CLASSES))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = fv.make_private(module, optimizer, DataLoader(rows, batch_size=10), loss=loss, sigma=2.0, steps=5, out=tmp_path)
    batch = next(iter(private.loader))
    assert np.isfinite(private.backward(*batch)) and not used
    assert private.epsilon("public") > 0


def test_without_a_planned_end_nothing_sound_is_said(tmp_path):
    """Who ends when the weights look right has chosen among many releases: only a plan made before covers that."""
    private = made(tmp_path, batch=10, steps=None)
    private.backward(*next(iter(private.loader)))
    assert private.epsilon("public") is None
    told = {row.verdict: row for row in private.ledger if (row.observer, row.unit) == ("public", "example")}
    assert "no plan was committed" in told["none"].reason and told["nominal"].epsilon > 0


def test_a_step_is_used_once_and_batches_come_from_the_loader(tmp_path):
    private = made(tmp_path, batch=10)
    batches = iter(private.loader)
    x, y = next(batches)
    with pytest.raises(UserError, match="comes from elsewhere"):
        private.backward(x.clone(), y)
    x, y = next(batches)
    x += 1
    with pytest.raises(UserError, match="comes from elsewhere"):
        private.backward(x, y)
    x, y = next(batches)
    private.backward(x, y)
    with pytest.raises(UserError, match="each one once"):
        private.backward(x, y)
    private.optimizer.step()
    with pytest.raises(UserError, match="without noised gradients"):
        private.optimizer.step()


def test_nothing_is_shown_before_it_is_charged(tmp_path, monkeypatch):
    private = made(tmp_path, batch=10)
    batch = next(iter(private.loader))

    def broken(*_args, **_more):
        raise OSError("disk full")

    monkeypatch.setattr(Ledger, "spend", broken)
    with pytest.raises(OSError, match="disk full"):
        private.backward(*batch)
    assert all(p.grad is None for p in private.module.parameters())


def test_the_loop_stops_at_its_budget_and_continues_with_its_ledger(tmp_path):
    private = made(tmp_path, batch=10, steps=6, epsilon=3.0)
    batches = iter(private.loader)
    for _ in range(3):
        private.backward(*next(batches))
        private.optimizer.step()
    state, spent = private.state_dict(), private.epsilon()
    private.backward(*next(batches))
    private.optimizer.step()
    private.close()
    again = made(tmp_path, batch=10, steps=6, epsilon=3.0, resume=True)
    again.load_state_dict(state)
    assert again.step == 4 and again.epsilon() > spent  # an older state gives nothing back
    for _ in range(3):
        for batch in again.loader:
            again.backward(*batch)
            again.optimizer.step()
    assert again.step == 6 and again.stopped and again.epsilon() <= 3.0
    again.close()
    with pytest.raises(UserError, match="already holds a ledger"):
        made(tmp_path, batch=10, steps=6, epsilon=3.0)
    with pytest.raises(UserError, match="differ from the ledger"):
        made(tmp_path, batch=10, steps=60, epsilon=3.0, resume=True)
    assert Ledger.read(tmp_path / "a" / "ledger.jsonl").rounds == 6


def test_a_state_of_another_ledger_is_refused(tmp_path):
    one, other = made(tmp_path, batch=10, name="a"), made(tmp_path, batch=10, name="b")
    one.backward(*next(iter(one.loader)))
    with pytest.raises(Exception, match="saved state"):
        other.load_state_dict(one.state_dict())


def test_an_empty_draw_is_noise_alone(tmp_path):
    private = made(tmp_path, batch=1, rows=4, seed=3)
    sizes = []
    for _ in range(3):
        for x, y in private.loader:
            sizes.append(len(x))
            private.backward(x, y)
            assert np.abs(gradient(private)).max() > 0
            private.optimizer.step()
    assert 0 in sizes and max(sizes) > 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"recipe": "dp-fedavg"}, "sums of per-example gradients"),
        ({"recipe": "non-private"}, "sums of per-example gradients"),
        ({"recipe": "fed-alpha-cdp"}, "follows the data"),
        ({"recipe": "quantile-clip"}, "follows the data"),
        ({"noise_on": "example"}, "noises every example"),
        ({"grid": 0}, "float noise"),
        ({"mechanism": "laplace"}, "not Gaussian"),
        ({"epsilon": 1.0, "steps": None}, "how long you train"),
        ({"epsilon": -1.0}, "above 0"),
        ({"loss": "hinge"}, "use cross-entropy"),
        ({"resume": True}, "does not exist"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_has_no_promise_is_refused(change, why, tmp_path):
    with pytest.raises(UserError, match=why):
        made(tmp_path, **change)


def test_modules_optimisers_and_loaders_without_a_bound_are_refused(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    plain = nn.Linear(COLUMNS, CLASSES)
    mixed = nn.Sequential(nn.BatchNorm1d(COLUMNS), nn.Linear(COLUMNS, CLASSES))
    loader = DataLoader(data(), batch_size=8)
    cases = [
        (mixed, torch.optim.SGD(mixed.parameters()), loader, "mixes the examples"),
        (plain, torch.optim.SGD(mixed.parameters()), loader, "not the module's"),
        (plain, torch.optim.SGD([plain.weight]), loader, "leaves out"),
        (plain, torch.optim.SGD(plain.parameters()), DataLoader(Stream(), batch_size=2), "stream has none"),
        (plain, torch.optim.SGD(plain.parameters()), DataLoader(data(), batch_size=None), "batch_size"),
        (nn.Linear(3, 2).double(), None, loader, "not float32"),
    ]
    for module, optimizer, rows, why in cases:
        optimizer = optimizer or torch.optim.SGD(module.parameters())
        with pytest.raises(UserError, match=why):
            fv.make_private(module, optimizer, rows, steps=5, out=tmp_path / why.replace(" ", "-"))


def test_a_loss_that_keeps_statistics_of_private_rows_is_refused(tmp_path):
    def counting(module, batch):
        module[0].seen.add_(batch[0].sum())
        return own_loss(module, batch)

    private = made(tmp_path, batch=10, loss=own_loss)
    private.module[0].register_buffer("seen", torch.zeros(()))
    private._loss = counting
    with pytest.raises(UserError, match="changes a buffer"):
        private.backward(*next(iter(private.loader)))
    assert all(p.grad is None for p in private.module.parameters())


class Mean(nn.Module):
    """Subtracts a running mean of all that it has seen, kept where `where` says."""

    def __init__(self, where):
        super().__init__()
        self.where, self.dense = where, nn.Linear(COLUMNS, CLASSES)
        if where == "attribute":
            self.mean = 0.0
        else:
            self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            now = 0.5 * self.mean + 0.5 * x.detach().mean()
            if self.where == "attribute":
                self.mean = float(now)
            else:
                self.mean.copy_(now)
        return self.dense(x - self.mean)


class Tracked(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dense = nn.InstanceNorm1d(1, track_running_stats=True), nn.Linear(COLUMNS, CLASSES)

    def forward(self, x):
        return self.dense(self.norm(x[:, None])[:, 0])


LOSSES = {"name": "cross-entropy", "torch": nn.CrossEntropyLoss(label_smoothing=0.1), "own": own_loss}


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("module", [partial(Mean, "buffer"), partial(Mean, "attribute"), Tracked])
def test_a_module_that_keeps_something_of_examples_is_refused_with_every_loss_before_anything_is_written(module, loss, tmp_path):
    torch.manual_seed(0)
    net = module()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"changes a buffer|after others have passed|keeps running statistics"):
        fv.make_private(net, optimizer, DataLoader(data(), batch_size=10), steps=5, out=tmp_path / "a", loss=LOSSES[loss])
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("loss", ["cross-entropy", own_loss], ids=["engine", "one-by-one"])
def test_a_module_that_turns_out_to_remember_while_it_trains_is_refused_and_the_plan_charged(loss, tmp_path):
    """Below a size that no made-up example has it remembers nothing."""

    class Sly(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.last = nn.Linear(COLUMNS, CLASSES), 0.0

        def forward(self, x):
            before, self.last = self.last, self.last + float(x.detach().abs().max() > 1e6)
            return self.dense(x - before)

    rows = data().tensors
    rows[0][:5] *= 1e7
    net = Sly()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*rows), batch_size=ROWS)
    with pytest.warns(UserWarning, match=r"torch\.func") if loss == "cross-entropy" else contextlib.nullcontext():
        private = fv.make_private(net, optimizer, loader, sigma=2.0, steps=5, out=tmp_path / "a", loss=loss, sampling="full")
    assert any("model" in note and "Sly" in note for note in private.notes)
    with pytest.raises(UserError, match="after others have passed"):
        private.backward(*next(iter(private.loader)))
    assert all(p.grad is None for p in net.parameters()) and private.step == 5


class Words(nn.Module):
    """The mean of the vectors of all words, padding included."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.table(x.long()).mean(1))


def padded(items):
    return nn.utils.rnn.pad_sequence([a for a, _ in items], batch_first=True).float(), torch.tensor([b for _, b in items])


def as_named(items):
    x, y = padded(items)
    return {"x": x, "y": y}


def texts(longest):
    draw = torch.Generator().manual_seed(1)
    rows = [(torch.randint(1, 20, (int(torch.randint(3, 9, (1,), generator=draw)),), generator=draw), i % 2) for i in range(ROWS)]
    rows[0] = (torch.ones(longest, dtype=torch.long), 0)
    return rows


@pytest.mark.parametrize("case", ["engine", "one-by-one", "named", "taken apart"])
def test_a_long_row_moves_the_sum_by_no_more_than_its_own_part_however_rows_are_collated(case, tmp_path):
    """Padded to the longest row of its batch, every other text had another mean."""
    losses = {"engine": "cross-entropy", "one-by-one": own_loss, "taken apart": own_loss}
    loss = losses.get(case, lambda module, batch: nn.functional.cross_entropy(module(batch["x"]), batch["y"]))
    sums = []
    for longest in (5, 200):
        torch.manual_seed(0)
        net = Words()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = DataLoader(texts(longest), batch_size=ROWS, collate_fn=as_named if case in ("named", "taken apart") else padded)
        private = fv.make_private(
            net, optimizer, loader, loss=loss, sigma=2.0, clip_bound=0.5, steps=5, out=tmp_path / str(longest), sampling="full",
            seed=0,
        )
        (batch,) = private.loader
        given = (batch,) if case == "named" else tuple(batch.values()) if case == "taken apart" else batch
        private.backward(*given)
        sums.append(gradient(private) * ROWS)  # the same noise twice
        assert any("collate" in note for note in private.notes)
    assert 0 < np.linalg.norm(sums[0] - sums[1]) <= 2 * 0.5 * (1 + 1e-5)


def test_a_collate_function_that_writes_to_its_rows_does_not_carry_one_to_another_in_the_next_step(tmp_path):
    def in_place(items):
        longest = max(len(words) for words, _ in items)
        for words, _ in items:
            words.extend([0] * (longest - len(words)))
        return torch.tensor([words for words, _ in items]).float(), torch.tensor([label for _, label in items])

    sums = []
    for longest in (5, 200):
        torch.manual_seed(0)
        net = Words()
        rows = [(words.tolist(), label) for words, label in texts(longest)]
        loader = DataLoader(rows, batch_size=ROWS, collate_fn=in_place)
        private = fv.make_private(
            net, torch.optim.SGD(net.parameters(), lr=0.1), loader, loss=own_loss, sigma=2.0, clip_bound=0.5, steps=5,
            out=tmp_path / str(longest), sampling="full", seed=0,
        )  # fmt: skip
        for _ in range(2):
            (batch,) = private.loader
            private.backward(*batch)
            private._used()  # as after a step that moved nothing
        sums.append(gradient(private) * ROWS)
    assert 0 < np.linalg.norm(sums[0] - sums[1]) <= 2 * 0.5 * (1 + 1e-5)


class Kinds(torch.utils.data.Dataset):
    """The first row's kind of number decides what torch makes of a column of numbers."""

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return (self.first if row == 0 else 2**24 + 1), row % 2


def test_the_kind_of_number_of_one_row_does_not_change_another(tmp_path):
    seen = []
    for first in (1, 0.5):
        net = nn.Linear(1, 2)
        kinds = []

        def loss(module, batch, kinds=kinds):
            kinds.append(batch[0].dtype)
            return nn.functional.cross_entropy(module(batch[0].float().view(-1, 1)), batch[1])

        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = DataLoader(Kinds(first), batch_size=ROWS)
        out = tmp_path / str(first)
        private = fv.make_private(net, optimizer, loader, loss=loss, sigma=2.0, steps=5, out=out, sampling="full")
        (batch,) = private.loader
        kinds.clear()
        private.backward(*batch)
        seen.append([kind for kind in kinds[:ROWS] if kind != torch.float64])
        assert any("Kinds" in note for note in private.notes)
    assert seen[0] == [torch.int64] * ROWS and seen[1] == [torch.int64] * (ROWS - 1)


def test_masks_of_dropout_are_chance_and_differ_between_steps(tmp_path):
    """By place in the batch and known to everyone, they would turn all examples after one that is left out."""
    net = nn.Sequential(nn.Linear(COLUMNS, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    private = fv.make_private(
        net, optimizer, DataLoader(data(), batch_size=ROWS), sigma=2.0, steps=5, out=tmp_path / "a", sampling="full"
    )
    rows = Rows(ROWS, tuple(data().tensors))
    one, again = (private._clipped(rows, private._now(number))[0] for number in (0, 1))
    assert np.linalg.norm(one - again) > 0.1


def test_what_rests_on_the_users_own_code_is_in_the_ledger(tmp_path):
    plain = made(tmp_path, name="a")
    own = made(tmp_path, name="b", loss=own_loss)
    assert plain.notes == () and "own_loss" in own.notes[0]
    own.close()
    assert Ledger.read(tmp_path / "b" / "ledger.jsonl").header.assumes == own.notes


@pytest.mark.parametrize("where", ["loss", "dataset"])
@pytest.mark.parametrize("steps", [4, None])
def test_a_step_that_fails_over_its_rows_is_charged_with_all_that_it_leaves_out(where, steps, tmp_path):
    """How it failed may follow from them, and so does where the loop ends."""
    first, labels = data().tensors
    first[3] = 7.0

    class Rows_(torch.utils.data.Dataset):
        def __len__(self):
            return ROWS

        def __getitem__(self, row):
            if where == "dataset" and row == 3 and broken:
                raise ValueError("this row cannot be read")
            return first[row], labels[row]

    def loss(module, batch):
        if where == "loss" and bool((batch[0] == 7.0).all()):
            raise ValueError("this row cannot be read")
        return own_loss(module, batch)

    broken = True
    net = nn.Linear(COLUMNS, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(Rows_(), batch_size=ROWS)
    settings = {"sigma": 2.0, "steps": steps, "sampling": "full", "loss": loss}
    private = fv.make_private(net, optimizer, loader, out=tmp_path / "a", **settings)
    with pytest.raises(ValueError, match="cannot be read"):
        private.backward(*next(iter(private.loader)))
    assert private.step == (steps or 1) and bool(private.stopped) == (steps is not None)
    assert all(p.grad is None for p in net.parameters())
    first[3], broken = 1.0, False
    whole = fv.make_private(net, optimizer, loader, out=tmp_path / "b", **settings)
    for batch in (batch for _ in range(steps or 1) for batch in whole.loader):
        whole.backward(*batch)
        whole._used()
    assert private.epsilon() == whole.epsilon()


def loop_with(noise, tmp_path):
    """The same loop twice: as documented, or with the private gradients thrown away before the optimiser sees them."""

    def loop(module, rows):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        loader = DataLoader(rows, batch_size=50)
        private = fv.make_private(module, optimizer, loader, sigma=2.0, steps=16, seed=1, out=tmp_path / str(noise))
        for x, y in (batch for _ in range(2) for batch in private.loader):
            private.backward(x, y)
            if not noise:  # the user's own idea of a faster step
                private._used()
                for hook in private._hooks:
                    hook.remove()
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
        return private.epsilon()

    return loop


def test_an_audit_catches_a_user_who_forgets_the_noise(tmp_path):
    """Fixed seeds; the honest loop is accused with probability at most 0.05 by the audit's own level."""
    forgotten = audit_loop(loop_with(False, tmp_path), canaries=400)
    assert forgotten.verdict == "promise broken" and forgotten.epsilon_lower > forgotten.epsilon_promised, forgotten
    honest = audit_loop(loop_with(True, tmp_path), canaries=400)
    assert honest.verdict != "promise broken", honest
