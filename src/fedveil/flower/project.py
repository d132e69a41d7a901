"""A project folder that `flwr run` accepts: two thin apps, the configuration, and where the run goes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fedveil.errors import UserError
from fedveil.federation.config import GIVEN, RunConfig
from fedveil.flower.direct import CLIENT, PACKAGE
from fedveil.flower.owner import deployable
from fedveil.protect.catalogue import named_code

PYPROJECT = """\
# Made by `fedveil flower init`. The package carries no data and no algorithm: both sides need fedveil installed.
[project]
name = "fedveil-run"
version = "1.0.0"
description = "{description}"
license = "Apache-2.0"
dependencies = ["flwr==1.41.0", "fedveil"]

[tool.flwr.app]
publisher = "fedveil"

[tool.flwr.app.components]
serverapp = "fedveil_run.server_app:app"
clientapp = "fedveil_run.client_app:app"

[tool.flwr.app.config]
{options}"""

SERVER = '''\
"""The server: plays run.toml over the nodes."""

from pathlib import Path

from fedveil.flower import server_app

app = server_app(Path(__file__).with_name("run.toml"){trust})
'''


def write_project(folder: Path, config: RunConfig, options: Mapping[str, object]) -> None:
    """Write the project; `options` are those of `server.Options` (out, deadline, …)."""
    shuffler = bool(options.get("shuffler") and options.get("shuffler_key"))
    if config.recipe.startswith(GIVEN):
        raise UserError("a recipe that is a value cannot travel: name it, my_package.module:my_recipe, of a package on all sides")
    deployable(config.built_recipe(), shuffler=shuffler, secure_sum=config.secure_sum)
    if (folder / "pyproject.toml").exists():
        raise UserError(f"{folder} already holds a project; choose another folder")
    package = folder / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{key.replace('_', '-')} = {toml_value(value)}\n" for key, value in options.items())
    description = f"{config.recipe} on {config.dataset}".replace('"', "'")
    (folder / "pyproject.toml").write_text(PYPROJECT.format(description=description, options=lines), "utf-8")
    (package / "__init__.py").write_text("", "utf-8")
    trust = ", trust_code=True" if named_code(config.recipe) else ""
    (package / "server_app.py").write_text(SERVER.format(trust=trust), "utf-8")
    (package / "client_app.py").write_text(CLIENT, "utf-8")
    (package / "run.toml").write_text(to_toml(config), "utf-8")


def to_toml(config: RunConfig) -> str:
    """A configuration as TOML that `load_config` reads back to an equal one."""
    values = config.model_dump(exclude_none=True, exclude={"secure_noise"})  # always, on Flower
    own = {key: value for key, value in values.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in values.items() if isinstance(value, dict) and value}
    text = "".join(f"{key} = {toml_value(value)}\n" for key, value in own.items())
    for name, table in tables.items():
        text += f"\n[{name}]\n" + "".join(f"{toml_value(k)} = {toml_value(v)}\n" for k, v in table.items())
    return text


def toml_value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
