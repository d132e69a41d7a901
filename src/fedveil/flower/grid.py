"""A federation in one process, without ray: the ClientApp is called as SuperNodes would call it.

For tests and laptops. Messages are real Flower messages; `tamper` may lose, change or repeat replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

SERVER = 1
Tamper = Callable[[int, Message, Message], Sequence[Message]]


class LocalGrid(Grid):
    """nodes: node id -> its --node-config. offline: ids that are not listed and never answer.

    tamper(node id, message, honest reply) returns the replies that arrive, if given.
    """

    def __init__(
        self, app: ClientApp, nodes: Mapping[int, Mapping[str, Any]], tamper: Tamper | None = None
    ) -> None:
        self.app, self.nodes, self.tamper = app, dict(nodes), tamper
        self.offline: set[int] = set()
        self.sent: list[Message] = []
        self._mail: dict[str, list[Message]] = {}
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, SERVER

    def set_run(self, run: object) -> None:
        raise NotImplementedError("flwr sets runs on its own grid; nothing here calls this")

    @property
    def run(self) -> Any:
        raise NotImplementedError("a grid in memory has no run of a SuperLink")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.nodes if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        out = []
        for message in messages:
            name = f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            self._mail[name] = list(self._answers(message))
            out.append(name)
        return out

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for name in message_ids for reply in self._mail.pop(name, [])]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answers(self, message: Message) -> Sequence[Message]:
        node = message.metadata.dst_node_id
        if node in self.offline or node not in self.nodes:
            return []
        context = Context(1, node, dict(self.nodes[node]), RecordDict(), {})
        try:
            reply: Message = self.app(message, context)
        except Exception as wrong:  # as a SuperNode does it
            reply = Message(Error(code=0, reason=repr(wrong)), reply_to=message)
        return self.tamper(node, message, reply) if self.tamper else [reply]
