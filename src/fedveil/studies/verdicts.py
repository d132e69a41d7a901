"""What a figure states, as comparisons of numbers, and whether they come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedveil.studies.cells import Row

Word = Literal[
    "holds", "holds as far as it was run", "holds in one of two readings", "holds in one of two readings, as far as it was run",
    "does not hold", "cannot be judged here",
]  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One comparison: the mean of our numbers in some cells against that of others, or against a number.

    A place is words joined by " & " that must all be in the cell's row or column (without regard to case); "=word" must
    be the whole row or the whole column, "!word" must be in neither. "~": equal within the margin; "<" and ">": by more
    than the margin. times: of what is on the right. minus: a place whose mean is taken off the left or the right one.
    reading: the one of the paper's readings that it is about; "" for all.
    part: what of the statement it is about, judged for itself beside the whole. core: without it nothing of the statement holds.
    given: what must come out for this to be judged at all. seeds: "<" and ">" count only beyond twice the standard error of
    the difference, else nothing is judged; "~" fails only if that much more than the margin is between them. luck: what one seed
    may be off by and decide nothing.
    """

    says: str
    left: str
    relation: Literal["<", ">", "~"]
    right: str | float
    margin: float = 0.0
    reading: str = ""
    given: Check | None = None
    seeds: bool = False
    times: float = 1.0
    left_minus: str = ""
    right_minus: str = ""
    part: str = ""
    core: bool = False
    luck: float = 0.0

    @property
    def places(self) -> tuple[str, ...]:
        """Where it takes its numbers from."""
        named = (self.left, self.left_minus, self.right, self.right_minus)
        return tuple(place for place in named if isinstance(place, str) and place)


@dataclass(frozen=True)
class Each:
    """One recipe against another, or a number, in every row and column where both stand: rows whose names are alike but for these
    words. within: a place that the left one must be in. luck: what one seed may differ by and decide nothing; rows of several
    seeds are held to twice the standard error of the difference. A target that was never reached is reached later
    than any other, iterations to it no sooner than the run ended.
    """

    says: str
    left: str
    relation: Literal["<", ">", "~"]
    right: str | float
    margin: float = 0.0
    within: str = ""
    luck: float = 0.01
    reading: str = ""
    part: str = ""
    core: bool = False
    given: Check | None = None


@dataclass(frozen=True)
class Verdict:
    word: Word
    reasons: tuple[str, ...] = ()
    parts: tuple[tuple[str, Word], ...] = ()
    failed: tuple[str, ...] = ()
    """Those of the reasons that do not come out."""
    open: tuple[str, ...] = ()
    """Those that are not judged, or not all of them."""


Came = bool | Literal["partly"] | None
"""Whether a comparison comes out; "partly": of several, some do and the others are open."""
Part = Check | Each


def judge(checks: Sequence[Part], rows: Sequence[Row]) -> Verdict:
    """Whether every comparison comes out; one without numbers leaves its part of the statement open. Where a paper can be read
    in two ways, a statement may hold in one of them; where it has parts, each has its own verdict, too."""
    found = {check: _each(check, rows) if isinstance(check, Each) else _one(check, rows) for check in checks}
    said = {check: f"{check.reading}: {text}" if check.reading else text for check, (_, text) in found.items()}
    came = {check: one for check, (one, _) in found.items()}
    names = dict.fromkeys(check.part for check in checks if check.part)
    parts = tuple((name, _whole({check: one for check, one in came.items() if check.part == name})) for name in names)
    failed = tuple(said[check] for check in said if came[check] is False)
    left = tuple(said[check] for check in said if came[check] in (None, "partly"))
    return Verdict(_whole(came), tuple(said.values()), parts, failed, left)


def _whole(came: Mapping[Part, Came]) -> Word:
    """The word for all these comparisons."""
    readings = list(dict.fromkeys(check.reading for check in came if check.reading)) or [""]
    words = [_word({check: one for check, one in came.items() if check.reading in ("", reading)}) for reading in readings]
    held = [word for word in words if word.startswith("holds")]
    if held and len(held) < len(words):
        return "holds in one of two readings" if "holds" in held else "holds in one of two readings, as far as it was run"
    order: tuple[Word, ...] = ("does not hold", "cannot be judged here", "holds as far as it was run", "holds")
    return min(words, key=order.index)


