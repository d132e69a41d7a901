"""Sentences come back from a transformer's gradient, and noise hides them."""

import numpy as np
import torch
from torch import nn

from fedveil.attacks.exact.tokens import TinyText, read, recovered

torch.set_num_threads(1)


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
