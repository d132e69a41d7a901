"""Flower's own SuperNode and SuperExec, started so that a message costs a fork instead of a Python start-up.

    python -m fedveil.flower.lightnode supernode …arguments of flower-supernode…
    python -m fedveil.flower.lightnode superexec …arguments of flower-superexec…

Flower 1.41 starts a fresh `flwr-clientapp` for every message (about a second of one core, mostly imports), looks for
messages every 3 s and for replies every 0.5 s, and none of it can be set. Here the same code runs with shorter waits. A
run whose app only hands messages to the node's trainer needs no ClientApp (`flower.direct`); for any other the imports are
done once in a process that forks for each message. Such a process ends with its message, so nothing of one run is left for
the next. With any other version of Flower this is plain Flower.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import socket
import sys
import time
from typing import Any

VERSION = "1.41.0"
LOOK, LONGEST_LOOK = 0.25, 3.0  # seconds between looks for messages (Flower: 3)
PATIENCE = 4  # a look comes after at most one part in so many of the time since the last message
SHORT = 0.05  # seconds between looks for replies (Flower: 0.5)


def known() -> bool:
    """Whether this Flower is the one that the shortcuts were made for."""
    from importlib.metadata import version

    return version("flwr") == VERSION


class _Clock:
    """The time module for the SuperNode's loop, with shorter waits.

    Looks for messages come often after a message and seldom in a long silence: a fast run waits little, and many nodes that
    have nothing to do leave the SuperLink in peace.
    """

    def __init__(self) -> None:
        self._last = -math.inf

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)

    def came(self) -> None:
        """A message came just now."""
        self._last = time.monotonic()

    def pause(self, seconds: float) -> float:
        """How long to sleep where Flower sleeps so many seconds."""
        if seconds == 3:
            return min(max(LOOK, (time.monotonic() - self._last) / PATIENCE), LONGEST_LOOK)
        return SHORT if seconds == 0.5 else seconds

    def sleep(self, seconds: float) -> None:
        time.sleep(self.pause(seconds))


def quick_grid() -> None:
    """Let a ServerApp ask soon again for parts of a reply that are still on their way (Flower: after a second)."""
    from flwr.superlink.grid import http_grid as inner

    if known():
        inner.pull_objects = functools.partial(inner.pull_objects, initial_backoff=SHORT)  # type: ignore[attr-defined]


def supernode() -> None:
    """flower-supernode with shorter waits, whose SuperExec is the one below."""
    from flwr.supernode import start_client_internal as inner
    from flwr.supernode.cli.flower_supernode import flower_supernode

    if known():
        from flwr.supercore.retry import http_retry

        from fedveil.flower import direct

        start = inner.subprocess.Popen
        waiting: list[list[str]] = []

        class Processes:
            """subprocess, with our SuperExec in the place of Flower's, started when a ClientApp needs it."""

            def __getattr__(self, name: str) -> object:
                import subprocess

                return getattr(subprocess, name)

            @staticmethod
            def Popen(command: list[str], **more: Any) -> object:
                if not command or command[0] != "flower-superexec":
                    return start(command, **more)
                waiting.append([sys.executable, "-m", "fedveil.flower.lightnode", "superexec", *command[1:]])
                return None

        def executor() -> None:
            while waiting:
                start(waiting.pop())

        # An error of the server is worth another try: a node that ends with it is lost to its federation.
        http_retry._RETRYABLE_STATUS_CODES |= {http_retry.httpx.codes.INTERNAL_SERVER_ERROR}
        inner.time = clock = _Clock()  # type: ignore[attr-defined, assignment]
        inner._pull_and_store_message = direct.answering(inner._pull_and_store_message, executor, clock.came)
        inner.subprocess = Processes()  # type: ignore[attr-defined, assignment]
    flower_supernode()


def superexec() -> None:
    """flower-superexec that forks ClientApps from a process which has everything imported."""
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", str(SHORT))
    if known():
        line = start_forker()  # before any thread exists
        from flwr.supercore.constant import TaskType
        from flwr.supercore.superexec.executor import subprocess_executor as inner
        from flwr.supercore.superexec.executor.types import LaunchResult

        plain = inner.SubprocessExecutor.launch

        def launch(self: Any, spec: Any) -> Any:
            if spec.task_type != TaskType.CLIENT_APP:
                return plain(self, spec)
            arguments = ["--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
            if spec.insecure:
                arguments.append("--insecure")
            elif spec.root_certificates_path is not None:
                arguments += ["--root-certificates", spec.root_certificates_path]
            if spec.parent_pid is not None:
                arguments += ["--parent-pid", str(spec.parent_pid)]
            try:
                line.sendall(json.dumps(arguments).encode() + b"\n")
            except OSError:
                return plain(self, spec)
            return LaunchResult.accepted()

        inner.SubprocessExecutor.launch = launch  # type: ignore[method-assign]
    from flwr.supercore.cli.flower_superexec import flower_superexec

    flower_superexec()


def start_forker() -> socket.socket:
    """Fork a process that imports what ClientApps need and forks one of itself per line; returns the line to it."""
    mine, its = socket.socketpair()
    if os.fork() == 0:
        mine.close()
        with contextlib.suppress(KeyboardInterrupt):
            _forker(its)
        os._exit(0)
    its.close()
    return mine


def _forker(line: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no burial
    import flwr.clientapp
    import flwr.supernode.cli.flwr_clientapp
    import flwr.supernode.runtime.run_clientapp  # noqa: F401

    import fedveil.flower.owner
    import fedveil.flower.trainer
    import fedveil.flower.wire  # noqa: F401

    with line.makefile("rb") as lines:
        for text in lines:
            if os.fork() == 0:
                lines.close()
                line.close()
                _clientapp(json.loads(text))


def _clientapp(arguments: list[str]) -> None:
    """Be `flwr-clientapp` for one message."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = ["flwr-clientapp", *arguments]
    code = 1
    try:
        flwr_clientapp()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    kind, *rest = sys.argv[1:] or [""]
    sys.argv = [f"flower-{kind}", *rest]
    if kind not in ("supernode", "superexec"):
        raise SystemExit("usage: python -m fedveil.flower.lightnode supernode|superexec …")
    {"supernode": supernode, "superexec": superexec}[kind]()


if __name__ == "__main__":
    main()
