"""The same recipes on a real Flower federation. Flower carries messages; everything else is fedveil's.

    from fedveil.flower import client_app, server_app

A project for `flwr run` contains two lines like these (see `fedveil flower init`). Imports are lazy: a
ClientApp is started afresh for every message, and with a persistent trainer it needs neither torch nor data.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from fedveil.flower.node import RootOf
    from fedveil.flower.private import Private, private_mod

__all__ = ["Private", "client_app", "private_mod", "server_app"]
STOPPED = "fedveil stopped:"  # begins the line that says why a run ended before its time
LOST_LINK = "lost the SuperLink: "  # begins the error of a run that can be continued as it is


def __getattr__(name: str) -> Any:
    if name in ("Private", "private_mod"):  # around a ServerApp and ClientApp of your own
        from fedveil.flower import private

        return getattr(private, name)
    raise AttributeError(f"module 'fedveil.flower' has no attribute '{name}'")


def client_app(root_of: RootOf | None = None) -> ClientApp:
    """The node's side: answer "who are you" (query) and play rounds (train).

    root_of exists for tests of equality with the simulator: (configuration, client) -> root of all the
    node's randomness. The app of a project never passes it: every message then takes a fresh root from the
    operating system, and no configuration, option or environment variable changes that. A node whose
    policy asks for secure noise (the default) refuses to train with a given root.

    Formal guarantee: a reply leaves only after the release is in the node's own ledger, on its own disk, and
    within the budget and the policy of the node's owner.
    """
    from flwr.clientapp import ClientApp

    from fedveil.flower import wire

    app = ClientApp()

    def reply(kind: str, message: Message, context: Context) -> Message:
        from fedveil.flower.owner import owner_of

        owner = owner_of(context.node_config)
        facts, arrays = wire.read(message)
        if owner.trainer and root_of is None:
            from fedveil.flower.trainer import ask

            return wire.answer(message, *ask(owner.trainer, kind, facts, arrays))
        from fedveil.flower.node import answer

        return wire.answer(message, *answer(kind, facts, arrays, owner, root_of=root_of))

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        return reply("hello", message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return reply("round", message, context)

    return app


def server_app(config: str | Path, root: int | bytes | None = None, trust_code: bool = False) -> ServerApp:
    """The server's side: the whole run of the configuration file `config`, resumed if its folder holds one.

    root: as in `client_app`, for tests; otherwise cohorts and the server's noise come from the operating
    system's entropy. trust_code: a recipe that the file names as package.module:recipe may be imported (`fedveil flower init
    --trust-code` writes this); nodes ask their own contracts.
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedveil.errors import UserError
        from fedveil.federation.config import TRUSTED, load_config
        from fedveil.flower.lightnode import quick_grid
        from fedveil.flower.server import options_of, serve

        TRUSTED.set(trust_code)
        quick_grid()
        try:
            read = load_config(str(config)).imported()
            serve(grid, read, options_of(context.run_config), root=root)
        except UserError as wrong:
            from logging import ERROR

            from flwr.supercore import log

            log(ERROR, f"{STOPPED} {wrong}")
            raise UserError(str(wrong)) from None  # Flower marks the run as failed
        except Exception as wrong:
            if not _of_transport(wrong):
                raise
            raise ConnectionError(f"{LOST_LINK}{type(wrong).__name__}: {wrong}") from wrong

    return app


def _of_transport(error: Exception) -> bool:
    """Whether Flower or its line failed, not the run: to run again helps."""
    return isinstance(error, ConnectionError) or type(error).__module__.partition(".")[0] in ("flwr", "httpx", "httpcore")
