"""The list of public reports and the marks on tests agree."""

import pytest

from tests import reports


def test_every_mark_names_a_report_of_the_list_and_contradicts_nothing():
    found = reports.counted()
    assert sum(len(one["handled"]) for one in found.values()) > 0
    assert all(reason for one in found.values() for reason in one["not applicable"].values())


def test_marks_are_found_on_functions_and_on_parameters():
    text = "@pytest.mark.report('A01', 'B02')\ndef test(): pass\nx = pytest.param(1, marks=pytest.mark.report('C03'))"
    assert reports.marked(text) == {"A01", "B02", "C03"}


@pytest.mark.parametrize("planted", ['[not_applicable]\nA02 = "why"', '[not_applicable]\nA01 = "why"'])
def test_an_unknown_report_and_one_that_is_handled_and_excused_are_errors(planted, tmp_path, monkeypatch):
    (tmp_path / "reports.toml").write_text(f'[parts]\nA = "01"\n{planted}')
    (tmp_path / "test_it.py").write_text("@pytest.mark.report('A01')\ndef test(): pass")
    monkeypatch.setattr(reports, "TESTS", tmp_path)
    with pytest.raises(ValueError, match="A0"):
        reports.counted()
