"""fedveil: train across private data, state what each observer can learn, attack the run to prove it.

    import fedveil as fv

    data = fv.load("digits")                                   # or fv.dataset(x, y, x_test, y_test)
    result = fv.run("fed-cdp-sound", data=data, rounds=5, sigma=1.0, out="runs/first")
    print(result.accuracy, result.epsilon("server", "example"))

Importing the package is cheap: torch is loaded when something needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import fedveil.protect  # noqa: F401  (bound before the function below, which it would hide otherwise)

__version__ = "0.2.0"

_PUBLIC = {
    "load": "fedveil.data.datasets",
    "Dataset": "fedveil.data.datasets",
    "partition": "fedveil.data.partition",
    "Partition": "fedveil.data.partition",
    "Recipe": "fedveil.protect.recipe",
    "Clip": "fedveil.protect.clip",
    "RunConfig": "fedveil.federation.config",
    "open_run": "fedveil.federation.store",
    "Ledger": "fedveil.privacy.ledger",
    "UserError": "fedveil.errors",
    "dataset": "fedveil.api",
    "recipe": "fedveil.api",
    "recipes": "fedveil.api",
    "run": "fedveil.api",
    "fit": "fedveil.api",
    "resume": "fedveil.api",
    "make_private": "fedveil.api",
    "plan": "fedveil.api",
    "attack": "fedveil.api",
    "audit": "fedveil.api",
    "Private": "fedveil.federation.own_loop",
    "protect": "fedveil.api",
    "Result": "fedveil.api",
    "objective_perturbation": "fedveil.federation.objective",
    "check_practice": "fedveil.federation.practice",
    "backbone": "fedveil.models.backbones",
    "Backbone": "fedveil.models.backbones",
    "replace_batch_norm": "fedveil.models.surgery",
    "lora": "fedveil.models.surgery",
    "check_training": "fedveil.models.surgery",
    "check_gradients": "fedveil.models.surgery",
}
__all__ = ["__version__", *sorted(_PUBLIC)]


def protect(*args: Any, **options: Any) -> Any:  # type: ignore[no-redef]
    """Deprecated: `make_private` in your own loop, or `run(recipe, data=…, model=…, clients=1)`."""
    from fedveil.api import protect as real

    return real(*args, **options)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'fedveil' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__all__)
