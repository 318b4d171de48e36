"""Records in flat arrays are the records that were given, and cost forked workers nothing."""

from __future__ import annotations

import dataclasses
import pickle
from functools import partial
from typing import Any

import pytest

from e2e_vl.data.storage.record_table import (
    ChosenRecords,
    JoinedRecords,
    RecordTable,
    RowsById,
    TextGroups,
    text_column,
)
from tests.forked_memory import SMAPS, growth_in_a_fork


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    number: int
    words: str | None
    answers: tuple[str, ...] | None = None
    anything: Any = None


NOTES = [
    Note(2**63 - 1, "Ist das größer? 猫", ("yes", "yes", "")),
    Note(-(2**63), "", ()),
    Note(0, "half \ud83d", ("no",), {"score": 0.3}),
    Note(0, "half \ud83d", ("no",), (1, 2.5)),
]


def test_what_goes_in_comes_out():
    table = RecordTable(Note, iter(NOTES))
    assert len(table) == 4
    assert list(table) == NOTES == [table[row] for row in range(4)]
    assert table == NOTES
    assert table[-1] == NOTES[-1]
    assert list(table.column("number")) == [note.number for note in NOTES]
    assert pickle.loads(pickle.dumps(table)) == NOTES
    for row in (4, -5):
        with pytest.raises(IndexError):
            table[row]
    assert not RecordTable(Note, [])


@pytest.mark.parametrize("other", [10**400, True, 1.5, "seven", None, ("a", 1), ["a"]], ids=str)
@pytest.mark.parametrize("name", ["number", "words", "answers"])
def test_a_value_of_another_kind_stays_what_it_is(name, other):
    notes = [*NOTES, dataclasses.replace(NOTES[0], **{name: other}), NOTES[1]]
    found = list(RecordTable(Note, notes))
    assert found == notes
    assert type(getattr(found[4], name)) is type(other)


def test_equal_texts_are_kept_once():
    one, many = (len(pickle.dumps(text_column(["the same long text"] * count))) for count in (1, 1000))
    assert many - one < 4 * 1000 + 100


def test_ids_lead_to_their_rows():
    ids = [7, "7", -(2**63), 2**63 - 1, "b", "", 0, "half \ud83d"]
    rows = RowsById(iter(ids))
    assert [rows.row(one) for one in ids] == list(range(len(ids)))
    assert [rows.row(one) for one in (8, -1, 10**400, "8", "a", "0")] == [None] * 6
    assert RowsById([]).row(0) is None
    assert pickle.loads(pickle.dumps(rows)).row("b") == 4


def test_parts_and_choices_of_records():
    joined = JoinedRecords([RecordTable(Note, NOTES[:1]), [], NOTES[1:]])
    assert list(joined) == NOTES == [joined[row] for row in range(4)]
    assert [joined.part_of(row) for row in range(4)] == [0, 2, 2, 2]
    assert joined[-1] == NOTES[-1]
    assert joined[1:3] == NOTES[1:3]
    chosen = ChosenRecords(joined, [3, 0])
    assert chosen[1:] == [NOTES[0]]
    assert list(chosen) == [NOTES[3], NOTES[0]]
    with pytest.raises(IndexError):
        chosen[2]


def test_texts_are_grouped_by_their_image_in_the_order_of_first_mention():
    groups = TextGroups(["b", "a", "b", 3, "a"])
    assert groups == [[0, 2], [1, 4], [3]]
    assert groups[1:] == [[1, 4], [3]]
    assert groups[-1] == [3]
    assert all(type(text) is int for text in groups[0])
    assert TextGroups([]) == []


@pytest.mark.skipif(not SMAPS.is_file(), reason="only Linux tells the unshared pages")
def test_a_forked_worker_does_not_copy_the_records():
    notes = [Note(1000 + number, f"question {number}", (f"answer {number % 99}",) * 3) for number in range(60_000)]
    table = RecordTable(Note, notes)

    def look(records):
        for record in records:
            assert record.number >= 0

    copied, shared = (growth_in_a_fork(partial(look, records)) for records in (notes, table))
    assert copied > 5_000, "a list of objects is copied, so the measurement can tell"
    assert shared < copied / 5
