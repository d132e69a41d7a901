"""Local training of a cohort: choose the engine, cut the cohort into chunks, spread them over processes.

`train` returns everybody's result at once, `stream` chunk by chunk in the order of the work list, so that a cohort
needs no more memory than a few chunks. Results are the same bit for bit for any chunk and any number of workers.
"""

from __future__ import annotations

import importlib
import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from types import ModuleType

import numpy as np
import torch
from torch import nn

from fedveil.errors import UserError, did_you_mean
from fedveil.models.layout import layout_of
from fedveil.protect import noise
from fedveil.protect.bounded import check_bound
from fedveil.training import reference
from fedveil.training.contract import ClientWork, Examples, LocalPlan, LocalResult
from fedveil.training.torch import descent, functional, graph, stacked

ENGINES = ("auto", "native", "torch", "stacked", "graph", "functional", "reference")
_NATIVE_CHUNK = 32  # clients per chunk and thread of the native engine: bounds the memory of the results …
_NATIVE_NUMBERS = 1 << 22  # … or more, where all their updates are small (16 MiB): every chunk has its own overhead


def choose(
    module: nn.Module,
    plan: LocalPlan,
    engine: str = "auto",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    like: tuple[Examples, Examples] | None = None,
) -> tuple[str, str]:
    """(name of the engine that will run, one line saying so and why).

    "auto" takes the first that can: native, stacked, graph, functional. "torch" leaves native out. UserError when a
    named engine cannot train this model, or none can. like: x and y, whose form (no row is read) decides whether a module's
    operations can be written down; without them "graph" is only a guess.
    """
    if engine not in ENGINES:
        raise UserError(
            f"engine = '{engine}' is unknown (known: {', '.join(ENGINES)}).{did_you_mean(engine, ENGINES)}"
        )
    impossible = functional.why_not(module)
    if impossible:
        raise UserError(f"This model cannot be trained with per-example gradients: {impossible}.")
    if engine == "reference":
        return engine, "Engine: the naive reference (one example at a time; slow, for checking)."
    if engine in ("auto", "native"):
        no_native = _why_not_native(module, plan, device, dtype)
        if no_native is None:
            return "native", "Engine: native (compiled)."
        if engine == "native":
            raise UserError(f"engine = 'native' cannot be used: {no_native}. Use engine = 'auto'.")
        because = f" (native: {no_native})"
    else:
        because = ""
    no_stack = stacked.why_not(module)
    if engine == "stacked" and no_stack:
        raise UserError(f"engine = 'stacked' cannot be used: {no_stack}. Use engine = 'auto'.")
    if engine == "functional":
        _refuse_draws(module)
        return engine, "Engine: torch.func, one client at a time."
    if not no_stack and engine != "graph":
        return "stacked", f"Engine: torch, clients stacked{because}."
    no_graph = graph.why_not(module)
    if engine == "graph" and no_graph:
        raise UserError(f"engine = 'graph' cannot be used: {no_graph}. Use engine = 'auto'.")
    untraced = graph.untraced(module, like, plan.loss, device, dtype) if like is not None and not no_graph else None
    if no_graph or untraced:
        _refuse_draws(module, f"{untraced}; and " if untraced else "")
        reason = f"Engine: torch.func, slower, because {no_graph or untraced}{because}."
        if untraced:
            warnings.warn(reason, stacklevel=2)
        return "functional", reason
    return "graph", f"Engine: torch, one client at a time{because}."


def _refuse_draws(module: nn.Module, why: str = "") -> None:
    random = functional.draws(module)
    if random:
        raise UserError(f"This model cannot be trained with per-example gradients: {why}{random}.")


def _native_module() -> ModuleType | None:
    try:
        return importlib.import_module("fedveil.training.native")
    except ImportError:
        return None


def _why_not_native(module: nn.Module, plan: LocalPlan, device: str, dtype: torch.dtype) -> str | None:
    if device != "cpu":
        return f"it runs on the CPU, not on {device}"
    if dtype != torch.float32:
        return f"it computes in float32, not {str(dtype).removeprefix('torch.')}"
    native = _native_module()
    return noise.NOT_COMPILED if native is None else native.why_not(module, plan)