def _word(came: Mapping[Part, Came]) -> Word:
    if False in came.values():
        return "does not hold"
    if not any(came.values()) or any(check.core and one is None for check, one in came.items()):
        return "cannot be judged here"
    return "holds" if all(one is True for one in came.values()) else "holds as far as it was run"


def _each(check: Each, rows: Sequence[Row]) -> tuple[Came, str]:
    if check.given is not None:
        first, text = _one(check.given, rows)
        if not first:
            return None, f"{check.says}: cannot be judged, for {text}"
    others: dict[tuple[str, str], Row] = {}
    if isinstance(check.right, str):
        others = {(rest, row.column): row for row in rows if (rest := _rest(row.row, check.right)) is not None}
    found: dict[str, tuple[Came, str]] = {}
    for row in rows:
        rest = _rest(row.row, check.left)
        if rest is None or not _inside(check.within, row):
            continue
        other = others.get((rest, row.column)) if isinstance(check.right, str) else check.right
        left, right = _number(row), _number(other)
        if left is not None and right is not None:
            came = _compared(left - right, check, _luck(row, other, check.luck))
            found[", ".join(filter(None, (rest, row.column)))] = came, f"{_shown(left)} against {_shown(right)}"
    if not found:
        return None, f"{check.says}: no numbers that can be compared"
    came_out = [came for came, _ in found.values()]
    yes, no = came_out.count(True), came_out.count(False)
    text = f"{check.says}: {yes} of {len(found)}"
    text += f", {len(found) - yes - no} too near to tell" if yes + no < len(found) else ""
    not_so = [f"{place} {numbers}" for place, (came, numbers) in found.items() if came is False]
    text += f" (not {'; '.join(not_so[:3])}{'; …' if len(not_so) > 3 else ''})" if not_so else ""
    return (False if no else True if yes == len(found) else "partly" if yes else None), text


def _rest(name: str, words: str) -> str | None:
    """What a row's name has beside these words at its begin or its end; None if they are not there."""
    if name == words:
        return ""
    if name.startswith(f"{words}, "):
        return name.removeprefix(f"{words}, ")
    return name.removesuffix(f", {words}") if name.endswith(f", {words}") else None


def _number(row: Row | float | None) -> float | None:
    if not isinstance(row, Row):
        return row
    if row.ours is None and any(why.startswith("never reached") for why in row.why):
        played = dict(row.settings["settings"]) if "settings" in row.settings else {}  # type: ignore[call-overload]
        return float(played["rounds"] * played["local_steps"]) if row.column == "iterations" and played else np.inf
    return row.ours if row.judged else None


def _shown(value: float) -> str:
    return "never" if value == np.inf else f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def _luck(row: Row, other: Row | float | None, luck: float) -> float:
    """What two rows may differ by and decide nothing."""
    two = [one for one in (row, other) if isinstance(one, Row)]
    if any(one.deviation is None for one in two):
        return luck
    return 2 * float(np.sqrt(sum((one.deviation or 0.0) ** 2 / one.seeds for one in two)))


def _compared(apart: float, check: Each, luck: float) -> Came:
    if np.isnan(apart):  # neither gets there
        return None
    if check.relation == "~":
        return True if abs(apart) <= check.margin else None if abs(apart) <= check.margin + luck else False
    ahead = apart if check.relation == ">" else -apart
    ahead -= check.margin
    return True if ahead > luck else False if ahead < -luck else None


