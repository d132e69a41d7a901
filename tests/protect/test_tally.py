"""A look at a table under noise is the mechanism that its event states, and shows no word that one row alone holds."""

import math

import numpy as np
import pytest

from fedveil.keys import derive
from fedveil.privacy.accountants import answer
from fedveil.protect.tally import paid_release, tally


def test_the_event_is_no_better_than_the_noise_that_is_drawn():
    one = tally(9, 300, 4.0)
    assert one.event().noise.multiplier >= 4.0
    assert one.event().noise.multiplier <= one.deviation / math.sqrt(9)  # deviation over what one row can move
    drawn = np.concatenate([one.counts(np.zeros(300), derive(0, "test", k)) for k in range(60)])
    # 18,000 draws: a deviation off by 3 % has probability below 1e-7 (5.7 standard errors of 0.53 %)
    assert drawn.std() == pytest.approx(one.deviation, rel=0.03)


def test_a_word_of_one_row_is_shown_with_a_probability_that_is_paid_for():
    one = tally(1, 100, 0.5, tail=0.05)
    shown = sum(bool(one.shown_words({"rare": 1}, derive(0, "word", k))) for k in range(400))
    assert shown / 400 <= 0.09  # at most 0.05 expected; above 0.09 has probability below 1e-3
    assert one.shown_words({"often": 1000}, derive(0, "often"))
    assert one.event().noise.tail >= 0.05
    assert answer([one.event()], 0.01).epsilon is None  # a tail above delta promises nothing


def test_words_are_not_shown_by_a_look_that_did_not_pay_for_them():
    with pytest.raises(ValueError, match="no words"):
        tally(1, 10, 1.0).shown_words({"a": 5}, derive(0, "x"))


def test_a_look_is_charged_to_every_client_and_observer():
    entry = paid_release(3, tally(2, 10, 1.0).event(), "a look")
    ((clients, claims),) = entry.groups
    assert clients == (0, 1, 2)
    assert {c.observer for c in claims if c.verdict == "sound"} == {"server", "participants", "public"}
    assert {c.verdict for c in claims if c.observer == "client-process"} == {"none"}
