"""Local SGD of a stack of clients, around a function that returns clipped sums of gradients.

`stacked` and `functional` differ in how they get a batch's clipped sum; batches, noise, momentum, the extra terms and the
figures are the same and live here. Weights of K clients are one matrix [K, P].

Bit for bit the same result for any chunk: nothing in a client's arithmetic may depend on its neighbours in the
stack; with a clip, nothing in an example's on the rest of its batch. Clients are passed through the network together only
if their batches have the same *width*, and a client's width follows from its own rows alone. Padded rows have zero loss
gradient and count nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch

from fedveil.errors import UserError
from fedveil.models.layout import Layout
from fedveil.protect.bounded import BLOCK, MARGIN
from fedveil.protect.clip import Clipped
from fedveil.protect.law import Gaussian, kernel_of
from fedveil.protect.noised import Drawing
from fedveil.training import augment, optimisers
from fedveil.training.contract import ClientWork, LocalPlan, LocalResult
from fedveil.training.torch.many_normals import Normals

Tensor = torch.Tensor
_KEPT = 24 << 20  # bytes; malloc learns from at most 32 MiB
_SMALL = 1 << 12  # rows of a network that go through at once: one for which so many do is small


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's threads cost more than they bring here, and one thread makes results the same everywhere: with two, the bits of a
    product depend on how many clients share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_pages() -> None:
    """A block that comes and goes teaches glibc's malloc to keep blocks of up to its size: otherwise it gives a step's
    temporaries back to the system, which clears their pages again in the next one. Nothing happens with other allocators."""
    torch.empty(_KEPT, dtype=torch.uint8)


@dataclass(frozen=True)
class Clipping(Clipped):
    """How the gradients of one pass are to be clipped. `bound` None: the median of the batch's norms."""

    kind: str  # none | layer | flat
    norm: str = "l2"
    bound: float | None = None
    norms: bool = True  # are per-example norms wanted even though nothing is clipped?
    shift: Tensor | None = None  # AdaClip, [K, P]
    scale: Tensor | None = None
    copies: int = 1  # so many rows one after the other are one example: its gradient is their mean
    wide: bool = True  # must clipped sums be float64? Those of few examples may be float32 (`layers.sum_up`)

    def factors(self, norms: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Factors [K, B, L] for norms [K, B, L] (0 for padded rows), and the bounds [K or 1, 1, L or 1]; float64.

        Formal guarantee: factor * norm <= bound (1 - MARGIN); see protect.bounded.
        """
        bound = self.median(norms, mask) if self.bound is None else norms.new_full((1, 1, 1), self.bound)
        limit = bound * (1 - MARGIN)
        factors = torch.where(norms > limit, limit / norms, 1.0)
        return (factors if mask is None else factors * mask[:, :, None]), bound

    def of(self, client: int) -> Clipping:
        """The same for one client of the stack."""
        if self.shift is None or self.scale is None:
            return self
        here = slice(client, client + 1)
        return replace(self, shift=self.shift[here], scale=self.scale[here])

    @staticmethod
    def median(norms: Tensor, mask: Tensor | None) -> Tensor:
        """Median over the real rows of a batch, [K, 1, L]."""
        if mask is None:
            ordered, count = norms.sort(1).values, norms.new_full((len(norms), 1, 1), norms.shape[1])
        else:
            ordered = norms.masked_fill(mask[:, :, None] == 0, torch.inf).sort(1).values
            count = mask.sum(1)[:, None, None]
        lower, upper = ((count - 1) // 2).clamp(min=0).long(), (count // 2).long()
        shape = (-1, 1, norms.shape[2])
        middle = (ordered.gather(1, lower.expand(shape)) + ordered.gather(1, upper.expand(shape))) / 2
        return torch.where(count > 0, middle, 0.0)


class Pass(NamedTuple):
    """What one pass of a group of clients gave."""

    total: Tensor  # [K, P] sum of gradients, float64 where they are clipped (and `Clipping.wide`)
    loss: Tensor  # [K, B], 0 for padded rows
    norms: Tensor | None  # [K, B, layers or 1], float64
    bound: Tensor | None  # broadcasts against norms
    used: Tensor | None  # [K, B], 1 for rows that count: not padding, and finite if clipped. None: all


class Network(Protocol):
    """A model that can push a group of clients through at once."""

    @property
    def layout(self) -> Layout: ...
    @property
    def rows(self) -> int: ...  # at most so many rows per client and pass (memory, cache)
    def encode(self, flat: Tensor) -> Tensor: ...  # flat order -> the order this network keeps weights in
    def decode(self, own: Tensor) -> Tensor: ...
    def clipped(
        self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, clipping: Clipping, loss: str
    ) -> Pass: ...


class _Figures:
    """Running figures of a chunk; float64, private to the client's side."""

    def __init__(self, clients: int, columns: int, means: int, device: torch.device) -> None:
        zero = torch.zeros(clients, dtype=torch.float64, device=device)
        self.loss, self.below, self.scale = zero, zero.clone(), zero.clone()
        self.norm_sum = zero[:, None].repeat(1, columns)
        self.norm_max = self.norm_sum.clone()
        self.skipped = zero.clone()
        self.of_mean = zero[:, None].repeat(1, means)

    def add(self, members: Tensor | slice, result: Pass, mask: Tensor | None) -> None:
        if result.used is not mask and result.used is not None:
            real = float(result.used.shape[1]) if mask is None else mask.sum(1, dtype=torch.float64)
            self.skipped[members] += real - result.used.sum(1, dtype=torch.float64)
        mask = result.used
        self.loss[members] += result.loss.sum(1, dtype=torch.float64)
        if result.norms is None:
            return
        norms = result.norms if mask is None else result.norms * mask[:, :, None]
        self.norm_sum[members] += norms.sum(1, dtype=torch.float64)
        self.norm_max[members] = torch.maximum(self.norm_max[members], norms.amax(1).double())
        if result.bound is not None:
            below = (result.norms <= result.bound).to(norms.dtype)
            below = below if mask is None else below * mask[:, :, None]
            self.below[members] += below.sum((1, 2), dtype=torch.float64) / norms.shape[2]


def run(
    network: Network,
    start: np.ndarray,
    x: Tensor,
    y: Tensor,
    work: Sequence[ClientWork],
    plan: LocalPlan,
    *,
    dtype: torch.dtype = torch.float32,
    norms: bool = True,
) -> LocalResult:
    """Train the clients of `work` as one stack, or as few as their kinds of vectors allow."""
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for k, one in enumerate(work):
        if len(one.rows) != plan.steps:
            raise UserError(
                f"client {one.client} has rows for {len(one.rows)} steps, but the plan has {plan.steps}."
            )
        kind = tuple(v is not None for v in (one.control, one.anchor, one.shift, one.scale))
        kinds.setdefault(kind, []).append(k)
    with torch.no_grad():
        parts = [
            (members, _stack(network, start, x, y, [work[k] for k in members], plan, dtype, norms))
            for members in kinds.values()
        ]
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([members for members, _ in parts])) if parts else np.zeros(0, int)
    return reorder(join([result for _, result in parts], network.layout, plan), order)