def _one(check: Check, rows: Sequence[Row]) -> tuple[Came, str]:
    if check.given is not None:
        first, text = _one(check.given, rows)
        if not first:
            return None, f"{check.says}: cannot be judged, for {text}"
    left = _less(mean_of(check.left, rows), check.left_minus, rows)
    right = _less(mean_of(check.right, rows) if isinstance(check.right, str) else check.right, check.right_minus, rows)
    if left is None or right is None:
        unjudged = any(_inside(place, row) and not row.judged for row in rows for place in check.places)
        return None, f"{check.says}: " + ("cannot be judged, the run without noise did not learn" if unjudged else "no number")
    right *= check.times
    wanted = {"<": "below", ">": "above", "~": "about"}[check.relation]
    about = f"{wanted} {right:.3f}"
    if check.margin and check.relation == "~":
        about += f" within {check.margin:g}"
    elif check.margin:
        about += f", by {check.margin:g}" if check.margin > 0 else f" or no further off than {-check.margin:g}"
    if check.seeds:
        errors = [_error(place, rows) for place in check.places]
        spread = 2 * sum(e**2 for e in errors if e is not None) ** 0.5
        apart = abs(left - right) if check.relation != "~" else abs(left - right) - check.margin
        if (None in errors or apart <= spread) and not (check.relation == "~" and apart <= 0):
            said = "one seed" if None in errors else "within the spread of the seeds"
            return None, f"{check.says}: cannot be judged, {said} ({left:.3f}, should be {about})"
    beyond = abs(left - right) - check.margin if check.relation == "~" else left - right + (
        check.margin if check.relation == "<" else -check.margin)  # fmt: skip
    if abs(beyond) <= check.luck:
        return None, f"{check.says}: too near to tell ({left:.3f}, should be {about})"
    came = {
        "<": left < right - check.margin,
        ">": left > right + check.margin,
        "~": abs(left - right) <= check.margin,
    }[check.relation]
    return came, f"{check.says}: {'yes' if came else 'no'} ({left:.3f}, should be {about})"


def _less(value: float | None, minus: str, rows: Sequence[Row]) -> float | None:
    """A number without the mean of another place."""
    taken = mean_of(minus, rows) if minus else 0.0
    return None if value is None or taken is None else value - taken


def _error(place: str, rows: Sequence[Row]) -> float | None:
    """The standard error of the mean of a place's cells; None where a cell has one seed."""
    cells = [row for row in rows if row.ours is not None and row.judged and _inside(place, row)]
    if any(row.deviation is None for row in cells):
        return None
    return float(np.sqrt(sum((row.deviation or 0.0) ** 2 / row.seeds for row in cells)) / len(cells))


def mean_of(place: str, rows: Sequence[Row]) -> float | None:
    """The mean of our numbers in the cells of a place that can be judged."""
    values = [row.ours for row in rows if row.ours is not None and row.judged and _inside(place, row)]
    return float(np.mean(values)) if values else None


def _inside(place: str, row: Row) -> bool:
    if not place:
        return True
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
SUM, EACH = "noise on the sum", "noise on every example"
TEXT, COMMENT = "S from single examples", "S from the mean gradient"


def _leaks(says: str, place: str, reading: str = "") -> Check:
    return Check(f"{says} leaks", place, ">", HIDDEN, reading=reading)


def _hides(says: str, place: str, reading: str = "") -> Check:
    return Check(f"{says} hides", place, "<", HIDDEN, reading=reading)


TYPE_2, BATCH = "type 2", "type 0&1"
_BATCH = (
    Check("type 0&1 rebuilds LFW's images", "=non-private, type0 & lfw", ">", REBUILT, part=BATCH),
    Check("type 0&1 is nearer to them than the mean image of the data, which is there without any attack (the print's distance, "
          "0.2214, is not)", "type0, distance & lfw", "<", "control: the mean image, distance & lfw", part=BATCH),
)  # fmt: skip
_LFW_SHOWS = Check("an unprotected update of LFW is rebuilt", "=non-private, type0 & lfw", ">", HIDDEN)


def _most(place: str, other: str, reading: str) -> Check:
    """Fed-CDP(decay) hides more than Fed-CDP, which can only be seen where the latter does not hide already."""
    return Check("Fed-CDP(decay) hides more than Fed-CDP", place, "<", other, 0.1, reading,
                 given=Check("Fed-CDP does not hide by itself", other, ">", HIDDEN))  # fmt: skip


