"""The published sizes of splits."""

from __future__ import annotations

from e2e_vl.data.official_sizes import JOINED_ROWS, OFFICIAL_SPLITS, find_official_split, name_number


def test_partitions_of_one_data_set_add_up():
    totals: dict[tuple[str, str], int] = {}
    for split in OFFICIAL_SPLITS:
        if split.texts is not None:
            key = split.dataset, split.protocol
            totals[key] = totals.get(key, 0) + split.texts
    assert totals == {
        ("RefCOCO", "UNC"): 142_210,
        ("RefCOCO+", "UNC"): 141_564,
        ("RefCOCOg", "UMD"): 95_010,
        ("RefCOCOg", "Google"): 95_010,
    }


def test_rows_that_join_two_partitions():
    objects = {split.name: split.objects for split in OFFICIAL_SPLITS}
    assert objects["RefCOCO (UNC) val"] + objects["RefCOCO (Google) val"] in JOINED_ROWS
    assert objects["RefCOCOg (UMD) val"] + objects["RefCOCOg (Google) val"] in JOINED_ROWS


def test_a_split_and_a_number_are_named():
    assert find_official_split(1_500, 3_805, 10_758).name == "RefCOCO+ (UNC) val"
    assert find_official_split(1_500, 3_805, 10_757) is None
    assert name_number(10_834) == "the expressions of RefCOCO (UNC) val" and name_number(7) == ""
