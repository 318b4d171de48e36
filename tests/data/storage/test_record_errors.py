from __future__ import annotations

from typing import Any

import pytest

from e2e_vl.data.storage.files import checked_records
from e2e_vl.data.storage.record_errors import RAISE, NotedErrors
from e2e_vl.records import Id, Record


class Row(Record):
    id: Id
    n: Any


ROWS = [{"id": 1, "n": 2}, {"n": 3}, {"id": 1, "n": 4}, {"id": 5, "n": "x"}, {"id": 6, "n": None}, {"id": [], "n": 1}]


def total(errors) -> int:
    found = 0
    for where, row in checked_records(Row, ROWS, "file: row", "id", unique="ids", errors=errors):
        with errors:
            if row.n == "x":
                raise ValueError(f"{where}: n is no number")
            found += row.n
    return found


def test_all_errors_are_noted_and_their_records_left_out():
    errors = NotedErrors()
    assert total(errors) == 2
    assert total(errors) == 2
    noted = list(errors.sentences)
    assert noted[:3] == [
        "file: row number 1 has no 'id'; correct the record, or copy or download the file again",
        "file: row 1 is listed twice; ids must be unique",
        "file: row 5: n is no number",
    ]
    assert noted[3].startswith("file: row 6: a field has another type than expected (TypeError: unsupported operand")
    assert noted[4].startswith("file: row number 5: id is [], expected a whole number or a text; correct the record")
    assert len(noted) == 5, "each is noted once"


def test_readers_raise_at_the_first_error():
    with pytest.raises(ValueError, match="row number 1 has no 'id'"):
        total(RAISE)


def test_mistakes_of_programmers_are_not_noted():
    with pytest.raises(ZeroDivisionError), NotedErrors():
        _ = 1 / 0


def test_something_that_is_no_list_is_one_sentence():
    with pytest.raises(ValueError, match="file: row: expected a list of records, found a int"):
        list(checked_records(Row, 3, "file: row"))


def test_what_is_noted_apart_is_not_among_the_others():
    errors = NotedErrors()
    errors.note("before")
    with errors.apart() as found, errors:
        raise ValueError("within")
    with pytest.raises(RuntimeError), errors.apart() as lost:
        errors.note("lost")
        raise RuntimeError
    errors.note("behind")
    assert (list(found), list(lost), list(errors.sentences)) == (["within"], ["lost"], ["before", "behind"])


def test_a_process_that_died_is_no_error_of_a_record():
    errors = NotedErrors()
    with pytest.raises(ChildProcessError), errors.about("file: row 1"):
        raise ChildProcessError("a process was ended")
    assert not errors.sentences and errors.sentence(MemoryError()) is None
