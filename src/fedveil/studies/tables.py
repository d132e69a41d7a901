"""What the papers say about their tables, in our words, as comparisons; and how many of a table's numbers come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedveil.studies.cells import Row
from fedveil.studies.verdicts import COMMENT, EACH, SUM, TEXT, Check, Each, Part

FORMULAS = ("epsilon", "stop", "spend")
NEAR = 0.0105  # a printed number up to 1 reproduces within a hundredth, a larger one to a unit of its last digit
RATIO = 0.1  # of times: what a machine does by itself
SEEDS_OF_ITERATIONS = 2500.0  # twice the spread of P2's DP-baseline over three seeds
AUC = 0.054  # three standard errors of 1,000 attacked rows: twelve are looked at
FOLLOWS = {TEXT: "", COMMENT: ", norm of the mean"}  # P2's readings of S, and what their rows' names add


@dataclass(frozen=True)
class Statement:
    """What a paper says about a table; without comparisons, why it cannot be judged."""

    says: str
    checks: tuple[Part, ...] = ()
    why: str = ""


def _more(*pairs: tuple[str, str], what: str = "is more accurate than", within: str = "", **more: object) -> tuple[Each, ...]:
    return tuple(Each(f"{one} {what} {other}", one, ">", other, within=within, **more) for one, other in pairs)  # type: ignore[arg-type]


def _s(
    *pairs: tuple[str, str],
    relation: Literal["<", ">", "~"] = ">",
    what: str = "is above",
    luck: float = 0.01,
    within: str = "",
    core: bool = False,
    part: str = "",
) -> tuple[Each, ...]:
    """Pairs of P2's recipes in both readings of S; one that ends in ! follows no norm."""

    def name(recipe: str, said: str) -> str:
        return recipe.removesuffix("!") + ("" if recipe.endswith("!") else said)

    return tuple(
        Each(
            f"{one.strip('!')} {what} {other.strip('!')}",
            name(one, said),
            relation,
            name(other, said),
            luck=luck,
            within=within,
            reading=reading,
            core=core,
            part=part,
        )
        for reading, said in FOLLOWS.items()
        for one, other in pairs
    )


def _opens(row: str, what: str, within: str, reading: str = "", part: str = "") -> Each:
    return Each(f"{what}: rebuilt", row, ">", 0.5, within=within, luck=0.0, reading=reading, part=part)


def _shuts(row: str, what: str, within: str, reading: str = "", part: str = "") -> Each:
    return Each(f"{what}: not rebuilt", row, "<", 0.5, within=within, luck=0.0, reading=reading, part=part)


_TWO = "succeeds & !our attack & !l = 100"
_WHOLE = "after a whole round of training"
_ROUND = "succeeds, l = 100"


def _not_dearer(*pairs: tuple[str, str]) -> tuple[Each, ...]:
    return tuple(
        Each(
            f"{one} takes no longer than {other}, but for {RATIO:g}",
            f"{one} over non-private",
            "<",
            f"{other} over non-private",
            -RATIO,
            luck=0.0,
        )
        for one, other in pairs
    )


def _best(recipe: str, others: Sequence[str], within: str = "accuracy") -> tuple[Each, ...]:
    return _more(*((recipe, other) for other in others), within=within)


_ATTACKS = "asr & !mse"
_SCHEDULES = ("linear", "staircase", "exponential", "cyclic")
_PUBLIC = ", public backbone"

_KEEPS = Check(
    "under noise the attacked models keep most of their accuracy",
    "the model of 1000 rows & ε=",
    ">",
    "=the model of 1000 rows, non-private",
    -0.2,
)


def _members(attack: str) -> tuple[Part, ...]:
    """That an attack finds members without noise and none under it; Shokri's, whose models are small, only if they still work."""
    given, core = (_KEEPS, True) if attack == "shokri" else (None, False)
    return (
        Check(f"{attack} finds members without noise", f"={attack}, non-private & =auc", ">", 0.6, part=attack),
        *(
            Each(f"{attack} finds none under {name} (within three standard errors)", f"{attack}, {name}", "~", 0.5, AUC, "=auc",
                 luck=0.0, part=attack, core=core, given=given)
            for name in ("Gaussian", "Laplace", "Staircase")
        ),
    )  # fmt: skip