def train(
    module: nn.Module,
    start: np.ndarray,
    x: Examples,
    y: Examples,
    work: Iterable[ClientWork],
    plan: LocalPlan,
    *,
    engine: str = "auto",
    workers: int | Workers = 1,
    chunk: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    norms: bool = True,
) -> LocalResult:
    """Train every client in `work` from the same start weights; see `LocalPlan` for what that means.

    workers: processes with one thread each (threads in the native engine), or a `Workers` pool that is kept
    between calls. chunk: clients per stack, None to let the cache decide. norms False: leave out gradient norms where nothing
    needs them (a little faster without privacy).

    Formal guarantee: per step and client, the sum of the clipped gradients changes by at most the step's bound (layer
    clipping: by the bound in each layer) when one example is added or removed, up to float rounding of the
    norm (relative 1e-6 in float32), and carries the noise that the plan states, drawn from the client's
    own key. Nothing is promised about the other figures of the result: they stay on the client's side.
    """
    parts = list(
        stream(module, start, x, y, work, plan, engine=engine, workers=workers, chunk=chunk, device=device, dtype=dtype,
               norms=norms)
    )  # fmt: skip
    return descent.join(parts, layout_of(module), plan)


def stream(
    module: nn.Module,
    start: np.ndarray,
    x: Examples,
    y: Examples,
    work: Iterable[ClientWork],
    plan: LocalPlan,
    *,
    engine: str = "auto",
    workers: int | Workers = 1,
    chunk: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    norms: bool = True,
) -> Iterator[LocalResult]:
    """`train`, one chunk at a time, in order. `work` may be a generator: it is read as far as needed."""
    name, _ = choose(module, plan, engine, device=device, dtype=dtype, like=(x, y))
    _check(plan, start, layout_of(module).size)
    count = workers if isinstance(workers, int) else workers.count
    if count < 1:
        raise UserError(f"workers = {count}: at least one process is needed.")
    waiting = iter(work)
    first = next(waiting, None)
    if first is None:
        return
    clients = chain([first], waiting)
    if name == "native":
        native = _native_module()
        assert native is not None  # `choose` found it
        size = chunk or max(_NATIVE_CHUNK * count, _NATIVE_NUMBERS // max(start.size, 1))
        while part := list(islice(clients, size)):
            yield native.train(module, start, x, y, part, plan, threads=count)
        return
    size = chunk or _chunk(name, module, x, first, plan, len(work) if isinstance(work, Sized) else None)
    chunks = iter(lambda: list(islice(clients, size)), [])
    options: dict[str, object] = (
        {"dtype": dtype}
        if name == "reference"
        else {"dtype": dtype, "chunk": size, "device": device, "norms": norms}
    )
    if device != "cpu":
        x, y = torch.as_tensor(x, device=device), torch.as_tensor(y, device=device)  # once, not per chunk
    if count == 1:
        for part in chunks:
            with descent.one_thread():
                result = _engine(name).train(module, start, x, y, part, plan, **options)
            yield result
        return
    with ExitStack() as stack:
        pool = stack.enter_context(Workers(workers)) if isinstance(workers, int) else workers
        yield from pool.map(name, module, np.asarray(start), x, y, chunks, plan, options)


def _engine(name: str) -> ModuleType:
    return {"stacked": stacked, "graph": graph, "functional": functional, "reference": reference}[name]


def _chunk(name: str, module: nn.Module, x: Examples, first: ClientWork, plan: LocalPlan, total: int | None) -> int:
    """What the cache holds; if the cohort is known, in chunks of nearly equal size."""
    if name != "stacked":
        return 1
    most = stacked.chunk_for(stacked.compile_net(module, x.shape[1:]), stacked.typical_width(first) * plan.augment.copies)
    return most if not total else -(-total // -(-total // most))


def _check(plan: LocalPlan, start: np.ndarray, size: int) -> None:
    """Plans are made by recipes; a wrong one is a bug or a hand-made plan, and must not train quietly."""
    if np.shape(start) != (size,):
        raise UserError(
            f"start has shape {np.shape(start)}, but the model has {size} weights: pass flatten(module)."
        )
    if plan.clips and len(plan.bounds) != plan.steps:
        raise UserError(
            f"plan.bounds has {len(plan.bounds)} values for {plan.steps} steps: give one per step."
        )
    if plan.noised and len(plan.noised) != plan.steps:
        raise UserError(f"plan.noised has {len(plan.noised)} values for {plan.steps} steps: give one per step.")
    if any((one.at_norm > 0) != plan.follows or (one.law, one.grid) != (plan.law, plan.grid) for one in plan.noised):
        raise UserError("plan.noised: all steps have one law and one grid, and at_norm where the scale follows the batch.")
    if plan.clips and not plan.by_median:
        for bound in set(plan.bounds):
            check_bound(bound, "plan.bounds")
    if plan.only_sum and (plan.steps != 1 or plan.noised):
        raise UserError("where = sum releases the sum of one local step, noised later: set local_steps = 1.")
    if not plan.expected_batch > 0:
        raise UserError(f"plan.expected_batch = {plan.expected_batch}: it must be positive.")


# Workers. Processes are spawned, never forked: torch's threads do not survive a fork.


@dataclass(frozen=True)
class _Shared:
    """An array that other processes open by path, without a copy."""

    path: str
    shape: tuple[int, ...]
    dtype: str


class Workers:
    """Processes with one torch thread each, kept alive between calls of `train`.

    with Workers(2) as pool:
        for each round: train(..., workers=pool)

    The arrays x and y are handed over once, by reference in memory, as long as calls pass the same
    objects (do not change them in place meanwhile). The processes end with `close`, with the `with` block, and
    when this process dies, however it dies.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UserError(f"workers = {count}: at least one process is needed.")
        self.count = count
        self._pool = processes(count)
        self._arrays: dict[str, tuple[Examples, _Shared]] = {}
        self._files = ExitStack()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the processes and give the memory back."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._arrays.clear()
        self._files.close()

    def processes(self) -> list[int]:
        """Numbers of the running processes (they start with the first call)."""
        return list(self._pool._processes or {})

    def _share(self, name: str, array: Examples) -> _Shared:
        known = self._arrays.get(name)
        if known is not None and known[0] is array:
            return known[1]
        values = np.ascontiguousarray(torch.as_tensor(array).cpu().numpy())
        path = self._files.enter_context(_shared_file(values))
        self._arrays[name] = (array, _Shared(path, values.shape, values.dtype.str))
        return self._arrays[name][1]

    def map(
        self,
        name: str,
        module: nn.Module,
        start: np.ndarray,
        x: Examples,
        y: Examples,
        chunks: Iterable[Sequence[ClientWork]],
        plan: LocalPlan,
        options: dict[str, object],
    ) -> Iterator[LocalResult]:
        """Results of the chunks in order; at most two chunks per process are under way."""
        data = self._share("x", x), self._share("y", y)
        running: deque[Future[LocalResult]] = deque()
        try:
            for chunk in chunks:
                running.append(self._pool.submit(_work, name, module, start, *data, chunk, plan, options))
                if len(running) >= 2 * self.count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool as problem:
            raise UserError(
                "A worker process ended unexpectedly (often: out of memory, or a script that starts workers "
                "without `if __name__ == '__main__':`). Use fewer workers or a smaller chunk."
            ) from problem
        finally:
            for future in running:
                future.cancel()


@contextmanager
def _shared_file(values: np.ndarray) -> Iterator[str]:
    """The path of a file in memory with these values; it disappears with this process."""
    size = max(values.nbytes, 1)
    with ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("fedveil")
            stack.callback(os.close, descriptor)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="fedveil-"))
            descriptor, path = file.fileno(), file.name
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as memory:
            memory[: values.nbytes] = values.tobytes()
        yield path


def processes(count: int) -> ProcessPoolExecutor:
    """Spawned processes with one torch thread each; they end with this process, however it ends."""
    return ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
    )


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


_opened: dict[_Shared, np.ndarray] = {}  # in a worker: the arrays of the last few calls


def _open(shared: _Shared) -> np.ndarray:
    if shared not in _opened:
        if len(_opened) >= 4:
            _opened.pop(next(iter(_opened)))
        size = int(np.prod(shared.shape))
        flat = np.memmap(shared.path, shared.dtype, "c", shape=size) if size else np.empty(0, shared.dtype)
        _opened[shared] = np.asarray(flat).reshape(shared.shape)
    return _opened[shared]


def _work(
    name: str,
    module: nn.Module,
    start: np.ndarray,
    x: _Shared,
    y: _Shared,
    chunk: Sequence[ClientWork],
    plan: LocalPlan,
    options: dict[str, object],
) -> LocalResult:
    return _engine(name).train(module, start, _open(x), _open(y), chunk, plan, **options)
