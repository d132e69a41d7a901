"""A SuperNode answers by its trainer where a run's app would only hand messages over, and leaves all else to Flower."""

from __future__ import annotations

import io
import math
import time
import zipfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedveil.federation.config import make_config
from fedveil.flower import direct, lightnode, trainer, wire
from fedveil.flower.project import write_project

RUN, NODE = 5, 9


@pytest.fixture(scope="module")
def fab(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if not lightnode.known():
        pytest.skip("another version of Flower runs as it is")
    from flwr.cli.build import build_fab_from_disk

    folder = tmp_path_factory.mktemp("project")
    write_project(folder / "p", make_config({"recipe": "fed-cdp"}), {"out": "x"})
    return build_fab_from_disk(folder / "p")


def changed(fab: bytes, name: str, content: str | None) -> bytes:
    """The app with one file changed, or left out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(fab)) as old, zipfile.ZipFile(out, "w") as new:
        for part in old.namelist():
            if part != name:
                new.writestr(part, old.read(part))
        if content is not None:
            new.writestr(name, content)
    return out.getvalue()


def test_only_the_app_that_fedveil_writes_is_answered_without_running_it(fab: bytes) -> None:
    assert direct.only_forwards(fab)
    with zipfile.ZipFile(io.BytesIO(fab)) as files:
        project = files.read("pyproject.toml").decode()
    for name, content in (
        ("fedveil_run/client_app.py", direct.CLIENT + "\n"),
        ("fedveil_run/client_app.py", None),
        ("fedveil_run/client_app.py", "#" * 10**6),
        ("fedveil_run/__init__.py", "print(1)\n"),
        ("pyproject.toml", project.replace("client_app:app", "server_app:app")),
        ("pyproject.toml", "[" * 10**5),
    ):
        assert not direct.only_forwards(changed(fab, name, content)), name
    for data in (b"", b"PK", fab[:-30]):
        assert not direct.only_forwards(data)


class Node:
    """What Flower's loop hands to `_pull_and_store_message`, with one message that waits."""

    def __init__(self, fab: bytes, **settings: Any) -> None:
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.supernode.nodestate import NodeStateFactory

        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = RUN, 1, 1
        message = Message(wire.content({"a": 1}, {"w": np.zeros(3, np.float32)}), NODE, "train")
        message.metadata.__dict__["_message_id"] = message.object_id
        self.parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        self.waiting, self.confirmed = [(message, get_object_tree(message))], []
        factory = NodeStateFactory(ObjectStoreFactory())
        self.state, self.store = factory.state(), factory.objectstore_factory.store()
        self.state.set_node_id(NODE)
        self.given: dict[str, Any] = {
            "state": self.state, "object_store": self.store, "trusted_entities": None,
            "node_config": {"home": "h", "policy": "p", "partition-id": 0, "trainer": "/nowhere", **settings},
            "receive": lambda: self.waiting.pop() if self.waiting else None,
            "get_run": lambda run: SimpleNamespace(fab_hash="x"),
            "get_fab": lambda name, run: SimpleNamespace(content=fab),
            "pull_object": lambda run, name: self.parts[name],
            "confirm_message_received": lambda run, name: self.confirmed.append(name),
        }  # fmt: skip

    def reply(self) -> Any:
        """The reply that the loop would send now."""
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree  # type: ignore[attr-defined]
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        (found,) = self.state.get_messages_legacy(is_reply=True)
        tree = self.store.get_object_tree(found.metadata.message_id)
        parts = {part.object_id: self.store.get(part.object_id) for part in iterate_object_tree(tree)}
        return inflate_object_from_contents(found.metadata.message_id, parts)


def never(**_: Any) -> int | None:
    raise AssertionError("Flower's own way was taken")


def test_the_trainer_is_asked_and_neither_app_nor_process_is_started(fab: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ask(path: str, kind: str, facts: Any, arrays: Any) -> Any:
        asked.append((path, kind, facts["a"], arrays["w"].tolist()))
        time.sleep(0.2)
        return {"status": "ok"}, {"update": np.ones(2, np.float32)}

    monkeypatch.setattr(trainer, "ask", ask)
    node, came = Node(fab), []
    number = node.waiting[0][0].metadata.message_id
    pull = direct.answering(never, lambda: pytest.fail("a SuperExec was started"), lambda: came.append(1))
    assert pull(**node.given) == RUN and came == [1] and node.confirmed == [number]
    assert asked == [("/nowhere", "round", 1, [0, 0, 0])]
    facts, arrays = wire.read(node.reply())
    assert facts["status"] == "ok" and arrays["update"].tolist() == [1, 1]
    assert node.state.get_message_processing_duration(number) < 0.1  # how long the trainer took is not told
    assert pull(**node.given) is None and came == [1]


def test_an_error_is_told_by_its_kind_alone(fab: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any) -> Any:
        raise ValueError("row 7 is odd")

    monkeypatch.setattr(trainer, "ask", ask)
    node = Node(fab)
    assert direct.answering(never, lambda: None, lambda: None)(**node.given) == RUN
    reply = node.reply()
    assert reply.has_error() and reply.error.reason == "ValueError"


@pytest.mark.parametrize("why", ["another app", "no trainer", "signed apps only"])
def test_all_else_is_left_to_flower(why: str, fab: bytes) -> None:
    node = Node(changed(fab, "fedveil_run/client_app.py", "x = 1") if why == "another app" else fab)
    if why == "no trainer":
        del node.given["node_config"]["trainer"]
    if why == "signed apps only":
        node.given["trusted_entities"] = {"a": "b"}
    waiting, order = node.waiting[0], []

    def plain(**given: Any) -> int | None:
        order.append("plain")
        assert given["receive"]() == waiting
        return 3

    assert direct.answering(plain, lambda: order.append("executor"), lambda: None)(**node.given) == 3
    assert order == ["executor", "plain"]


def test_parts_that_cannot_be_fetched_lose_a_message_and_not_the_node(fab: bytes) -> None:
    node = Node(fab)

    def gone(*_: Any) -> bytes:
        raise RuntimeError("gone")

    node.given["pull_object"] = gone
    assert direct.answering(never, lambda: None, lambda: None)(**node.given) is None
    assert not node.state.get_messages_legacy(is_reply=True)


def test_looks_for_messages_are_frequent_after_one_and_rare_in_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(lightnode.time, "monotonic", lambda: now)
    clock = lightnode._Clock()
    assert clock.pause(3) == lightnode.LONGEST_LOOK and clock.pause(0.5) == lightnode.SHORT and clock.pause(7) == 7
    clock.came()
    waited, looks = 0.0, 0
    while waited < 60:
        now, waited, looks = now + clock.pause(3), waited + clock.pause(3), looks + 1
    assert looks < 45 and math.isclose(clock.pause(3), lightnode.LONGEST_LOOK)
    clock.came()
    assert clock.pause(3) == lightnode.LOOK


def test_a_servers_grid_asks_soon_again_for_parts_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.superlink.grid import http_grid

    if not lightnode.known():
        pytest.skip("another version of Flower runs as it is")
    monkeypatch.setattr(http_grid, "pull_objects", http_grid.pull_objects)
    lightnode.quick_grid()
    assert http_grid.pull_objects.keywords == {"initial_backoff": lightnode.SHORT}
