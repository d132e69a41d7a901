#!/usr/bin/env python
"""Which tests of an earlier tree are gone, and what holds their contract today: writes docs/tests-moved.md.

    python scripts/tests_moved.py a278334        # the last commit of 0.1, before the code was rebuilt from parts

A test with the same name lives on, wherever its file went (those are only counted). A name that is gone is listed with its
replacement: from REPLACED below where somebody decided, else the test of today with the most similar body, which must share
more than half of its words with the old one. Whatever has neither is listed as "no replacement" for somebody to decide.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from difflib import SequenceMatcher
from io import StringIO
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PAGE = HERE / "docs" / "tests-moved.md"
LIKE = 0.5
# ruff: noqa: E501
# Old name -> "file::name" of today, and what else is to say.
REPLACED = {
    "test_shrinking_keeps_the_share_of_clients_per_round":
        "`tests/studies/test_index.py::test_a_run_is_shrunk_by_its_rounds_alone_and_never_below_those_that_its_control_needs`: clients "
        "are not shrunk any more",
    "test_a_failing_node_does_not_quote_its_data":
        "`tests/flower/test_contract.py::test_trouble_with_the_data_changes_neither_the_form_of_a_reply_nor_the_charge`: unreadable "
        "data no longer fail in a way that could be told",
    "test_results_do_not_depend_on_chunk_size_to_the_last_bit":
        "`tests/federation/test_loop.py::test_the_chunk_size_changes_nothing`: the function under test ran nowhere; the loop that "
        "runs is tested",
    "test_the_weighted_mean_is_the_weighted_mean_and_zero_leaves_out":
        "`tests/federation/test_round.py::test_a_clipped_update_never_exceeds_its_joint_bound`: the weighted mean ran nowhere "
        "and is gone; the mean that runs divides by a fixed number",
    "test_dp_fedavg_clips_each_client_and_divides_by_a_fixed_number":
        "`tests/federation/test_round.py::test_a_clipped_update_never_exceeds_its_joint_bound`: the function under test ran nowhere",
    "test_the_anchor_is_the_present_client_with_the_largest_epsilon":
        "`tests/federation/test_harmonize.py::test_the_anchor_is_the_model_of_the_weakest_client_among_those_present`",
    "test_the_variance_of_the_mean_noise_is_what_is_measured":
        "`tests/protect/test_adaclip.py::test_without_any_gradient_the_scale_does_not_feed_on_its_own_noise`: the formula under test ran "
        "nowhere; the deviation that is subtracted is that of `Noised`",
    "test_a_resilient_start_makes_the_first_noise_as_wide_as_the_fixed_one": "gone with its formula, which nothing called",
    "test_the_agreed_delay_is_the_median_so_one_liar_cannot_move_it_far": "gone with its formula, which nothing called",
    "test_clients_may_have_their_own_budgets_and_mechanisms":
        "gone with its function, which nothing called; clients' own budgets: `tests/federation/test_harmonize.py`",
    "test_shuffled_updates_are_the_same_rows_in_a_keyed_order":
        "`tests/protect/test_channel.py::test_model_shuffling_delivers_in_an_order_that_depends_on_the_key_only`: the function under test ran nowhere",
    "test_discrete_normals_have_their_law":
        "`tests/protect/test_exact.py::test_gaussian_integers_have_their_law`: the sampler is gone, noise on a grid is drawn by `protect.exact`",
    "test_discrete_normals_of_a_fine_grid_are_normal":
        "`tests/protect/test_exact.py::test_wide_gaussian_integers_are_normal_with_even_low_bits`: the sampler is gone",
    "test_the_discrete_stream_does_not_change":
        "`tests/protect/test_exact.py::test_the_integers_do_not_change`: the sampler is gone",
    "test_compiled_discrete_normals_are_the_integers_of_the_definition":
        "`tests/protect/test_exact.py::test_compiled_integers_are_those_of_the_definition`: the sampler is gone",
    "test_our_exponential_is_right_to_a_few_last_bits": "`tests/protect/test_exact.py::test_the_integer_exponential_is_right_to_8_units`",
    "test_group_privacy_and_quantile_split": "`tests/privacy/test_adversarial.py::test_group_privacy`",
    "test_example_noise_is_the_sum_of_one_draw_per_example":
        "`tests/protect/test_recipe.py::test_impossible_combinations_are_refused_with_a_reason`: noise on every example is refused "
        "for laws that do not add up; for Gaussian noise "
        "`tests/protect/test_engines_add_the_noise.py::test_an_update_of_nothing_is_the_claimed_noise_to_the_last_integer`",
    "test_gaussian_noise_of_a_plan_is_its_stream_scaled":
        "`tests/protect/test_noised.py::test_gaussian_noise_is_its_stream_times_the_scale`",
    "test_grid_noise_is_gaussian_with_one_sensitivity":
        "`tests/protect/test_noised.py::test_noise_on_a_grid_has_one_scale_for_all_coordinates`: every law has a form on a grid now",
    "test_without_a_grid_noised_sum_adds_the_step_noise":
        "`tests/protect/test_noised.py::test_gaussian_noise_is_its_stream_times_the_scale`",
    "test_each_product_of_a_batch_has_the_bits_it_has_alone":
        "`tests/training/torch/test_stacked.py::test_each_examples_product_has_the_bits_it_has_alone`",
}  # fmt: skip

Tests = dict[str, tuple[str, str]]  # "file::name" -> (name, source)


def tests_in(path: str, source: str) -> Iterator[tuple[str, tuple[str, str]]]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield f"{path}::{node.name}", (node.name, ast.get_source_segment(source, node) or "")


def before(commit: str) -> Tests:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout

    names = [n for n in git("ls-tree", "-r", "--name-only", commit, "tests").split() if n.endswith(".py")]
    return dict(pair for name in names for pair in tests_in(name, git("show", f"{commit}:{name}")))


def today() -> Tests:
    files = sorted((HERE / "tests").rglob("*.py"))
    return dict(pair for f in files for pair in tests_in(f.relative_to(HERE).as_posix(), f.read_text("utf-8")))


def words(source: str) -> list[str]:
    """A test's tokens: what formatting and line breaks do not change."""
    kinds = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
    try:
        return [t.string for t in tokenize.generate_tokens(StringIO(source).readline) if t.type in kinds]
    except (tokenize.TokenError, IndentationError):
        return source.split()


