"""What a figure states, as comparisons of numbers, and whether they come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedveil.studies.cells import Row

Word = Literal["holds", "holds as far as it was run", "does not hold", "cannot be judged here"]


@dataclass(frozen=True)
class Check:
    """One comparison: the mean of our numbers in some cells against that of others, or against a number.

    A place is words joined by " & " that must all be in the cell's row or column (without regard to case); "=word" must
    be the whole row or the whole column, "!word" must be in neither. "~": equal within the margin; "<" and ">": by more
    than the margin.
    """

    says: str
    left: str
    relation: Literal["<", ">", "~"]
    right: str | float
    margin: float = 0.0


@dataclass(frozen=True)
class Verdict:
    word: Word
    reasons: tuple[str, ...] = ()


def judge(checks: Sequence[Check], rows: Sequence[Row]) -> Verdict:
    """Whether every comparison comes out; one without numbers leaves its part of the statement open."""
    found = [_one(check, rows) for check in checks]
    reasons = tuple(text for _, text in found)
    if any(came is False for came, _ in found):
        return Verdict("does not hold", reasons)
    if not any(came for came, _ in found):
        return Verdict("cannot be judged here", reasons)
    return Verdict("holds" if all(came for came, _ in found) else "holds as far as it was run", reasons)


def _one(check: Check, rows: Sequence[Row]) -> tuple[bool | None, str]:
    left = mean_of(check.left, rows)
    right = mean_of(check.right, rows) if isinstance(check.right, str) else check.right
    if left is None or right is None:
        return None, f"{check.says}: no number"
    came = {
        "<": left < right - check.margin,
        ">": left > right + check.margin,
        "~": abs(left - right) <= check.margin,
    }[check.relation]
    wanted = {"<": "below", ">": "above", "~": "about"}[check.relation]
    return came, f"{check.says}: {'yes' if came else 'no'} ({left:.3f}, should be {wanted} {right:.3f})"


def mean_of(place: str, rows: Sequence[Row]) -> float | None:
    """The mean of our numbers in the cells of a place."""
    values = [row.ours for row in rows if row.ours is not None and _inside(place, row)]
    return float(np.mean(values)) if values else None


def _inside(place: str, row: Row) -> bool:
    name, column = row.row.lower(), row.column.lower()
    for raw in place.lower().split(" & "):
        word = raw.strip()
        if word.startswith("="):
            came = word[1:] in (name, column)
        elif word.startswith("!"):
            came = word[1:] not in f"{name} ¦ {column}"
        else:
            came = word in f"{name} ¦ {column}"
        if not came:
            return False
    return True


REBUILT, HIDDEN = 0.8, 0.3  # SSIM of an image that came back, and of one that did not

CHECKS: dict[str, tuple[Check, ...]] = {
    "p1-fig1b": (
        Check("type 2 rebuilds MNIST", "type2 & mnist", ">", REBUILT),
        Check("type 2 rebuilds LFW", "type2 & lfw", ">", REBUILT),
        Check("type 0&1 rebuilds LFW", "type0 & lfw", ">", REBUILT),
    ),
    "p1-fig3": (Check("the norm falls", "=round 100", "<", "=round 1"),),
    "p1-fig4": (
        Check("non-private leaks under type 2", "non-private & type2", ">", REBUILT),
        Check("Fed-SDP leaks under type 2", "fed-sdp-client & type2", ">", REBUILT),
        Check("DSSGD leaks under type 0", "dssgd & type0", ">", REBUILT),
        Check("Fed-CDP(decay) hides type 0", "=fed-cdp-decay, type0", "<", HIDDEN),
        Check("Fed-CDP(decay) hides type 2", "=fed-cdp-decay, type2", "<", HIDDEN),
    ),
    "p1-fig5": (
        Check("pruned by 30%, plain updates leak", "non-private, ssim & pruned 30%", ">", REBUILT),
        Check("Fed-CDP resists, whatever is pruned, noise on the sum", "=fed-cdp, ssim of the attack", "<", HIDDEN),
        Check("Fed-CDP resists, noise on each example", "=fed-cdp, noise on example, ssim of the attack", "<", HIDDEN),
        Check("Fed-CDP(decay) too, noise on the sum", "fed-cdp-decay, ssim", "<", HIDDEN),
        Check("Fed-CDP(decay) too, noise on each example", "fed-cdp-decay, noise on example, ssim", "<", HIDDEN),
    ),
    "p2-fig2": tuple(
        Check(f"{name} is rebuilt", f"={name}", ">", REBUILT)
        for name in ("mnist", "fashion_mnist", "cifar10", "lfw")
    ),
    "p2-fig3": (
        Check("C = sigma = 1 leaks", "=c=1, sigma=1", ">", HIDDEN),
        Check("C = 4, sigma = 6 does not", "=c=4, sigma=6", "<", HIDDEN),
    ),
    "p2-fig4": (
        Check("DP-baseline stays at 24", "=dp-baseline", "~", 24.0, 0.01),
        Check("DP-dynS falls", "=dp-dyns & round 100", "<", "=dp-dyns & =round 1 (of 100 steps)"),
        Check("DP-dyn[S, sigma] falls", "=dp-dyn-s-sigma & round 100", "<", "=dp-dyn-s-sigma & =round 1 (of 100 steps)"),
        *(
            Check(f"{name} falls, norm of the mean", f"={row}, norm of the mean & round 100", "<",
                  f"={row}, norm of the mean & =round 1 (of 100 steps)")
            for name, row in (("DP-dynS", "dp-dyns"), ("DP-dyn[S, sigma]", "dp-dyn-s-sigma"))
        ),
    ),
    "p2-fig5": (
        Check("Quantile clipping leaks", "quantile-clip", ">", HIDDEN),
        Check("AdaClip leaks", "adaclip", ">", HIDDEN),
        Check("DP-dyn[S, sigma] hides, noise on the sum", "dp-dyn-s-sigma & !example", "<", HIDDEN),
        Check("DP-dyn[S, sigma] hides, noise on each example", "dp-dyn-s-sigma & example", "<", HIDDEN),
    ),
    "p3-fig2": (
        Check("type 2 rebuilds all", "type2", ">", REBUILT),
        Check("type 0 rebuilds LFW", "type0", ">", REBUILT),
    ),
    "p3-fig3": (
        Check("40% pruned still leaks (MNIST, type 0)", "=gradient-pruning 40%, type0 & mnist", ">", REBUILT),
        Check("80% pruned hides (MNIST, type 0)", "=gradient-pruning 80%, type0 & mnist", "<", REBUILT),
        Check("noise of variance 0.0001 does not help (MNIST, type 0)", "variance 0.0001, type0 & mnist", ">", REBUILT),
        Check("50% pruned still leaks (LFW, type 0)", "=gradient-pruning 50%, type0 & lfw", ">", REBUILT),
        Check("Fed-CDP hides type 0", "=fed-cdp, type0", "<", HIDDEN),
        Check("Fed-CDP at C = σ = 1 leaks type 2", "c = σ = 1, type2", ">", HIDDEN),
        Check("Fed-CDP at C = 4, σ = 6 hides type 2", "=fed-cdp, noise on example, type2", "<", HIDDEN),
        Check("and loses accuracy", "=fed-cdp, noise on example, accuracy", "<", "=non-private, accuracy"),
    ),
    "p3-fig4": (
        Check("Fed-SDP hides type 0", "fed-sdp & type0", "<", HIDDEN),
        Check("Fed-SDP leaks type 1 (MNIST)", "fed-sdp & type1 & mnist", ">", REBUILT),
        Check("Fed-SDP leaks type 2", "fed-sdp & type2", ">", REBUILT),
        Check("Fed-alpha-CDP[sigma] hides types 0 and 1", "fed-alpha & !type2", "<", HIDDEN),
        Check("Fed-alpha-CDP[sigma] hides type 2", "fed-alpha & type2", "<", HIDDEN),
    ),
    "p4-fig3": (
        Check("MNIST: many clients near no noise", "mnist, ldp-fl & !fashion & =n=500", "~",
              "mnist, non-private & !fashion & =n=500", 0.03),
        Check("Fashion-MNIST: many clients near no noise", "fashion-mnist, ldp-fl & =n=500", "~",
              "fashion-mnist, non-private & =n=500", 0.03),
        Check("MNIST: more clients help", "mnist, ldp-fl & !fashion & =n=500", ">", "mnist, ldp-fl & !fashion & =n=20"),
    ),
    "p4-fig4": (
        Check("more rounds help", "rounds & !cifar-10 & =10", ">", "rounds & !cifar-10 & =1"),
        Check("more clients help", "fraction & !cifar-10 & =1", ">", "fraction & !cifar-10 & =0.1"),
        Check("CIFAR-10 gains most by rounds", "cifar-10, rounds & =10", ">", "cifar-10, rounds & =1", 0.1),
    ),
    "p4-fig5": (
        Check("MNIST is flat from ε = 0.5 to 1", "=mnist, ε & =1", "~", "=mnist, ε & =0.5", 0.02),
        Check("MNIST at ε = 1 is near no noise", "=mnist, ε & =1", "~", "=mnist, without noise", 0.03),
        Check("Fashion-MNIST is flat from ε = 4 to 10", "=fashion-mnist, ε & =10", "~", "=fashion-mnist, ε & =4", 0.02),
        Check("Fashion-MNIST at ε = 4 is near no noise", "=fashion-mnist, ε & =4", "~", "=fashion-mnist, without noise",
              0.03),
        Check("CIFAR-10 is flat from ε = 5 to 10", "=cifar-10, ε & =10", "~", "=cifar-10, ε & =5", 0.02),
        Check("no fixed range works on CIFAR-10", "cifar-10, fixed range", "<", 0.3),
    ),
    "p5-fig1": (
        Check("Staircase reaches 90% on MNIST by round 25", "mnist, staircase & !medical & =round 25", ">", 0.9),
        Check("Staircase is above Gaussian on MNIST at the end", "mnist, staircase & !medical & =round 150", ">",
              "mnist, gaussian & !medical & =round 150"),
        Check("Staircase is above Laplace on MNIST at the end", "mnist, staircase & !medical & =round 150", ">",
              "mnist, laplace & !medical & =round 150"),
        Check("Staircase nears no noise", "mnist, staircase & !medical & =round 150", "~",
              "mnist, none & !medical & =round 150", 0.03),
    ),
    "p5-fig2": (
        Check("Gaussian is better at ε = 2", "gaussian, ε=2 & =all rounds", ">", "staircase, ε=2 & =all rounds"),
        Check("Staircase is better at ε = 8", "staircase, ε=8 & =all rounds", ">", "gaussian, ε=8 & =all rounds"),
    ),
    "p5-fig3": (
        Check("more clients are slower", "=200 clients & !without noise", "<", "=50 clients & !without noise"),
        Check("a higher sampling rate is faster", "=rate 0.1 & !without noise", ">", "=rate 0.01 & !without noise"),
    ),
    "p5-fig4": (
        Check("Staircase is above Gaussian", "staircase", ">", "gaussian"),
        Check("Staircase rises with ε", "staircase & =ε=8", ">", "staircase & =ε=2"),
    ),
    "p5-fig5": (
        Check("Staircase has the smaller error early", "staircase & =round 10", "<", "gaussian & =round 10", 0.005),
    ),
    "p5-fig6": (
        Check("the shuffler helps", "staircase & !not shuffled", ">", "staircase & not shuffled"),
        Check("Staircase is above Gaussian", "staircase & !not shuffled", ">", "gaussian & !not shuffled"),
    ),
}  # fmt: skip