STATEMENTS: dict[str, Statement] = {
    "p1-table2": Statement(
        "Fed-CDP is more accurate than Fed-SDP in every setting and Fed-CDP(decay) more than Fed-CDP; all come near none.",
        (
            *_more(("fed-cdp", "fed-sdp"), ("fed-cdp-decay", "fed-cdp")),
            Each("fed-cdp is within 0.15 of no protection, as printed", "fed-cdp", "~", "non-private", 0.15),
        ),
    ),
    "p1-table3": Statement(
        "Fed-CDP's time stays low (printed: 2.3 to 4.1 times none); the decaying bound costs nothing more.",
        (
            Each("fed-cdp takes at most the printed 4.1 times", "fed-cdp over non-private", "<", 4.1, luck=RATIO),
            *_not_dearer(("fed-cdp-decay", "fed-cdp")),
        ),
    ),
    "p1-table4": Statement(
        "A bound in the middle (2 to 6) is best, a larger or smaller one costs accuracy.",
        tuple(
            Check(f"{d}: C = 4 is better than C = {c}", f"={d.lower()} & =c=4", ">", f"={d.lower()} & =c={c}", luck=0.01)
            for d in ("MNIST", "CIFAR-10", "LFW", "Adult", "Cancer")
            for c in ("0.5", "8")
        ),
    ),
    "p1-table5": Statement(
        "More noise costs accuracy.",
        tuple(
            Check(f"{d}: σ = 6 is below σ = 0.5", f"={d.lower()} & =sigma=6", "<", f"={d.lower()} & =sigma=0.5", luck=0.01)
            for d in ("MNIST", "CIFAR-10", "LFW", "Adult", "Cancer")
        ),
    ),
    "p1-table7": Statement(
        "Without protection all types rebuild the images; Fed-SDP at the client leaves type 2 open; Fed-CDP resists all.",
        (
            _opens("type0&1, non-private", "no protection, type 0&1", _TWO),
            _opens("type2, non-private", "no protection, type 2", _TWO),
            _opens("type0&1, non-private", "no protection, type 0&1 after a whole round", _ROUND, part=_WHOLE),
            _shuts("type0&1, fed-sdp-client", "Fed-SDP, type 0&1", _TWO),
            _opens("type2, fed-sdp-client", "Fed-SDP, type 2", _TWO),
            *(
                check
                for recipe in ("fed-cdp", "fed-cdp-decay")
                for check in (
                    _shuts(f"type0&1, {recipe}", f"{recipe}, type 0&1", _TWO),
                    _shuts(f"type2, {recipe}, noise on example", f"{recipe}, type 2", _TWO, EACH),
                    _shuts(f"type2, {recipe}, noise on sum", f"{recipe}, type 2", _TWO, SUM),
                )
            ),
        ),
    ),
    "p2-table3": Statement(
        "Plain gradients leak; quantile clipping and AdaClip help a little, DP-baseline much, DP-dyn[S, σ] wholly.",
        (
            _opens("non-private", "no protection", _ATTACKS),
            *(
                check
                for said, reading in (("noise on sum", SUM), ("noise on example", EACH))
                for check in (
                    _opens(f"quantile-clip, {said}", "quantile clipping", _ATTACKS, reading),
                    _opens(f"adaclip, {said}", "AdaClip", _ATTACKS, reading),
                    _shuts(f"dp-baseline, {said}", "DP-baseline", _ATTACKS, reading),
                    _shuts(f"dp-dyn-s-sigma, {said}", "DP-dyn[S, σ]", _ATTACKS, reading),
                )
            ),
        ),
    ),
    "p2-table4": Statement(
        "DP-dynS[l2-max] is above DP-baseline and C_decay on every dataset at every bound; DP-dynS is best.",
        (
            *_s(("dp-dyns-l2max", "dp-baseline!"), ("dp-dyns-l2max", "dp-dyns-c-decay!"), ("dp-dyns", "dp-baseline!")),
            *_s(("dp-dyns", "dp-dyns-l2max"), core=True),
        ),
    ),
    "p2-table5": Statement(
        "At the same ε DP-dynS is the most accurate of the four.",
        _s(("dp-dyns", "dp-baseline!"), ("dp-dyns", "dp-dyns-c-decay!"), ("dp-dyns", "dp-dyns-l2max"), within="=acc", core=True),
    ),
    "p2-table6": Statement(
        "DP-dynS is the first to have the baseline's accuracy, before l2-max, C_decay and the baseline.",
        tuple(
            each
            for pairs, part in (
                ((("dp-dyns", "dp-dyns-l2max"),), "DP-dynS first"),
                ((("dp-dyns-l2max", "dp-dyns-c-decay!"), ("dp-dyns-l2max", "dp-baseline!")), "l2-max before the others"),
            )
            for each in _s(
                *pairs,
                relation="<",
                what="takes fewer iterations than",
                luck=SEEDS_OF_ITERATIONS,
                within="=iterations",
                core=True,
                part=part,
            )
        ),
    ),
    "p2-table7": Statement(
        "With noise of a given size DP-dynS spends least, l2-max is second, both far less than C_decay.",
        _s(
            ("dp-dyns", "dp-dyns-l2max"),
            ("dp-dyns-l2max", "dp-dyns-c-decay!"),
            ("dp-dyns", "dp-dyns-c-decay!"),
            relation="<",
            what="spends less than",
            core=True,
        ),
    ),
    "p2-table8": Statement(
        "A falling σ makes every recipe more accurate at the same ε; DP-dyn[S, σ] is best under each schedule.",
        (
            *_s(
                ("dp-dyn-s-sigma", "dp-dyn-s-l2max-sigma"),
                ("dp-dyn-s-sigma", "dp-dynsigma!"),
                ("dp-dyn-s-sigma", "dp-dyn-s-c-decay-sigma!"),
                core=True,
            ),
            *(
                Check(
                    f"{schedule}: {one} is above {other} with σ = 6",
                    f"={schedule}, {one}{said} & =ma",
                    ">",
                    f"=fixed, {other}{said}",
                    reading=reading,
                    luck=0.01,
                )
                for reading, said in FOLLOWS.items()
                for schedule in ("linear", "exponential", "cyclic")
                for one, other in (("dp-dyn-s-l2max-sigma", "dp-dyns-l2max"), ("dp-dyn-s-sigma", "dp-dyns"))
            ),
            *(
                Check(
                    f"{schedule}: {one} is above {other} with σ = 6",
                    f"={schedule}, {one} & =ma",
                    ">",
                    f"=fixed, {other}",
                    luck=0.01,
                )
                for schedule in ("linear", "exponential", "cyclic")
                for one, other in (("dp-dynsigma", "dp-baseline"), ("dp-dyn-s-c-decay-sigma", "dp-dyns-c-decay"))
            ),
        ),
    ),
    "p2-table9": Statement(
        "DP-dyn[S, σ] spends less than DP-baseline until it has its accuracy, least with an exponential σ.",
        tuple(
            Each(
                f"exponential DP-dyn[S, σ] spends less than {other.partition(',')[0]}",
                f"exponential, dp-dyn-s-sigma{said}",
                "<",
                other,
                within="!iterations",
                reading=reading,
            )
            for reading, said in FOLLOWS.items()
            for other in ("dp-baseline", f"linear, dp-dyn-s-sigma{said}", f"cyclic, dp-dyn-s-sigma{said}")
        ),
    ),
    "p2-table10": Statement(
        "Dynamic parameters cost no time beyond DP-baseline's; a simpler model pays relatively less.",
        (
            *_not_dearer(*((one, "dp-baseline") for one in ("dp-dyns-c-decay", "dp-dyns-l2max", "dp-dyns", "dp-dyn-s-sigma"))),
            Check(
                "DP-baseline costs Purchase-10 relatively less than MNIST",
                "=dp-baseline over non-private & =purchase-10",
                "<",
                "=dp-baseline over non-private & =mnist",
                RATIO,
            ),
        ),
    ),
    "p2-table11": Statement(
        "DP-dyn[S, σ] is more accurate than DP-baseline, quantile clipping and AdaClip.",
        _s(*(("dp-dyn-s-sigma", f"{other}!") for other in ("dp-baseline", "quantile-clip", "adaclip")), within="accuracy"),
    ),
    "p3-table1": Statement(
        "CPL succeeds at least as often as DLG and GradInv and in the fewest iterations.",
        (
            *(
                Each(f"cpl succeeds as often as {other}", "cpl", ">", other, -0.05, within="asr", luck=0.0)
                for other in ("dlg", "gradinv")
            ),
            *(
                Each(f"cpl takes fewer iterations than {other}", "cpl", "<", other, within="iterations")
                for other in ("dlg", "gradinv")
            ),
        ),
    ),
    "p3-table3": Statement(
        "Fed-SDP resists type 0, its client variant types 0 and 1, both leave type 2 open; quantile clipping and AdaClip resist "
        "none; Fed-αCDP[σ] all.",
        (
            *(_opens(f"type{tap}, non-private", f"no protection, type {tap}", _TWO) for tap in (0, 1, 2)),
            *(
                _opens(f"type{tap}, non-private", f"no protection, type {tap} after a whole round", _ROUND, part=_WHOLE)
                for tap in (0, 1)
            ),
            _shuts("type0, fed-sdp, sanitised", "Fed-SDP, type 0", _TWO),
            _opens("type1, fed-sdp", "Fed-SDP, type 1", _TWO),
            _opens("type2, fed-sdp", "Fed-SDP, type 2", _TWO),
            _shuts("type0, fed-sdp-client", "Fed-SDP at the client, type 0", _TWO),
            _shuts("type1, fed-sdp-client, after its noise", "Fed-SDP at the client, type 1", _TWO),
            _opens("type2, fed-sdp-client", "Fed-SDP at the client, type 2", _TWO),
            *(
                check
                for said, reading in (("noise on sum", SUM), ("noise on example", EACH))
                for check in (
                    _opens(f"type2, quantile-clip, {said}", "quantile clipping, type 2", _TWO, reading),
                    _opens(f"type2, adaclip, {said}", "AdaClip, type 2", _TWO, reading),
                    _shuts(f"type2, fed-alpha-cdp-sigma, {said}", "Fed-αCDP[σ], type 2", _TWO, reading),
                )
            ),
            *(
                check
                for tap in (0, 1)
                for check in (
                    _opens(f"type{tap}, quantile-clip", f"quantile clipping, type {tap}", _TWO),
                    _opens(f"type{tap}, adaclip", f"AdaClip, type {tap}", _TWO),
                    _shuts(f"type{tap}, fed-alpha-cdp-sigma", f"Fed-αCDP[σ], type {tap}", _TWO),
                )
            ),
        ),
    ),
    "p3-table4": Statement(
        "Fed-αCDP is more accurate than Fed-CDP, and that than Fed-SDP, in every setting.",
        _more(("fed-alpha-cdp", "fed-cdp"), ("fed-cdp", "fed-sdp"), within="%"),
    ),
    "p3-table5": Statement(
        "Fed-αCDP is more accurate than Fed-CDP and Fed-SDP on every dataset at every bound.",
        _more(("fed-alpha-cdp", "fed-cdp"), ("fed-alpha-cdp", "fed-sdp")),
    ),
    "p3-table6": Statement(
        "At the same ε Fed-αCDP is more accurate than Fed-CDP and Fed-SDP.", _best("fed-alpha-cdp", ("fed-cdp", "fed-sdp"))
    ),
    "p3-table7": Statement(
        "Fed-αCDP has Fed-SDP's accuracy long before the last round, and so for a smaller ε.",
        (Each("the target is reached", "fed-alpha-cdp, rounds to the target", "<", 100.0, luck=0.0),),
    ),
    "p3-table8": Statement(
        "At the same ε a falling σ makes Fed-αCDP more accurate than a fixed one, and than Fed-CDP.",
        tuple(
            Each(
                f"{kind} σ is above {other}",
                f"fed-alpha-cdp-sigma-{kind}, accuracy after the printed rounds",
                ">",
                f"{other}, accuracy",
            )
            for kind in _SCHEDULES
            for other in ("fed-alpha-cdp", "fed-cdp")
        ),
    ),
    "p3-table9": Statement(
        "Fed-αCDP costs no time beyond Fed-CDP's, which stays low (printed: 2.3 to 4.1 times none).",
        (
            Each("fed-cdp takes at most the printed 4.1 times", "fed-cdp over non-private", "<", 4.1, luck=RATIO),
            *_not_dearer(("fed-alpha-cdp", "fed-cdp"), ("fed-alpha-cdp-sigma", "fed-cdp")),
        ),
    ),
    "p3-table10": Statement(
        "Fed-αCDP[σ] is more accurate than quantile clipping and AdaClip, and resists the attack, which they do not.",
        (
            *_best("fed-alpha-cdp-sigma", ("quantile-clip", "adaclip")),
            *(
                check
                for said, reading in (("noise on sum", SUM), ("noise on example", EACH))
                for check in (
                    _opens(f"quantile-clip, success rate of type 2, {said}", "quantile clipping", "", reading),
                    _opens(f"adaclip, success rate of type 2, {said}", "AdaClip", "", reading),
                    _shuts(f"fed-alpha-cdp-sigma, success rate of type 2, {said}", "Fed-αCDP[σ]", "", reading),
                )
            ),
        ),
    ),
    "p3-table11": Statement(
        "Under every accountant a falling σ is more accurate than Fed-αCDP and Fed-CDP with a fixed one.",
        tuple(
            Check(
                f"{kind} σ is above {other}",
                f"=fed-alpha-cdp-sigma-{kind}, accuracy after the printed rounds",
                ">",
                f"={other}, accuracy",
                luck=0.01,
            )
            for kind in _SCHEDULES
            for other in ("fed-alpha-cdp", "fed-cdp")
        ),
    ),
    "p4-table1": Statement(
        "On CIFAR-10 only adaptive ranges work; on MNIST both do as well.",
        (
            *(
                Check(
                    f"MNIST, ε = {e}: adaptive is about fixed",
                    f"=mnist, ε={e} & =adaptive",
                    "~",
                    f"=mnist, ε={e} & =fixed",
                    0.01,
                    part="MNIST",
                )
                for e in (5, 10)
            ),
            *(
                Check(
                    f"CIFAR-10, ε = {e}: adaptive is far above fixed",
                    f"=cifar-10, ε={e} & =adaptive",
                    ">",
                    f"=cifar-10, ε={e} & =fixed",
                    0.1,
                    part="CIFAR-10",
                    core=True,
                )
                for e in (5, 10)
            ),
        ),
    ),
    "p5-table4": Statement(
        "Gaussian is better at ε = 2, Staircase at ε = 8 and better than Laplace throughout.",
        (
            Check(
                "on public features, Gaussian is above Staircase at ε = 2",
                f"=gaussian{_PUBLIC} & =ε=2",
                ">",
                f"=staircase{_PUBLIC} & =ε=2",
                seeds=True,
            ),
            Check(
                "on public features, Staircase is above Gaussian at ε = 8",
                f"=staircase{_PUBLIC} & =ε=8",
                ">",
                f"=gaussian{_PUBLIC} & =ε=8",
                seeds=True,
            ),
            Each("on public features, Staircase is above Laplace", f"Staircase{_PUBLIC}", ">", f"Laplace{_PUBLIC}"),
            Check("ResNet-18, Gaussian at ε = 8, reaches what is printed", "=gaussian, resnet-18", ">", 0.732),
        ),
    ),
    "p5-table5": Statement(
        "Training takes long, finding the noise a minute.",
        why="our times are those of one step, times clients and "
        "iterations, on other hardware, so that their growth is no measurement",
    ),
    "p5-table6": Statement(
        "Without noise the attacks find members, under noise none of them does (AUC near 0.5).",
        tuple(each for attack in ("lira", "canary", "shokri") for each in _members(attack)),
    ),
    "p5-table7": Statement(
        "Noise prevents reconstruction, Staircase most.",
        (
            *(
                Check(
                    f"{name}: a rebuilt image is further off than without noise",
                    f"{name}, ε= & =psnr",
                    "<",
                    "=non-private & =psnr",
                    part="noise",
                    given=Check(
                        "without noise it is nearer than the mean image",
                        "=non-private & =psnr",
                        ">",
                        "=control: the mean image & =psnr",
                        1.0,
                    ),
                )
                for name in ("Gaussian", "Laplace", "Staircase")
            ),
            *(
                Each(
                    f"Staircase's error is above {other}'s",
                    "Staircase",
                    ">",
                    other,
                    within="=mse, standardised",
                    part="Staircase most",
                )
                for other in ("Gaussian", "Laplace")
            ),
        ),
    ),
    "p5-table8": Statement(
        "Under noise gender is inferred slightly worse, least with Staircase.",
        tuple(
            Check(
                f"{name}: below no noise",
                f"{name}, ε= & =accuracy",
                "<",
                "=non-private & =accuracy",
                luck=0.01,
                given=Check(
                    "a trained model tells more than the picture itself",
                    "=non-private & =accuracy",
                    ">",
                    "=control: the same network on raw pixels, no model & =accuracy",
                    0.01,
                ),
            )
            for name in ("Gaussian", "Laplace", "Staircase")
        ),
    ),
    "p5-table9": Statement(
        "Noise makes reconstruction by a trained decoder worse.",
        tuple(
            Check(
                f"{name}: the error is above that without noise",
                f"{name}, ε= & =mse & !embeddings & !model",
                ">",
                "=non-private & =mse",
            )
            for name in ("Gaussian", "Laplace", "Staircase")
        ),
    ),
}


