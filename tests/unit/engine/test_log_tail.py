"""The end of a server's log."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.engine.log_tail import format_log_tail, read_log_tail


def test_the_last_lines_are_returned_without_empty_ones(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("one\n\ntwo  \n\nthree\n\n")
    assert read_log_tail(log, num_lines=2) == "two\nthree"
    assert read_log_tail(log) == "one\ntwo\nthree"


def test_a_long_log_is_not_read_whole(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"a" * 1_000_000 + b"\n\xc3\xa4 end\n")
    tail = read_log_tail(log)
    assert tail.endswith("\nä end")
    assert len(tail) < 20_000


def test_keys_are_never_shown(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("key k1-secret is used\n")
    assert read_log_tail(log, keys=["k1-secret", ""]) == "key *** is used"


def test_no_log_says_nothing(tmp_path: Path) -> None:
    assert read_log_tail(None) == ""
    assert read_log_tail(tmp_path / "missing.log") == ""
    assert format_log_tail(tmp_path) == ""


def test_the_clause_names_the_file(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("one\ntwo\n")
    assert format_log_tail(log) == f"\nlast lines of {log}:\n  one\n  two"
