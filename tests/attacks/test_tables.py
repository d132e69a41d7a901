import pytest

from fedveil.attacks.tables import Cell, cells, fill
from fedveil.errors import UserError
from fedveil.learning.recipes import get, with_changes


def test_every_cell_names_a_recipe_that_can_be_built():
    for cell in cells():
        changes = {**dict(cell.changes), **({"noise_on": cell.noise_on} if cell.noise_on else {})}
        with_changes(get(cell.recipe), changes)


def test_cells_are_distinct():
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names))


def test_a_cell_is_measured_once_and_stands_beside_the_published_figure(tmp_path):
    cell = Cell("p3-table-1", "digits", "non-private", method="cpl", paper=1)
    first = fill([cell], tmp_path / "t.jsonl", victims=2, iterations=120)
    again = fill([cell], tmp_path / "t.jsonl", victims=2, iterations=120)
    assert first == again and first[0]["paper"] == 1 and first[0]["ours"] == first[0]["success_rate"] == 1.0


def test_unknown_table_is_a_clear_error():
    with pytest.raises(UserError, match="Did you mean 'p3-table-3'"):
        cells("p3-table3")