def numbers(rows: Sequence[Row]) -> list[str]:
    """How many of our numbers are the printed ones: formulas apart from what was run. One that never comes is none."""
    lines = []
    printed = [row for row in rows if isinstance(row.paper, int | float) and row.judged and not row.timed]
    compared = [row for row in printed if row.difference is not None or _none_came(row)]
    formulas = [row for row in compared if row.settings.get("kind") in FORMULAS]
    for name, found in (("formulas", formulas), ("runs", [row for row in compared if row not in formulas])):
        if found:
            good = sum(reproduces(row) for row in found)
            word = "reproduces" if good == len(found) else "does not reproduce"
            lines.append(f"Numbers of {name}: **{word}** ({good} of {len(found)} of ours).")
    return lines


def _none_came(row: Row) -> bool:
    formula = row.settings.get("kind") in FORMULAS
    return row.ours is None and (formula or any(why.startswith("never reached") for why in row.why))


def reproduces(row: Row) -> bool:
    """Whether a number of ours is the printed one."""
    if row.settings.get("kind") == "time":
        return row.difference is not None and abs(row.difference) <= RATIO
    small = isinstance(row.paper, int | float) and abs(row.paper) <= 1 and row.settings.get("kind") not in FORMULAS
    return bool(row.matches) or (small and row.difference is not None and abs(row.difference) <= NEAR)
