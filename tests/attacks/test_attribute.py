import numpy as np
import pytest
import torch
from torch import nn

from fedveil.attacks import attribute, decoder
from fedveil.data.datasets import load
from fedveil.errors import UserError
from fedveil.models.layout import flatten, layout_of


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def net(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def test_embeddings_are_the_inputs_of_the_last_dense_layer(digits):
    model = net(16)
    x = digits.x[:50]
    found = attribute.embeddings(model, layout_of(model), flatten(model), x)
    np.testing.assert_allclose(found, model[:3](torch.as_tensor(x)).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_an_embedding_that_keeps_the_input_leaks_the_attribute_and_a_dead_one_does_not(digits):
    secret = (digits.y % 2).astype(np.int64)[:800]
    model = net(64)
    open_ = attribute.infer(model, layout_of(model), flatten(model), digits.x[:800], secret)
    assert open_.accuracy > 0.85 and open_.control_accuracy > 0.85
    dead = np.zeros_like(flatten(model))
    closed = attribute.infer(model, layout_of(model), dead, digits.x[:800], secret)
    assert closed.accuracy == pytest.approx(closed.majority_accuracy, abs=0.1)


def test_f1_of_a_known_case():
    truth, guess = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
    assert attribute.macro_f1(truth, guess) == pytest.approx((2 / 3 + 4 / 5) / 2)


def test_a_constant_attribute_is_an_error(digits):
    model = net(8)
    with pytest.raises(UserError, match="one value"):
        attribute.infer(model, layout_of(model), flatten(model), digits.x[:20], np.zeros(20))


def test_the_decoder_beats_the_mean_image_only_with_information(digits):
    model = net(64)
    layout, weights = layout_of(model), flatten(model)
    informed = decoder.decode(model, layout, weights, digits.x[:600], digits.x_test[:100], epochs=15)
    assert informed.mse < 0.6 * informed.control_mse and informed.ssim > informed.control_ssim
    blind = decoder.decode(model, layout, 0 * weights, digits.x[:600], digits.x_test[:100], epochs=15)
    assert blind.mse > 0.9 * blind.control_mse


def test_the_decoder_draws_standardised_images_as_well_as_pixels(digits):
    """The same pictures by other numbers: drawn in their own range, with the same errors as shares of it."""
    model = net(64)
    layout, weights = layout_of(model), flatten(model)
    known = {"source": "outputs", "epochs": 5}
    pixels = decoder.decode(model, layout, weights, digits.x[:600], digits.x_test[:100], pixel_range=(0.0, 1.0), **known)
    module = nn.Sequential(nn.Flatten(), Back(), *model[1:])  # the same outputs for the moved pictures
    moved = [((x - 0.5) / 0.25).astype(np.float32) for x in (digits.x[:600], digits.x_test[:100])]
    found = decoder.decode(module, layout_of(module), flatten(module), *moved, **known)
    assert found.value_range == (-2.0, 2.0) and pixels.value_range == (0.0, 1.0)
    assert found.mse == pytest.approx(pixels.mse, rel=0.02)
    assert found.control_mse == pytest.approx(pixels.control_mse, rel=1e-4)
    assert found.mse < 0.9 * found.control_mse


class Back(nn.Module):
    def forward(self, x):
        return 0.25 * x + 0.5