def _mechanisms(dataset: str, column: str = "") -> tuple[Check, ...]:
    """Staircase above the two others, beyond the seeds' spread."""
    at = (f" & ={column}" if column else "") + " & !not shuffled" + ("" if "Medical" in dataset else " & !medical")
    return tuple(
        Check(f"{dataset}: Staircase is above {other}", f"{dataset}, Staircase{at}", ">", f"{dataset}, {other}{at}", seeds=True)
        for other in ("Gaussian", "Laplace")
    )


_LEARNS_WITH_FEW = {
    name: Check("with 50 clients the run without noise learns", f"={name.lower()}, without noise, by clients & =50 clients", "~",
                0.97, 0.1)
    for name in ("MNIST", "Medical MNIST")
}  # fmt: skip


def _by(row: str, few: str, many: str, share: str) -> tuple[Check, ...]:
    """P5's Figure 3: what more clients cost, or a higher rate helps, and how soon a share of the images is right."""
    place, soon = f"={row.lower()} & =", f"={row.lower()}, first round with {share} & ="
    if row.endswith("rate"):
        return (
            Check(f"{row}: a higher one is better", place + many, ">", place + few, seeds=True, core=True, part=row),
            Check(f"{row}: a higher one needs fewer rounds (to {share})", soon + many, "<", soon + few, seeds=True, part=row),
        )
    given = _LEARNS_WITH_FEW[row.partition(",")[0]]
    return (
        Check(f"{row}: more, less accuracy", place + many, "<", place + few, given=given, seeds=True, part=row),
        Check(f"{row}: but not substantially", place + many, "~", place + few, 0.05, given=given, seeds=True, core=True,
              part=row),
        Check(f"{row}: more need more rounds (to {share})", soon + many, ">", soon + few, given=given, seeds=True, part=row),
    )


