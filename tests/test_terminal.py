"""The README's picture of a terminal: what its script makes of a terminal's bytes."""

from pathlib import Path

from benchmarks.terminal import OUT, shown


def test_a_live_table_that_was_drawn_over_stands_once_and_as_it_was_last():
    said = "\x1b[?25lround 1\r\nsite a\r\n" + 2 * "\x1b[1A\x1b[2K"
    said += "round \x1b[1m2\x1b[0m\r\nsite b\r\n\r\ndone\r\n"
    assert shown(said) == ["round \x1b[1m2\x1b[0m", "site b", "done"]


def test_the_picture_is_of_a_finished_run_names_no_machine_and_fetches_nothing():
    svg = OUT.read_text()
    assert "fedtrain&#160;aggregator" in svg
    assert "finished&#160;after&#160;round" in svg
    assert "/tmp/" not in svg
    assert str(Path.home()) not in svg
    assert "url(http" not in svg
