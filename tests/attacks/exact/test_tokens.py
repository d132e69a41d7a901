"""Sentences come back from a transformer's gradient, and noise hides them."""

import numpy as np
import torch
from torch import nn

from fedveil.attacks.exact.tokens import TinyText, read, recovered


def batch_gradients(seed, sentences=4, deviation=0.0):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = TinyText()
    ids = np.zeros((sentences, 16), np.int64)
    for row in ids:
        length = rng.integers(6, 15)
        row[:length] = rng.integers(1, 500, length)
    loss = nn.functional.cross_entropy(
        model(torch.as_tensor(ids)), torch.as_tensor(rng.integers(0, 2, sentences))
    )
    names = ("first.value.weight", "second.value.weight")
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, [parameters[n] for n in names])
    noisy = [g.numpy() + deviation * rng.normal(size=tuple(g.shape)) for g in found]
    return model, ids, dict(zip(names, noisy, strict=True))


def test_four_sentences_are_read_off_one_gradient():
    tokens, sentences = zip(
        *(recovered(ids, read(m, g)) for m, ids, g in map(batch_gradients, range(3))), strict=True
    )
    assert min(tokens) >= 0.9 and np.mean(sentences) >= 0.9


def test_few_tokens_fit_that_were_not_there():
    model, ids, gradients = batch_gradients(5)
    found = read(model, gradients)
    wrong = sum(t not in ids[:, p] for p, fitting in enumerate(found.candidates) for t in fitting)
    assert wrong <= 2 and len(found.sentences) <= 6


def test_noise_makes_the_gradient_full_rank_and_nothing_is_learnt():
    model, ids, gradients = batch_gradients(1, deviation=1e-3)
    assert recovered(ids, read(model, gradients)) == (0.0, 0.0)


def test_an_encoder_gives_its_tokens_by_place_and_noise_hides_them():
    from fedveil.attacks.exact.tokens import encoder_candidates
    from fedveil.models.minilm import MiniLM

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = MiniLM(words=400, width=96, layers=2, heads=3, inner=128, positions=16, classes=2)
    ids = rng.integers(1, 400, (4, 12))
    ids[0, 8:] = 0
    loss = nn.functional.cross_entropy(model(torch.as_tensor(ids)), torch.as_tensor([0, 1, 1, 0]))
    (gradient,) = torch.autograd.grad(loss, [model.blocks[0].attention.value.weight])
    found = encoder_candidates(model, gradient.numpy(), 12)
    there = [int(t) in found[p] for row in ids for p, t in enumerate(row) if t]
    assert np.mean(there) >= 0.9 and sum(map(len, found)) < 3 * len(there)
    noised = gradient.numpy() + 1e-3 * rng.normal(size=gradient.shape)
    assert not any(encoder_candidates(model, noised, 12))
