"""A verdict follows from the numbers of a page and from nothing else."""

import math
from dataclasses import replace

import pytest

from fedveil.studies.cells import Row
from fedveil.studies.index import catalogue
from fedveil.studies.reasons import explain
from fedveil.studies.verdicts import CHECKS, Check, judge, mean_of


def row(name, column, ours, deviation=None, seeds=1):
    return Row(name, column, None, ours, None, None, (), "", deviation, seeds)


ROWS = [
    row("fed-cdp, type2", "MNIST", 0.1),
    row("fed-cdp-decay, type2", "MNIST", 0.9),
    row("fed-sdp, type2", "LFW", None),
]


def test_places_name_cells_by_words_whole_names_and_exclusions():
    assert mean_of("type2", ROWS) == pytest.approx(0.5)
    assert mean_of("=fed-cdp, type2", ROWS) == 0.1
    assert mean_of("fed-cdp & !decay", ROWS) == 0.1
    assert mean_of("lfw", ROWS) is None


@pytest.mark.parametrize(
    ("checks", "word"),
    [
        ([Check("a", "=fed-cdp, type2", "<", 0.3)], "holds"),
        ([Check("a", "=fed-cdp, type2", "<", "decay")], "holds"),
        ([Check("a", "decay", "<", 0.3)], "does not hold"),
        ([Check("a", "decay", "<", 0.3), Check("b", "lfw", ">", 0.1)], "does not hold"),
        ([Check("a", "=fed-cdp, type2", "<", 0.3), Check("b", "lfw", ">", 0.1)], "holds as far as it was run"),
        ([Check("b", "lfw", ">", 0.1)], "cannot be judged here"),
        ([Check("a", "decay", "~", 0.88, 0.03)], "holds"),
        ([Check("a", "decay", "~", 0.8, 0.03)], "does not hold"),
        ([], "cannot be judged here"),
    ],
)
def test_every_comparison_must_come_out_and_a_missing_number_leaves_its_part_open(checks, word):
    found = judge(checks, ROWS)
    assert found.word == word and len(found.reasons) == len(checks)


HIGH, LOW = Check("a", "decay", ">", 0.3), Check("a", "decay", "<", 0.3)


@pytest.mark.parametrize(
    ("checks", "word"),
    [
        ([replace(HIGH, reading="x"), replace(LOW, reading="y")], "holds in one of two readings"),
        ([replace(HIGH, reading="x"), replace(HIGH, reading="y")], "holds"),
        ([replace(LOW, reading="x"), replace(LOW, reading="y")], "does not hold"),
        ([LOW, replace(HIGH, reading="x"), replace(LOW, reading="y")], "does not hold"),  # what both need fails in both
        ([replace(HIGH, reading="x"), Check("b", "lfw", ">", 0.1, reading="y")], "holds in one of two readings"),
        (
            [replace(HIGH, reading="x"), Check("b", "lfw", ">", 0.1, reading="x"), replace(LOW, reading="y")],
            "holds in one of two readings, as far as it was run",
        ),
        ([replace(HIGH, given=LOW)], "cannot be judged here"),
        ([replace(HIGH, given=replace(HIGH, given=LOW))], "cannot be judged here"),
        ([replace(HIGH, given=HIGH)], "holds"),
        ([replace(HIGH, given=Check("b", "lfw", ">", 0.1))], "cannot be judged here"),
    ],
)
def test_a_statement_may_hold_in_one_reading_and_is_not_judged_where_what_it_needs_fails(checks, word):
    found = judge(checks, ROWS)
    assert found.word == word
    assert all(text.startswith("x: ") for text, check in zip(found.reasons, checks, strict=True) if check.reading == "x")


def test_a_difference_within_twice_its_standard_error_or_of_one_seed_is_not_judged():
    """By hand: 0.9 - 0.8 = 0.1; the error is sqrt((s² + s²) / 3)."""
    check = Check("a", "=one", ">", "=two", seeds=True)

    def said(s, seeds=3):
        return judge([check], [row("one", "x", 0.9, s, seeds), row("two", "x", 0.8, s, seeds)]).word

    edge = 0.05 * (3 / 2) ** 0.5
    assert said(0.99 * edge) == "holds" and said(1.01 * edge) == "cannot be judged here"
    clear = [row("one", "x", 0.9, 0.01, 3), row("two", "x", 0.8, 0.01, 3)]
    assert judge([replace(check, relation="<")], clear).word == "does not hold"
    assert said(None, 1) == "cannot be judged here"
    # A place of several cells: the error of their mean.
    four = [row(name, c, v, 1.6 * edge, 3) for name, v in (("one", 0.9), ("two", 0.8)) for c in "abcd"]
    assert judge([check], four).word == "holds"


