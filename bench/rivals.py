"""The peers, each written the way its users write it, and our engines. Every function returns a Racer: a call
that trains and says how many client-iterations it did."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from bench.cases import BOUND, LEARNING_RATE, SIGMA, Material, plans
from fedveil.training import pool

Racer = Callable[[], int]


def _batches(m: Material) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches for a rival that trains one client at a time."""
    flat = [torch.as_tensor(row).long() for work in m.work for row in work.rows]
    for step in range(m.case.one_client_steps):
        rows = flat[step % len(flat)]
        yield m.x[rows], m.y[rows]


def plain(m: Material) -> Racer:
    """An ordinary torch loop without privacy."""
    module = copy.deepcopy(m.module)
    optimizer = torch.optim.SGD(_trained(module), lr=LEARNING_RATE)

    def run() -> int:
        for x, y in _batches(m):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
        return m.case.one_client_steps

    return run


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def per_example_loop(m: Material) -> Racer:
    """The papers' way: a backward pass per example, clip every layer, add noise."""
    module = copy.deepcopy(m.module)
    layers = [list(layer.parameters(recurse=False)) for layer in module.modules()]
    layers = [parameters for parameters in layers if parameters]

    def run() -> int:
        for x, y in _batches(m):
            totals = [[torch.zeros_like(p) for p in layer] for layer in layers]
            for i in range(len(x)):
                module.zero_grad()
                cross_entropy(module(x[i : i + 1]), y[i : i + 1]).backward()
                for layer, total in zip(layers, totals, strict=True):
                    norm = torch.sqrt(sum(p.grad.square().sum() for p in layer))  # type: ignore[union-attr, misc]
                    factor = torch.clamp(BOUND / norm, max=1.0)
                    for p, t in zip(layer, total, strict=True):
                        t.add_(p.grad * factor)  # type: ignore[operator]
            with torch.no_grad():
                for layer, total in zip(layers, totals, strict=True):
                    for p, t in zip(layer, total, strict=True):
                        t.add_(torch.randn_like(t), alpha=SIGMA * BOUND)
                        p.sub_(t, alpha=LEARNING_RATE / len(x))
        return m.case.one_client_steps

    return run


def opacus_per_layer(m: Material) -> Racer:
    """Opacus: hooks and the per-layer optimizer (which clips every parameter tensor on its own)."""
    warnings.filterwarnings("ignore")
    from opacus import GradSampleModule
    from opacus.optimizers import DPPerLayerOptimizer

    module = GradSampleModule(copy.deepcopy(m.module))
    count = len(_trained(module))
    optimizer = DPPerLayerOptimizer(
        torch.optim.SGD(_trained(module), lr=LEARNING_RATE),
        noise_multiplier=SIGMA,
        max_grad_norm=[BOUND] * count,
        expected_batch_size=m.case.batch,
    )

    def run() -> int:
        for x, y in _batches(m):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
        return m.case.one_client_steps

    return run


def opacus_ghost(m: Material) -> Racer:
    """Opacus: ghost clipping, which clips the whole gradient and takes two backward passes."""
    warnings.filterwarnings("ignore")
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    module = GradSampleModuleFastGradientClipping(
        copy.deepcopy(m.module), max_grad_norm=BOUND, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(_trained(module), lr=LEARNING_RATE),
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
        expected_batch_size=m.case.batch,
    )
    loss = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss(reduction="mean"), loss_reduction="mean")

    def run() -> int:
        for x, y in _batches(m):
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
        return m.case.one_client_steps

    return run


def nested_func(m: Material) -> Racer:
    """torch.func: vmap over clients of vmap over examples of grad, clipped per layer, noised."""
    clients = min(16 if len(m.case.shape) == 3 else 64, m.case.clients)
    names = [name for name, _ in m.module.named_parameters()]
    owner = {name: name.rpartition(".")[0] for name in names}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(m.module, weights, (x[None],)), y[None])

    gradients = vmap(vmap(grad(loss), in_dims=(None, 0, 0)))
    rows = torch.stack([torch.as_tensor(w.rows) for w in m.work[:clients]]).long()

    def run() -> int:
        weights = {n: p.detach().repeat(clients, *[1] * p.dim()) for n, p in m.module.named_parameters()}
        steps = m.case.steps
        for step in range(steps):
            found = gradients(weights, m.x[rows[:, step]], m.y[rows[:, step]])
            squares = {name: found[name].flatten(2).square().sum(2) for name in names}
            for name in names:
                norm = torch.sqrt(sum(squares[n] for n in names if owner[n] == owner[name]))  # type: ignore[arg-type]
                factor = torch.clamp(BOUND / norm, max=1.0)
                total = torch.einsum("kb,kb...->k...", factor, found[name])
                total = total + SIGMA * BOUND * torch.randn_like(total)
                weights[name] = weights[name] - LEARNING_RATE / m.case.batch * total
        return clients * steps

    return run


def ours(m: Material, engine: str, plan: str) -> Racer:
    """fedveil's pool.train; without privacy it leaves out the gradient norms too."""
    what, quiet = plans(m.case)[plan], plan == "non-private"
    x, y = m.x.numpy(), m.y.numpy()

    def run() -> int:
        pool.train(m.module, m.start, x, y, m.work, what, engine=engine, norms=not quiet)
        return m.case.clients * m.case.steps

    return run


def engines(module: nn.Module, m: Material) -> dict[str, str]:
    """Our engines by name; native only where it is installed and can train the model."""
    best, _ = pool.choose(module, plans(m.case)["private"], "auto")
    return {"native": "native", "torch": "torch"} if best == "native" else {"torch": "torch"}


def opacus_installed() -> bool:
    return importlib.util.find_spec("opacus") is not None


def pfl_round(m: Material) -> Racer:
    """pfl-research: a FedAvg round on its simulator, with its Gaussian mechanism on every user's update (it has no per-example
    clipping). Metrics are off in training rounds, as its own benchmarks have them."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.common_types import Population
    from pfl.context import CentralContext
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = copy.deepcopy(m.module)

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
            return cross_entropy(self.net(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, object]:
            return {}

    module = Model()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    # Users train longer than our clients do, so that pfl's cost per user weighs no more than it should.
    per_user = 7
    rows = [
        torch.cat([torch.as_tensor(w.rows.reshape(-1)).long() for w in m.work[i : i + per_user]])
        for i in range(0, len(m.work), per_user)
    ]
    users = itertools.cycle(range(len(rows)))
    data = FederatedDataset(
        lambda k: Dataset([m.x[rows[k]], m.y[rows[k]]], user_id=str(k)), lambda: next(users)
    )
    backend = SimulatedBackend(data, data, [GaussianMechanism(BOUND, SIGMA)])
    algorithm = FederatedAveraging()
    settings = NNAlgorithmParams(1, 10**9, len(rows), None)
    training = NNTrainHyperParams(
        local_batch_size=m.case.batch, local_num_epochs=1, local_learning_rate=LEARNING_RATE
    )
    context = CentralContext(1, False, len(rows), Population.TRAIN, settings, training, seed=0)

    def run() -> int:
        statistics, _ = backend.gather_results(
            model=model, training_algorithm=algorithm, central_context=context
        )
        algorithm.process_aggregated_statistics(context, Metrics(), model, statistics)
        return m.case.clients * m.case.steps

    return run


def pfl_installed() -> bool:
    return importlib.util.find_spec("pfl") is not None