CHECKS: dict[str, tuple[Check, ...]] = {
    "p1-fig1b": (
        *(Check(f"type 2 rebuilds {name}", f"type2 & ={name.lower()}", ">", REBUILT, part=TYPE_2)
          for name in ("MNIST", "CIFAR-10", "LFW")),
        *_BATCH,
    ),
    "p1-fig3": (Check("the norm falls", "=round 100", "<", "=round 1"),),
    "p1-fig4": (
        _leaks("type 2 without protection", "=non-private, type2"),
        _leaks("type 2 under Fed-SDP", "=fed-sdp-client, type2"),
        Check("type 0 under DSSGD leaks as without protection", "=dssgd, type0", "~", "=non-private, type0", 0.1,
              given=_LFW_SHOWS),
        Check("type 0 under Fed-CDP(decay) is below that", "=fed-cdp-decay, type0", "<", "=non-private, type0", 0.1,
              given=_LFW_SHOWS),
        *(_most("=fed-cdp-decay, type2, " + place, "=fed-cdp, type2, " + place, reading)
          for place, reading in (("noise on example", EACH), ("noise on sum", SUM))),
        _hides("type 2 under Fed-CDP(decay)", "=fed-cdp-decay, type2, noise on example", EACH),
        _hides("type 2 under Fed-CDP(decay)", "=fed-cdp-decay, type2, noise on sum", SUM),
    ),
    "p1-fig5": (
        _leaks("pruned by 30%, a plain update", "=non-private, ssim of the attack & pruned 30%"),
        _leaks("pruned by 30%, Fed-SDP's", "=fed-sdp-client, ssim of the attack & pruned 30%"),
        *(
            Check(f"{name} is below Fed-SDP, whatever is pruned", f"={recipe}, {place}, ssim of the attack", "<",
                  "=fed-sdp-client, ssim of the attack", 0.1, reading)
            for name, recipe in (("Fed-CDP", "fed-cdp"), ("Fed-CDP(decay)", "fed-cdp-decay"))
            for place, reading in (("noise on example", EACH), ("noise on sum", SUM))
        ),
        *(_most(f"=fed-cdp-decay, {place}, ssim of the attack", f"=fed-cdp, {place}, ssim of the attack", reading)
          for place, reading in (("noise on example", EACH), ("noise on sum", SUM))),
    ),
    "p2-fig2": tuple(
        Check(f"{name} is rebuilt", f"={name}", ">", REBUILT)
        for name in ("mnist", "fashion_mnist", "cifar10", "lfw")
    ),
    "p2-fig3": tuple(
        check
        for place, reading in (("noise on example", EACH), ("noise on sum", SUM))
        for check in (
            _leaks("C = sigma = 1", f"=c=1, sigma=1, {place}", reading),
            _hides("C = 4, sigma = 6", f"=c=4, sigma=6, {place}", reading),
        )
    ),
    "p2-fig4": (
        Check("DP-baseline stays at 24", "=dp-baseline", "~", 24.0, 0.01),
        *(
            Check(f"{name} falls by more than the decay of its bound and sigma gives by itself", f"={row}{said} & round 100", "<",
                  f"={row}{said} & round 1 (", 0.02, reading, times=share)
            for name, row, share in (("DP-dynS", "dp-dyns", 1 / 2),
                                     ("DP-dyn[S, sigma]", "dp-dyn-s-sigma, sigma0 = 15", 1 / 2 * 4.85 / 15))
            for said, reading in (("", TEXT), (", norm of the mean", COMMENT))
        ),
        *(
            Check("DP-dyn[S, sigma] begins with more noise than DP-baseline",
                  f"=dp-dyn-s-sigma, sigma0 = 15{said} & round 1 (", ">", "=dp-baseline & round 1 (", 0.0, reading)
            for said, reading in (("", TEXT), (", norm of the mean", COMMENT))
        ),
    ),
    "p2-fig5": tuple(
        check
        for place, reading in (("noise on example", EACH), ("noise on sum", SUM))
        for check in (
            _leaks("quantile clipping", f"=quantile-clip, {place}", reading),
            _leaks("AdaClip", f"=adaclip, {place}", reading),
            Check("DP-baseline is below quantile clipping", f"=dp-baseline, {place}", "<", f"=quantile-clip, {place}", 0.1,
                  reading, given=Check("in the first iteration, which is attacked, the two differ", f"=dp-baseline, {place}",
                                       "<", f"=quantile-clip, {place}")),
            Check("DP-baseline is below AdaClip", f"=dp-baseline, {place}", "<", f"=adaclip, {place}", 0.1, reading,
                  given=_leaks("AdaClip", f"=adaclip, {place}")),
            _hides("DP-dyn[S, sigma]", f"=dp-dyn-s-sigma, {place}", reading),
        )
    ),
    "p3-fig2": (
        *(Check(f"type 2 rebuilds {name}", f"=non-private, type2 & ={name.lower()}", ">", REBUILT, part=TYPE_2)
          for name in ("MNIST", "CIFAR-10", "LFW")),
        *_BATCH,
    ),
    "p3-fig3": (
        Check("40% pruned has no effect yet (MNIST, type 0)", "=gradient-pruning 40%, type0 & =mnist", ">", REBUILT),
        Check("beyond 40% it has (MNIST, type 0, 50%)", "=gradient-pruning 50%, type0 & =mnist", "<", REBUILT),
        Check("80% pruned has none yet (LFW, type 0)", "=gradient-pruning 80%, type0 & =lfw", "~", "=non-private, type0 & =lfw",
              0.1, given=_LFW_SHOWS),
        *(Check(f"noise of variance 0.01 on the {what} prevents leakage (type 0)",
                f"=random-noise on the {what}, variance 0.01, type0", "<", HIDDEN) for what in ("update", "gradient")),
        Check("and costs accuracy (LFW)", "=random-noise on the update, variance 0.01, accuracy", "<", "=non-private, accuracy",
              0.05),
        Check("DSSGD, which shares a tenth, resists no better than pruning by 90% (MNIST, type 0)", "=dssgd, type0 & =mnist", ">",
              "=gradient-pruning 90%, type0 & =mnist", -0.1),
        _leaks("type 2 under what acts after training", "=gradient-pruning 80%, type2 & =mnist"),
        _leaks("type 2 under Fed-SDP", "=fed-sdp-client, type2 & =mnist"),
        _leaks("type 2 under Fed-CDP with less noise (C = σ = 1, our choice)", "noise on example, c = σ = 1, type2", EACH),
        _hides("type 2 under Fed-CDP at C = 4, σ = 6", "=fed-cdp, noise on example, type2", EACH),
        Check("type 2 under Fed-CDP hides (with less noise as with more, type 2 reads none of it, so that both settings hide or "
              "both leak: judged once)", "=fed-cdp, type2", "<", HIDDEN, reading=SUM),
        Check("and loses accuracy (LFW)", "=fed-cdp, noise on example, accuracy", "<", "=non-private, accuracy", 0.05),
    ),
    "p3-fig4": (
        _hides("type 0 under Fed-SDP", "=fed-sdp, type0-sanitised & =mnist"),
        _leaks("type 1 under Fed-SDP", "=fed-sdp, type1 & =mnist"),
        _leaks("type 2 under Fed-SDP", "=fed-sdp, type2"),
        _hides("types 0 and 1 under Fed-alpha-CDP[sigma]", "fed-alpha & !type2 & =mnist"),
        _hides("type 2 under Fed-alpha-CDP[sigma]", "fed-alpha & type2, noise on example", EACH),
        _hides("type 2 under Fed-alpha-CDP[sigma]", "fed-alpha & type2, noise on sum", SUM),
    ),
    "p4-fig3": (
        Check("MNIST: many clients near no noise", "=mnist, ldp-fl & =n=500", "~", "=mnist, non-private & =n=500", 0.03),
        Check("Fashion-MNIST: many clients near no noise", "=fashion-mnist, ldp-fl & =n=500", "~",
              "=fashion-mnist, non-private & =n=500", 0.03),
        *(Check(f"{name}: the gap to no noise shrinks from n = 20 to n = 500", f"={name}, non-private & =n=500".lower(), "<",
                f"={name}, non-private & =n=20".lower(), seeds=True, left_minus=f"={name}, ldp-fl & =n=500".lower(),
                right_minus=f"={name}, ldp-fl & =n=20".lower(), core=True) for name in ("MNIST", "Fashion-MNIST")),
    ),
    "p4-fig4": (
        Check("MNIST: a tenth of the clients does as well", "=mnist, fraction of clients & =0.1", "~",
              "=mnist, fraction of clients & =1", 0.02),
        Check("Fashion-MNIST: it does not", "=fashion-mnist, fraction of clients & =0.1", "<",
              "=fashion-mnist, fraction of clients & =1", 0.02),
        *(Check(f"{name}: all clients near no noise", f"={name.lower()}, fraction of clients & =1", "~",
                f"={name.lower()}, without noise", 0.03) for name in ("MNIST", "Fashion-MNIST")),
        *(Check(f"{name}: more rounds help", f"={name.lower()}, rounds & =10", ">", f"={name.lower()}, rounds & =1")
          for name in ("MNIST", "Fashion-MNIST")),
        Check("CIFAR-10 gains most by rounds", "cifar-10, rounds & =10", ">", "cifar-10, rounds & =1", 0.1),
    ),
    "p4-fig5": (
        Check("MNIST is as good at ε = 0.5 as at 1", "=mnist, ε & =0.5", "~", "=mnist, ε & =1", 0.02),
        Check("MNIST is much lower at ε = 0.1", "=mnist, ε & =0.1", "<", "=mnist, ε & =1", 0.05),
        Check("MNIST at ε = 1 is near no noise", "=mnist, ε & =1", "~", "=mnist, without noise", 0.03),
        Check("Fashion-MNIST is as good at ε = 4 as at 10", "=fashion-mnist, ε & =4", "~", "=fashion-mnist, ε & =10", 0.02),
        Check("Fashion-MNIST is much lower at ε = 1", "=fashion-mnist, ε & =1", "<", "=fashion-mnist, ε & =10", 0.05),
        Check("Fashion-MNIST at ε = 4 is near no noise", "=fashion-mnist, ε & =4", "~", "=fashion-mnist, without noise",
              0.03),
        Check("CIFAR-10 is flat from ε = 5 to 10", "=cifar-10, ε & =10", "~", "=cifar-10, ε & =5", 0.02),
        Check("no fixed range works on CIFAR-10", "cifar-10, fixed range", "<", 0.3),
    ),
    "p5-fig1": (
        Check("Staircase reaches 90% on MNIST in about 25 rounds", "staircase, ε=5, first round with 90%", "~", 25, 10),
        Check("other methods (Gaussian) are below 90% after 100", "=mnist, gaussian, ε=5 & =round 100", "<", 0.9, seeds=True),
        *_mechanisms("MNIST", "round 150"),
        *_mechanisms("Medical MNIST", "round 150"),
        *(Check(f"{name}: Staircase is above NbAFL", f"={name.lower()}, staircase, ε=5 & =round 150", ">",
                f"={name.lower()}, nbafl & =round 150", seeds=True,
                given=Check("NbAFL has left guessing behind", f"={name.lower()}, nbafl & =round 150", ">", guess, 0.1))
          for name, guess in (("MNIST", 0.1), ("Medical MNIST", 0.17))),
        *(Check(f"{name}: Staircase nears no noise", f"={name.lower()}, staircase, ε=5 & =round 150", "~",
                f"={name.lower()}, none & =round 150", 0.03, seeds=True) for name in ("MNIST", "Medical MNIST")),
        Check("Medical MNIST: Staircase converges in about 30 rounds (has the accuracy of round 150 in round 50)",
              "=medical mnist, staircase, ε=5 & =round 50", "~", "=medical mnist, staircase, ε=5 & =round 150", 0.05, seeds=True),
    ),
    "p5-fig2": (
        Check("on public features, Gaussian is better at ε = 2", "gaussian, ε=2 & =all rounds", ">",
              "staircase, ε=2 & =all rounds", seeds=True),
        Check("on public features, Staircase is better at ε = 8", "staircase, ε=8 & =all rounds", ">",
              "gaussian, ε=8 & =all rounds", seeds=True),
    ),
    "p5-fig3": tuple(
        check
        for name, share in (("MNIST", "80%"), ("Medical MNIST", "50%"))
        for by, few, many in ((f"{name}, by clients", "50 clients", "200 clients"),
                              (f"{name}, by sampling rate", "rate 0.01", "rate 0.5"))
        for check in _by(by, few, many, share)
    ),
    "p5-fig4": (
        *(Check(f"Medical MNIST: in round {r} Staircase is above no noise",
                f"=early rounds, staircase at ε=4 on medical mnist & =round {r}", ">",
                f"=early rounds, none on medical mnist & =round {r}", seeds=True) for r in (10, 25, 50)),
        *_mechanisms("MNIST"),
        *_mechanisms("Medical MNIST"),
        *(Check(f"{name}: Staircase rises with ε", f"={name.lower()}, staircase & =ε=8", ">",
                f"={name.lower()}, staircase & =ε=2", seeds=True) for name in ("MNIST", "Medical MNIST")),
    ),
    "p5-fig5": (
        Check("Staircase ends with a smaller error than NbAFL", "staircase & =round 150", "<", "nbafl & =round 150", 0.005,
              given=Check("NbAFL has left guessing the mean behind (RMSE 0.303)", "nbafl & =round 150", "<", 0.303, 0.005)),
        *(Check(f"Staircase has the smaller error in round {r}", f"staircase & =round {r}", "<", f"gaussian & =round {r}", 0.005,
                given=Check(f"noise costs anything in round {r}", f"gaussian & =round {r}", ">", f"none & =round {r}", 0.005,
                            given=Check(f"by round {r} the run without noise has learned", f"none & =round {r}", "<", 0.303,
                                        0.005)))
          for r in (10, 50)),
    ),
    "p5-fig6": (
        Check("the shuffler helps (it cannot here: a mean does not see the order of its terms, and no amplification is granted "
              "to noisy vectors, so that the noise is the same)", "!not shuffled & !none", ">", "not shuffled",
              given=Check("the runs differ at all", "!not shuffled & !none", ">", "not shuffled", 1e-9)),
        *_mechanisms("MNIST"),
        *_mechanisms("Medical MNIST"),
    ),
}  # fmt: skip