def test_about_as_good_fails_only_beyond_the_margin_and_the_spread_of_the_seeds():
    """By hand: 0.9 - 0.8 = 0.1 with a margin of 0.04; the error of the difference is s · sqrt(2 / 3)."""
    check = Check("a", "=one", "~", "=two", 0.04, seeds=True)

    def said(s, seeds=3):
        return judge([check], [row("one", "x", 0.9, s, seeds), row("two", "x", 0.8, s, seeds)]).word

    edge = 0.03 * (3 / 2) ** 0.5
    assert said(0.99 * edge) == "does not hold" and said(1.01 * edge) == "cannot be judged here"
    assert said(None, 1) == "cannot be judged here"
    assert judge([replace(check, margin=0.11)], [row("one", "x", 0.9), row("two", "x", 0.8)]).word == "holds"


def test_a_place_may_be_held_to_a_share_of_another():
    rows = [row("one", "x", 0.42), row("two", "x", 0.8)]
    assert judge([Check("a", "=one", "<", "=two", times=0.5)], rows).word == "does not hold"
    assert judge([Check("a", "=one", "<", "=two", times=0.53)], rows).word == "holds"


def test_a_gap_is_compared_with_a_gap_and_all_four_places_have_their_spread():
    """By hand: 0.95 - 0.90 = 0.05 is below 0.95 - 0.80 = 0.15 by 0.1; the error of the four is sqrt(4 s² / 3)."""
    check = Check("a", "=plain & few", "<", "=plain & many", seeds=True, left_minus="=noised & few", right_minus="=noised & many")

    def said(s, seeds=3, noised=(0.90, 0.80)):
        rows = [row("plain", column, 0.95, s, seeds) for column in ("few", "many")]
        rows += [row("noised", column, v, s, seeds) for column, v in zip(("few", "many"), noised, strict=True)]
        return judge([check], rows).word

    edge = 0.05 * (3 / 4) ** 0.5
    assert said(0.99 * edge) == "holds" and said(1.01 * edge) == said(None, 1) == "cannot be judged here"
    assert said(0.01, noised=(0.80, 0.90)) == "does not hold"
    assert judge([check], [row("plain", "few", 0.95), row("plain", "many", 0.95)]).word == "cannot be judged here"


def chain(check):
    """A check and whatever must come out first."""
    return [] if check is None else [check, *chain(check.given)]


def test_every_figure_with_cells_is_judged_by_cells_that_it_has():
    figures = {e.id: e for e in catalogue().values() if e.is_figure and e.cells}
    assert set(CHECKS) == set(figures)
    for name, checks in CHECKS.items():
        rows = [row(cell.row, cell.column, 1.0) for cell in figures[name].cells]
        for check in [one for each in checks for one in chain(each)]:
            assert all(mean_of(place, rows) is not None for place in check.places), (name, check)


def test_no_figure_asks_one_and_the_same_cells_for_two_things_that_exclude_each_other():
    for name, checks in CHECKS.items():
        bound = {}
        for check in checks:
            if isinstance(check.right, str) or check.relation == "~":
                continue
            bound.setdefault((check.left, check.reading), {}).setdefault(check.relation, check.right)
        for place, found in bound.items():
            assert not {"<", ">"} <= set(found) or found[">"] < found["<"], (name, place)


def figure(name, numbers, default, deviation=None, seeds=1):
    """The verdict on a figure whose cells have these numbers, by row and column."""
    cells = catalogue()[name].cells
    assert set(numbers) <= {(cell.row, cell.column) for cell in cells}
    return judge(CHECKS[name], [row(c.row, c.column, numbers.get((c.row, c.column), default), deviation, seeds) for c in cells])


def wind(**others):
    names = {"Gaussian": "Wind, Gaussian, ε=5", "Staircase": "Wind, Staircase, ε=5", "none": "Wind, none", "nbafl": "Wind, nbafl"}
    return {(names[name], f"round {r}"): v for name, v in others.items() for r in (10, 50, 150)}


def test_on_wind_a_method_that_only_guesses_the_mean_or_noise_that_costs_nothing_judges_nothing():
    """P5 Fig. 5: guessing the mean has an RMSE of 0.303."""
    def said(gaussian, staircase, none, nbafl):
        return figure("p5-fig5", wind(Gaussian=gaussian, Staircase=staircase, none=none, nbafl=nbafl), 0.19).word

    assert said(0.19, 0.19, 0.19, 0.307) == "cannot be judged here"
    assert said(0.22, 0.20, 0.19, 0.29) == "holds"
    assert said(0.22, 0.22, 0.19, 0.29) == "does not hold"
    assert said(0.22, 0.20, 0.30, 0.29) == "holds as far as it was run"


