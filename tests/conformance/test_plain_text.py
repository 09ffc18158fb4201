"""Text for a terminal does nothing to it."""

from __future__ import annotations

from kdtr.conformance.plain_text import engine_name, entry, name_text, printable_lines, table
from kdtr.contract import EngineInfo, NumericProfile


def test_a_name_is_printable_and_cut() -> None:
    assert "mine" == name_text("mine")
    assert "a\\x1b[31mb\\u202e" == name_text("a\x1b[31mb\u202e")
    assert f"{'x' * 60}... (61 characters)" == name_text("x" * 61)
    assert "x" * 60 == name_text("x" * 60)


def test_an_engine_may_call_itself_anything() -> None:
    info = EngineInfo("a\rb", "\x9b1", "cpu\t0", NumericProfile(), frozenset())

    assert "a\\rb \\x9b1 on cpu\\t0" == engine_name(info)


def test_a_line_break_begins_a_line() -> None:
    assert ["one", "two\\x07", "three"] == printable_lines(["one\ntwo\x07", "three"])


def test_an_entry_keeps_to_the_width_and_leaves_long_words_whole() -> None:
    assert ["  at        row 2", "            of 4"] == entry("at", "row 2 of 4", 18)
    assert ["  run       " + "x" * 40] == entry("run", "x" * 40, 20)


def test_a_table_aligns_numbers_right_and_has_no_blanks_at_the_end() -> None:
    assert ["a    1  x", "bc  22"] == table([("a", 1, "x"), ("bc", 22, "")], numbers=(1,))
