"""How the papers count their own recipes: nominal claims with the reason why they are no guarantee.

A recipe carries the counts that its papers print (`Recipe.counted`); our own recipes carry none. Each is a value with one
method, so a study may bring its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedveil.privacy.events import Claim, Event, Noise, Sampling
from fedveil.privacy.papers import condition_words
from fedveil.protect.law import Gaussian
from fedveil.protect.place import Reports, Scope
from fedveil.protect.setting import Moment, Setting

if TYPE_CHECKING:
    from fedveil.protect.recipe import Recipe


class PaperCount(Protocol):
    """A paper's own count of a round."""

    def claims(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> list[Claim]: ...


def _times(values: tuple[float, ...]) -> dict[float, int]:
    counts: dict[float, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


@dataclass(frozen=True)
class LocalSteps:
    """P1 to P3: the moments accountant with the global rate B*K/|D| and the printed sigma, for every local step.

    The papers put q = 0.01 for every dataset, which is B*K/|D| for none but the largest: `Setting.nominal_rate` is theirs.

    Formal guarantee: none, with either rate.
    """

    @staticmethod
    def counts(recipe: Recipe) -> bool:
        """Is anything of this recipe counted so?"""
        return isinstance(recipe.law, Gaussian) and recipe.place.in_steps

    def claims(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> list[Claim]:
        if not self.counts(recipe):
            return []
        own = min(1.0, setting.batch * setting.cohort / setting.examples)
        rate = own if setting.nominal_rate is None else setting.nominal_rate
        reasons = (
            ["steps of one client are not Poisson samples of all clients' data"] if setting.clients > 1 else []
        )
        if setting.nominal_rate is not None:
            reasons.insert(0, f"q = {rate:g} was given by hand, as the paper has it (B*K/|D| of this data is {own:.3g})")
        if recipe.clip.by_layer:
            reasons.append(f"sigma is not divided by the square root of the {setting.layers} layers")
        if recipe.scale.batch:
            reasons.append("the noise scale depends on the data")
        if not recipe.batches.random_size:
            reasons.append("batches are not Poisson samples")
        if said := condition_words(rate, max(now.sigmas)):
            reasons.append(said)
        reason = "as the papers count it; " + "; ".join(reasons) if reasons else "as the papers count it"
        out = []
        for sigma, count in _times(now.sigmas).items():
            event = Event(
                Noise("gaussian", sigma), Sampling("poisson", rate=rate), "add-remove", "example", count
            )
            out.append(Claim("server", "example", "nominal", reason, event, "everyone", "moments"))
            if setting.clients > 1:
                same = "the papers give the example's epsilon to the whole client (joint DP); that changes who sees, not the unit"
                as_client = Event(event.noise, event.sampling, "add-remove", "client", count)
                out.append(Claim("server", "client", "nominal", same, as_client, "everyone", "moments"))
        return out


def takes_rate(recipe: Recipe) -> bool:
    """Is there a count of this recipe that a given rate (`Setting.nominal_rate`) says something about?"""
    return any(isinstance(count, LocalSteps) and count.counts(recipe) for count in recipe.counted)


@dataclass(frozen=True)
class Rounds:
    """Fed-SDP as printed: the moments accountant, q = K/N, one step per round, the printed sigma."""

    def claims(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> list[Claim]:
        if not recipe.place.of_updates or not recipe.clip.bounded:
            return []
        rate = min(1.0, setting.cohort / setting.clients)
        event = Event(
            Noise("gaussian", now.sigmas[0]), Sampling("poisson", rate=rate), "add-remove", "client", 1
        )
        reason = "as the papers count it: whoever sees single updates gets no amplification by client sampling"
        if recipe.clip.by_layer:
            reason += f"; sigma is not divided by the square root of the {setting.layers} layers"
        if said := condition_words(rate, now.sigmas[0]):
            reason += f"; {said}"
        return [Claim("server", "client", "nominal", reason, event, "everyone", "moments")]


@dataclass(frozen=True)
class WholeModel:
    """NbAFL as printed: a sensitivity of 2C/|D_i|."""

    def claims(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> list[Claim]:
        event = Event(
            Noise("gaussian", now.sigmas[0] * size / 2), Sampling("none"), "replace-one", "example", 1
        )
        why = "as printed: 2C/|D_i| is not the sensitivity of several SGD steps"
        return [Claim("server", "example", "nominal", why, event, "holder", "moments")]


@dataclass(frozen=True)
class ReportedWeights:
    """LDP-FL as printed: what adds up depends on what is shuffled."""

    def claims(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> list[Claim]:
        if not isinstance(recipe.place, Reports):
            return []
        one, many = recipe.place.one(recipe, now), recipe.place.many(recipe, setting, now)
        linked = "; unlinkability does not stop composition"
        reason, noise, scope = "as the paper counts it without shuffling", many, "holder"
        if recipe.channel.hides_reports:
            reason, noise, scope = "the paper lets neither weights nor rounds add up" + linked, one, "single"
        elif recipe.channel.hides_senders:
            reason = "the paper lets rounds not add up when models are shuffled" + linked
            scope = "single"
        event = Event(noise, Sampling("none"), "replace-one", "client", 1)
        kept: Scope = "single" if scope == "single" else "holder"
        return [Claim("server", "client", "nominal", reason, event, kept, "basic")]
