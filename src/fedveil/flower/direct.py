"""A SuperNode that answers by its trainer itself, where the app that came with a run would only hand messages over.

Flower starts a SuperExec beside each SuperNode, and for each message a ClientApp that fetches the message and the app over
HTTP, unpacks the app, and returns the reply over HTTP. The app of `fedveil flower init` does nothing but ask the node's
trainer (`fedveil.flower.client_app`). Here the SuperNode asks, for runs whose app is that one byte for byte: nothing that
came with the run is executed, and no process starts. Another app, and a node without a trainer, is left to Flower.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.app.user_config import UserConfig
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.fab import Fab
    from flwr.supercore.object_store import ObjectStore
    from flwr.supercore.run import Run
    from flwr.supernode.nodestate import NodeState

PACKAGE = "fedveil_run"
CLIENT = '''\
"""A node: trains on its own data, within its owner's policy and budget."""

from fedveil.flower import client_app

app = client_app()
'''
REMEMBERED = 100  # runs
LARGEST = 1 << 16  # bytes of a file that is compared
WAIT = 0.05  # seconds until a part that is still on its way is asked for again (Flower: 1)


def only_forwards(fab: bytes) -> bool:
    """Whether this app's node side is the one of `fedveil flower init`, and nothing else."""
    from fedveil.flower.owner import tomllib

    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as files:

            def text(name: str) -> str:
                if files.getinfo(name).file_size > LARGEST:
                    raise ValueError("not ours")
                return files.read(name).decode()

            named = tomllib.loads(text("pyproject.toml"))["tool"]["flwr"]["app"]["components"]["clientapp"]
            ours = {f"{PACKAGE}/__init__.py": "", f"{PACKAGE}/client_app.py": CLIENT}
            return bool(named == f"{PACKAGE}.client_app:app" and all(text(name) == own for name, own in ours.items()))
    except Exception:  # whatever a damaged or strange archive raises: Flower's own way decides
        return False


@dataclass(frozen=True)
class Line:
    """What Flower's loop hands to `_pull_and_store_message`, by its names."""

    state: NodeState
    object_store: ObjectStore
    node_config: UserConfig
    receive: Callable[[], tuple[Message, ObjectTree] | None]
    get_run: Callable[[int], Run]
    get_fab: Callable[[str, int], Fab]
    pull_object: Callable[[int, str], bytes]
    confirm_message_received: Callable[[int, str], None]
    trusted_entities: dict[str, str] | None


def answering(
    plain: Callable[..., int | None], executor: Callable[[], None], came: Callable[[], None]
) -> Callable[..., int | None]:
    """Flower's `_pull_and_store_message`, with answers by the trainer in place of tasks for ClientApps.

    plain: Flower's own, after `executor` has seen to it that a SuperExec runs. came: told of every message.
    """
    from flwr.supercore.run import RunNotRunningException

    forwards: dict[int, bool] = {}

    def pull(**given: object) -> int | None:
        line = Line(**given)  # type: ignore[arg-type]
        try:
            if (found := line.receive()) is None:
                return None
            came()
            run = found[0].metadata.run_id
            if run not in forwards:
                if len(forwards) >= REMEMBERED:
                    forwards.clear()
                fab = line.get_fab(line.get_run(run).fab_hash, run)
                asks = bool(line.node_config.get("trainer")) and not line.trusted_entities
                forwards[run] = asks and only_forwards(fab.content)
            if not forwards[run]:
                executor()
                return plain(**{**given, "receive": lambda: found})
            return run if _answer(run, *found, line) else None
        except RunNotRunningException:
            return None

    return pull


def _answer(run: int, message: Message, tree: ObjectTree, line: Line) -> bool:
    """Fetch a message's parts, ask the trainer, and lay the reply where Flower's loop finds it; False if parts are missing."""
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.common.constant import ErrorCode
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
    from flwr.supercore.run import RunNotRunningException
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supernode import start_client_internal as inner

    from fedveil.flower import client_app

    node, number = line.state.get_node_id(), message.metadata.message_id
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run, 0, node
    try:
        whole = pull_and_inflate_object_from_tree(
            tree,
            lambda part: line.pull_object(run, part),
            lambda _: line.confirm_message_received(run, number),
            return_type=Message,
            initial_backoff=WAIT,
        )
    except RunNotRunningException:
        raise
    except Exception as wrong:  # the server hears nothing of this node in this round, as with Flower's own
        inner.log(inner.ERROR, "Failed to receive message %s: %s", number, wrong)
        return False
    whole.metadata.__dict__["_message_id"] = number
    try:
        reply = client_app()(whole, Context(run, node, line.node_config, RecordDict(), {}))
    except Exception as wrong:  # as a ClientApp's; the kind of error and no more
        reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, type(wrong).__name__), reply_to=whole)
    line.state.record_message_processing_start(number)  # only now: how long the work took is nobody's business
    line.state.record_message_processing_end(number)
    inner._insert_message(reply, line.state, line.object_store)
    return True