def nearest(source: str, candidates: Tests, known: dict[str, list[str]]) -> tuple[str, float]:
    mine, best, most = words(source), "", 0.0
    for key in candidates:
        match = SequenceMatcher(None, mine, known[key], autojunk=False)
        if match.real_quick_ratio() > most and match.quick_ratio() > most and (found := match.ratio()) > most:
            best, most = key, found
    return best, most


def changed(old: Tests, new: Tests) -> dict[str, list[str]]:
    """old key -> the tests of today with its name, for those that were rewritten: less than 80 % of their words remain."""
    by_name: dict[str, list[str]] = {}
    for key, (name, _) in new.items():
        by_name.setdefault(name, []).append(key)
    out = {}
    for key, (name, source) in old.items():
        alike = [SequenceMatcher(None, words(source), words(new[k][1]), autojunk=False).ratio() for k in by_name.get(name, ())]
        if alike and max(alike) < 0.8:
            out[key] = by_name[name]
    return out


def page(commit: str) -> tuple[str, list[str]]:
    old, new = before(commit), today()
    names = {name for name, _ in new.values()}
    gone = {key: value for key, value in old.items() if value[0] not in names}
    known = {key: words(source) for key, (_, source) in new.items()}
    rows, open_ones = [], []
    for key, (name, source) in sorted(gone.items()):
        if name in REPLACED:
            rows.append((key, REPLACED[name]))
            continue
        best, ratio = nearest(source, new, known)
        rows.append((key, best if ratio >= LIKE else "no replacement"))
        if ratio < LIKE:
            open_ones.append(f"{key} (nearest: {best}, {ratio:.2f})")
    rewritten = changed(old, new)
    lines = [
        "# Tests that moved",
        "",
        f"Made by `python scripts/tests_moved.py {commit}` from the tests of the tree before the code was rebuilt from parts and",
        f"those of today, {len(old)} tests then. {len(old) - len(gone)} live on under their name ({len(rewritten)} of them rewritten, "
        f"second list), {len(gone)} are gone or renamed",
        "(first list). Replacements were matched by the likeness of their code, or decided by hand; `tests/test_tests_moved.py` checks that each exists.",
        "",
        "## Gone or renamed",
        "| test then | what holds it today |",
        "|---|---|",
        *(f"| `{key}` | {f'`{to}`' if '::' in to and '`' not in to else to} |" for key, to in rows),
        "",
        "## Rewritten under the same name",
        "| test then | today |",
        "|---|---|",
        *(f"| `{key}` | {', '.join(f'`{k}`' for k in keys)} |" for key, keys in sorted(rewritten.items())),
        "",
    ]
    return "\n".join(lines), open_ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    text, open_ones = page(parser.parse_args().commit)
    PAGE.write_text(text, "utf-8")
    for one in open_ones:
        print(f"no replacement: {one}", file=sys.stderr)


if __name__ == "__main__":
    main()
