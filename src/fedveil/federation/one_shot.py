"""Solvers that need one release: what a run with `model = "adassp"` must be, and the public numbers that its solver is told."""

from __future__ import annotations

import math

from torch import nn

from fedveil.data.rows import Dataset
from fedveil.errors import UserError
from fedveil.federation.config import RunConfig
from fedveil.federation.round import Task, learning_rate_of, moment_of, noised_of, plan_of, start
from fedveil.models.layout import flatten
from fedveil.models.statistics import Statistics
from fedveil.protect.aggregate import Mean
from fedveil.protect.place import InSum
from fedveil.training import loss_names


def loss_of(config: RunConfig, module: nn.Module, dataset: Dataset) -> str:
    """The run's loss; least squares from sums has its own and needs one plain step."""
    if not isinstance(module, Statistics):
        return loss_names.chosen(config.loss, dataset.task == "regression")
    recipe = config.built_recipe()
    if config.loss != "auto":
        raise UserError(f"model = adassp solves least squares: leave loss = {config.loss} out")
    if config.rounds != 1 or config.local_steps != 1 or config.augment or config.local_optimiser != "sgd":
        raise UserError("model = adassp needs one plain release: rounds = 1, local_steps = 1, no augment, local_optimiser = sgd")
    if recipe.private and not recipe.place.of_gradients:
        raise UserError(
            f"model = adassp: what is clipped are the statistics of single examples, and where = {recipe.place.name} noises "
            "finished updates; use where = step or sum (sum-cdp, fed-cdp-sound, …)"
        )
    if recipe.clip.rule.rescales or type(recipe.aggregate) is not Mean or config.server_momentum:
        raise UserError("model = adassp needs the plain mean of the clients' sums: aggregate = mean, and no rescaling clip rule")
    return loss_names.STATISTICS


def tell(task: Task) -> None:
    """Fill in the deviation of the noise on what the model holds after its round: public, from the recipe's own `Noised`."""
    if not isinstance(task.module, Statistics) or not task.recipe.private:
        return
    now = moment_of(task, start(task, flatten(task.module)))
    size = max(1, task.setting.examples // task.setting.clients)
    noised = noised_of(task, now, 0, size)[0]
    rate = learning_rate_of(task, 0) * task.server_learning_rate
    if isinstance(task.recipe.place, InSum):
        task.module.deviation = rate * noised.deviation / task.recipe.place.everyone(task.recipe, task.setting)
    else:
        batch = plan_of(task, now, 0, size).expected_batch
        task.module.deviation = rate * noised.deviation / (batch * math.sqrt(task.setting.cohort))