def test_p4s_gap_to_no_noise_is_that_of_500_clients_against_that_of_20():
    names = ("MNIST", "Fashion-MNIST")
    few = {(f"{name}, ldp-fl", "n=20"): 0.86 for name in names}
    many = {(f"{name}, ldp-fl", "n=500"): 0.88 for name in names}
    for deviation, seeds, numbers, word in (
        (0.001, 3, few | many, "holds"),
        (None, 1, few | many, "cannot be judged here"),  # that many clients are near says nothing about how the gap goes
        (0.1, 3, few | many, "cannot be judged here"),
        (0.001, 3, many, "does not hold"),  # no gap at n = 20, one at n = 500
    ):
        assert figure("p4-fig3", numbers, 0.90, deviation, seeds).word == word


@pytest.mark.parametrize("name", ["p1-fig1b", "p3-fig2"])
def test_a_print_that_is_reached_is_told_from_an_image_that_is_rebuilt(name):
    """The print, a distance of 0.2214, is further from LFW's images than the mean image of the data."""
    printed = {("non-private, type0", "LFW"): 0.29, ("non-private, type0, distance", "LFW"): 0.223,
               ("control: the mean image, distance", "LFW"): 0.165}  # fmt: skip
    found = figure(name, printed, 0.95)
    assert found.word == "does not hold" and found.parts == (("type 2", "holds"), ("type 0&1", "does not hold"))
    assert sum(text.startswith("type 0&1") and ": no (" in text for text in found.reasons) == 2
    rebuilt = printed | {("non-private, type0", "LFW"): 0.95, ("non-private, type0, distance", "LFW"): 0.02}
    assert figure(name, rebuilt, 0.95).word == "holds"


@pytest.mark.parametrize(("deviation", "seeds"), [(None, 1), (0.05, 3)])
def test_p5s_accuracy_by_clients_is_held_to_the_seeds_like_that_by_sampling_rate(deviation, seeds):
    names = ("MNIST", "Medical MNIST")
    numbers = {(f"{name}, by clients", f"{n} clients"): v for name in names for n, v in ((50, 0.77), (200, 0.70))}
    texts = figure("p5-fig3", numbers, 0.97, deviation, seeds).reasons
    clients = [text for text in texts if "by clients" in text]
    assert len(clients) == 6 and all("cannot be judged" in text for text in clients)


def test_a_run_that_is_not_judged_decides_nothing():
    rows = [row("one", "x", 0.9), replace(row("two", "x", 0.5), judged=False)]
    found = judge([Check("a", "=one", ">", "=two")], rows)
    assert found.word == "cannot be judged here" and "the run without noise did not learn" in found.reasons[0]


def test_parts_have_their_own_word_and_without_its_core_a_statement_is_not_judged():
    open_, core = Check("b", "lfw", ">", 0.1), Check("b", "lfw", ">", 0.1, core=True)
    assert judge([HIGH, open_], ROWS).word == "holds as far as it was run"
    assert judge([HIGH, core], ROWS).word == "cannot be judged here" and judge([LOW, core], ROWS).word == "does not hold"
    found = judge([replace(HIGH, part="x"), replace(LOW, part="y")], ROWS)
    assert (found.word, found.parts) == ("does not hold", (("x", "holds"), ("y", "does not hold")))


def test_p2_compares_its_baseline_with_adaclip_only_where_adaclip_leaks():
    hidden = {("adaclip, noise on example", d): 0.1 for d in ("mnist", "fashion_mnist", "cifar10", "lfw")}
    texts = figure("p2-fig5", hidden, 0.02).reasons
    (one,) = [t for t in texts if t.startswith("noise on every example: DP-baseline is below AdaClip")]
    assert "cannot be judged, for AdaClip leaks: no" in one


def test_the_reason_why_nbafl_stays_at_chance_has_the_formulas_numbers():
    """sqrt(2 ln(1.25 / delta)) · (uploads that are seen) · 2C / (rows of a client) / epsilon, by hand."""
    text = explain(("nbafl-noise",))[0]
    wind_noise = math.sqrt(2 * math.log(1.25e6)) * 150 * 2 * 10 / 18100 / 5
    assert f"deviation {wind_noise:.2g} " in explain(("nbafl-wind",))[0] and "without SCAFFOLD" in explain(("nbafl-wind",))[0]
    assert all("by our reading of NbAFL's formula" in one for one in explain(("nbafl-noise", "nbafl-wind")))
    for rows, said in ((6000, "0.48 (MNIST)"), (600, "4.8 (Medical MNIST)")):
        deviation = math.sqrt(2 * math.log(1.25e5)) * 150 * 2 * 10 / rows / 5
        assert said.startswith(f"{deviation:.2g}") and said in text