def _stack(
    network: Network,
    start: np.ndarray,
    x: Tensor,
    y: Tensor,
    work: Sequence[ClientWork],
    plan: LocalPlan,
    dtype: torch.dtype,
    norms: bool,
) -> LocalResult:
    device, clients = x.device, len(work)

    def stack(vectors: Sequence[np.ndarray | None]) -> Tensor | None:
        if vectors[0] is None:  # then none is given
            return None
        return network.encode(torch.as_tensor(np.stack(cast("list[np.ndarray]", vectors))).to(device, dtype))

    first = network.encode(torch.as_tensor(np.array(start)).to(device, dtype)[None])
    control, anchor = stack([w.control for w in work]), stack([w.anchor for w in work])
    shift, scale = stack([w.shift for w in work]), stack([w.scale for w in work])
    weights = first.repeat(clients, 1)
    velocity = torch.zeros_like(weights) if plan.momentum else None
    moments = optimisers.begin(plan.optimiser, weights)
    counts = np.stack([(w.rows >= 0).sum(1) for w in work])  # [K, steps]
    widths = np.stack([_widths(c, small=network.rows >= _SMALL) for c in counts])
    rows = torch.as_tensor(_packed_rows(work, plan.steps, int(widths.max(initial=0))), device=device)
    figures = _Figures(clients, 1 if plan.flat else network.layout.layers, plan.measured_means, device)
    noises = _Noise(plan, work, network.layout.size, dtype) if plan.noised else None
    most_rows = int(widths.max(initial=0)) if plan.by_median else max(1, network.rows // plan.augment.copies)
    more = (control, anchor if plan.penalty else None, shift, velocity)
    plain = all(vector is None for vector in more) and not plan.proximal and plan.optimiser.rule == "sgd"

    for step in range(plan.steps):
        batch = _Batch(x, y, rows[step], counts[:, step], widths[:, step], [w.noise_key for w in work], step)
        total, largest, bound_used = _summed(network, batch, plan, norms, weights, shift, scale, most_rows, figures)
        if noises is not None:
            times = plan.noised[step].times(_followed(plan, largest, bound_used, clients), counts[:, step, None])
            times = np.broadcast_to(times, (clients, times.shape[-1] if times.ndim else 1))
            figures.scale += torch.as_tensor(plan.noised[step].deviation(network.layout.size) * times.mean(1)).to(device)
            total = noises.add(network, total, times, step)
        if plan.only_sum:
            return _result(network.decode(total).neg_().to(dtype), figures, counts.sum(1), plan)
        if plain:
            weights.sub_(total.to(dtype), alpha=plan.learning_rate / plan.expected_batch)
            continue
        gradient = total.to(dtype).div_(plan.expected_batch)
        if shift is not None and scale is not None:
            gradient = gradient.mul_(scale).add_(shift)
        _add_terms(gradient, plan, weights, first, anchor, control)
        if plan.optimiser.rule != "sgd":
            weights, moments = optimisers.step(
                plan.optimiser, moments, weights, gradient, plan.learning_rate, step + 1
            )
            continue
        if velocity is not None:
            gradient = velocity.mul_(plan.momentum).add_(gradient)
        weights.sub_(gradient, alpha=plan.learning_rate)
    return _result(network.decode(weights - first), figures, counts.sum(1), plan)


def _add_terms(
    gradient: Tensor, plan: LocalPlan, weights: Tensor, first: Tensor, anchor: Tensor | None, control: Tensor | None
) -> None:
    if plan.proximal:
        gradient.add_(weights - first, alpha=plan.proximal)
    if plan.penalty and anchor is not None:
        gradient.add_(weights - anchor, alpha=plan.penalty)
    if control is not None:
        gradient.add_(control)


@dataclass(frozen=True)
class _Batch:
    """The rows of one step, for all clients of a stack."""

    x: Tensor
    y: Tensor
    rows: Tensor  # [K, width], padded
    counts: np.ndarray  # [K] real rows
    widths: np.ndarray  # [K] rows that are passed through
    keys: list[bytes]
    step: int


def _summed(
    network: Network, batch: _Batch, plan: LocalPlan, norms: bool, weights: Tensor, shift: Tensor | None, scale: Tensor | None,
    most_rows: int, figures: _Figures,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The clipped sums [K, P] of one step and, if wanted, the norms [K] that l2-max follows and the bounds that the batch gave.

    Clients with equally wide batches go through together; a wide batch goes through in parts of `most_rows`."""
    clients, step = len(weights), batch.step
    largest, bound_used = None, None
    groups = _groups(batch.widths)
    total = None if len(groups) == 1 else torch.zeros_like(weights, dtype=torch.float64)
    for width, members in groups:
        everyone = len(members) == clients
        chosen: slice | Tensor = slice(None) if everyone else torch.as_tensor(members, device=weights.device)
        own = weights if everyone else weights[chosen]
        clipping = _clipping(plan, step, norms, wide=width > min(most_rows, BLOCK))
        if shift is not None and scale is not None:
            clipping = replace(clipping, shift=shift[chosen], scale=scale[chosen])
        part: Tensor | None = torch.zeros_like(own, dtype=torch.float64) if width == 0 else None
        for at in range(0, width, max(most_rows, 1)):
            end = min(width, at + most_rows)
            picked = (batch.rows[:, at:end] if everyone else batch.rows[members, at:end]).reshape(-1)
            images, targets = batch.x.index_select(0, picked).to(weights.dtype), batch.y.index_select(0, picked)
            if plan.augment.active:
                images = augment.copies_of(plan.augment, images, [batch.keys[k] for k in members], step, at)
                targets = targets.repeat_interleave(plan.augment.copies, 0)
            mask = _mask(batch.counts[members], at, end, own)
            if hasattr(network, "at"):
                network.at([batch.keys[k] for k in members], step, at)
            result = network.clipped(own, images, targets, mask, clipping, plan.loss)
            part = result.total if part is None else part.add_(result.total)
            figures.add(chosen, result, mask)
            if plan.noised and plan.by_largest and not plan.by_mean:
                largest = result.total.new_zeros(clients, dtype=torch.float64) if largest is None else largest
                largest[chosen] = torch.maximum(largest[chosen], _largest(result))
            if result.bound is not None and plan.by_median:
                if bound_used is None:
                    bound_used = result.bound.new_zeros(clients, 1, result.bound.shape[2])
                bound_used[chosen] = result.bound
        assert part is not None
        if total is None:
            total = part
        else:
            total[chosen] = part.to(total)
    assert total is not None
    if plan.measured_means:
        figures.of_mean[:, step] = _mean_norm(network, total, plan)
    return total, figures.of_mean[:, step] if plan.by_mean else largest, bound_used


class _Noise:
    """The noise of a stack: every client's own, as its plan's `Drawing` draws it."""

    def __init__(self, plan: LocalPlan, work: Sequence[ClientWork], size: int, dtype: torch.dtype) -> None:
        self.plan, self.work, self.size, self.dtype = plan, work, size, dtype
        self.room = np.empty((len(work), size), np.float32)
        fast = kernel_of(plan.noised[0].law) == Gaussian().kernel and plan.grid <= 0
        self.normals = Normals([one.noise_key for one in work], size) if fast else None

    def add(
        self, network: Network, total: Tensor, times: np.ndarray, step: int
    ) -> Tensor:
        """The sums [K, P] with their noise; `times` as wide as the step's drawing, per client [K, 1] or per client and layer."""
        drawing = self.plan.noised[step]
        if drawing.grid > 0:
            flat = network.decode(total).double().cpu().numpy()
            for k, one in enumerate(self.work):
                self.room[k] = drawing.add(flat[k], one.noise_key, step, times[k, 0] if times.shape[1] == 1 else times[k])
            return network.encode(torch.from_numpy(self.room).to(total))
        self._draw(drawing, step)
        drawn = torch.from_numpy(self.room).to(total.device, self.dtype)
        total = total.to(self.dtype)  # float noise: nothing is promised of its last bits
        if self.plan.follows or drawing.at_count:
            wider = torch.tensor(times).to(drawn)
            slices = (slice(None),) if times.shape[1] == 1 else network.layout.layer_slices()
            for column, layer in enumerate(slices):
                drawn[:, layer].mul_(wider[:, column : column + 1])
        return network.add(total, drawn) if hasattr(network, "add") else total.add_(network.encode(drawn))

    def _draw(self, drawing: Drawing, step: int) -> None:
        if self.normals is not None:
            self.normals.draw(step, np.full(len(self.work), drawing.scale, np.float32), self.room)
            return
        for row, one in zip(self.room, self.work, strict=True):
            row[:] = drawing.draw(one.noise_key, step, self.size)


def _packed_rows(work: Sequence[ClientWork], steps: int, width: int) -> np.ndarray:
    """Row numbers [steps, K, width], in each step the real ones first. The padding repeats the step's first
    row: a pass over it cannot meet anything that the client's own data does not contain."""
    out = np.zeros((steps, len(work), width), np.int64)
    for k, one in enumerate(work):
        real = one.rows >= 0
        packed = one.rows
        if (real[:, 1:] > real[:, :-1]).any():
            packed = np.take_along_axis(packed, np.argsort(~real, axis=1, kind="stable"), axis=1)
        used = min(width, packed.shape[1])
        out[:, k, :used] = packed[:, :used]
        out[:, k] = np.where(np.arange(width) < real.sum(1)[:, None], out[:, k], np.maximum(out[:, k, :1], 0))
    return out


def _widths(counts: np.ndarray, small: bool) -> np.ndarray:
    """Width of each step's pass: the count itself below 16 or when it never changes, else at most 1/8 more. For small networks,
    for which a pass costs more than its rows, at least the next multiple of 4. (`bounded.rounding_slack` knows of 3 more.)"""
    if counts.size == 0 or (counts == counts[0]).all():
        return counts
    quantum = np.maximum(4 if small else 1, 2 ** np.floor(np.log2(np.maximum(counts, 1))).astype(int) // 8)
    return -(-counts // quantum) * quantum


def _groups(widths: np.ndarray) -> list[tuple[int, np.ndarray]]:
    return [(int(width), np.flatnonzero(widths == width)) for width in np.unique(widths)]


def _mask(counts: np.ndarray, at: int, end: int, like: Tensor) -> Tensor | None:
    """1 for real rows, 0 for padding, [K, end - at]; None if all are real."""
    if int(counts.min()) >= end:
        return None
    return torch.as_tensor(np.arange(at, end) < counts[:, None]).to(like)


def _clipping(plan: LocalPlan, step: int, norms: bool, wide: bool) -> Clipping:
    bound = None if not plan.clips or plan.by_median else plan.bounds[step]
    wanted = norms or (plan.by_largest and not plan.by_mean)
    return Clipping(plan.clip, plan.clip_norm, bound, wanted, copies=plan.augment.copies, wide=wide)


def _largest(result: Pass) -> Tensor:
    """Largest clipped norm per client, [K]."""
    assert result.norms is not None
    clipped = result.norms if result.bound is None else torch.minimum(result.norms, result.bound)
    clipped = clipped if result.used is None else clipped * result.used[:, :, None]
    return clipped.amax((1, 2))


def _mean_norm(network: Network, total: Tensor, plan: LocalPlan) -> Tensor:
    """Largest layer norm of each client's mean clipped gradient, [K]."""
    sums = network.decode(total).double()
    parts = (slice(None),) if plan.flat else network.layout.layer_slices()
    return torch.stack([torch.linalg.vector_norm(sums[:, part], dim=1) for part in parts]).amax(0) / plan.expected_batch


def _followed(plan: LocalPlan, largest: Tensor | None, bounds: Tensor | None, clients: int) -> np.ndarray | None:
    """The norms that the noise follows, per client [K, 1] or per client and layer (0 for an empty batch), or None."""
    if not plan.follows:
        return None
    seen = (None if largest is None else largest[:, None]) if plan.by_largest else bounds
    if seen is None:
        return np.zeros((clients, 1))
    return np.asarray(seen.reshape(clients, -1).double().cpu().numpy())


def _result(delta: Tensor, figures: _Figures, examples: np.ndarray, plan: LocalPlan) -> LocalResult:
    """Divide sums by counts; clients that met NaN or infinity get zeros."""
    finite = delta.isfinite().all(1) & figures.norm_max.isfinite().all(1) & figures.loss.isfinite()
    keep = finite.cpu().numpy()
    skipped = figures.skipped.cpu().numpy().astype(np.int64) * keep
    used = np.maximum(examples - skipped, 1)

    def clean(values: Tensor, divisor: np.ndarray | int | None = None) -> np.ndarray:
        array = values.cpu().numpy()
        mask = keep.reshape(-1, *[1] * (array.ndim - 1))
        divided = array if divisor is None else array / np.reshape(divisor, (-1, *[1] * (array.ndim - 1)))
        return divided if keep.all() else np.where(mask, divided, np.zeros((), array.dtype))

    below = figures.below if plan.clips else torch.as_tensor(examples, dtype=torch.float64)
    return LocalResult(
        delta=clean(delta),
        finite=keep,
        loss=clean(figures.loss, used),
        norm_mean=clean(figures.norm_sum, used),
        norm_max=clean(figures.norm_max),
        unclipped=clean(below, np.maximum(examples, 1)),
        noise_scale=clean(figures.scale, max(plan.steps, 1)),
        examples=examples,
        below_count=clean(below),
        skipped=skipped,
        mean_gradient_norms=clean(figures.of_mean),
    )


def usable(losses: Tensor, norms: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[K, B], 1 for rows with finite loss [K, B] and norms [K, B, L] that `mask` does not leave out; None if no row
    is broken. A norm that `dtype` cannot hold counts as infinite."""
    finite = losses.isfinite() & (norms <= torch.finfo(dtype).max).all(2)
    if bool(finite.all()):
        return None
    return finite.to(norms) if mask is None else finite * mask


def by_row(mask: Tensor | None, copies: int) -> Tensor | None:
    """A mask of examples [K, B] for the rows of their copies."""
    return mask if mask is None or copies == 1 else mask.repeat_interleave(copies, 1)


def mean_of_copies(rows: Tensor, copies: int) -> Tensor:
    """The means [n, …] of each `copies` rows [n * copies, …], one added after the other: correctly rounded sums have the same
    bits wherever they are computed."""
    if copies == 1:
        return rows
    apart = rows.unflatten(0, (-1, copies))
    total = apart[:, 0].clone()
    for copy in range(1, copies):
        total += apart[:, copy]
    return total.div_(copies)


class OnePass(Protocol):
    """One pass of a group of clients; the captured gradients of the rows in `without` [K, B] are taken for 0."""

    def __call__(
        self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, clipping: Clipping, loss: str,
        without: Tensor | None = None,
    ) -> Pass: ...  # fmt: skip


def passed(
    once: OnePass, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, clipping: Clipping, loss: str
) -> Pass:
    """A pass in which broken examples count for nothing where gradients are clipped."""
    result = once(weights, x, y, mask, clipping, loss)
    if not clipping.bounded or result.norms is None:
        return result
    used = usable(result.loss, result.norms, mask, weights.dtype)
    # A broken example is rare, and in which layer it shows is not known before the end: once more without it.
    return result if used is None else once(weights, x, y, used, clipping, loss, without=used == 0)


def join(parts: Sequence[LocalResult], layout: Layout, plan: LocalPlan) -> LocalResult:
    """Several results as one, in order."""
    if not parts:
        columns = 1 if plan.flat else layout.layers
        none, figures = np.zeros(0), np.zeros((0, columns))
        empty = np.zeros((0, layout.size), np.float32)
        return LocalResult(
            empty,
            np.zeros(0, bool),
            none,
            figures,
            figures,
            none,
            none,
            np.zeros(0, int),
            none,
            np.zeros(0, int),
            np.zeros((0, plan.measured_means)),
        )
    if len(parts) == 1:
        return parts[0]  # updates of large nets are not copied
    names = LocalResult.__dataclass_fields__
    return LocalResult(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def reorder(result: LocalResult, order: np.ndarray) -> LocalResult:
    """The same clients in another order."""
    return LocalResult(**{name: getattr(result, name)[order] for name in LocalResult.__dataclass_fields__})
