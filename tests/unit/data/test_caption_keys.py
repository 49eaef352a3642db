"""Several keys of --caption-key: parsing, draws by weight, keys that a sample lacks, and every kind of source."""

import json
from collections import Counter

import pytest

from megaclip.data import open_pairs
from megaclip.data.batch import BadSample, Captions, WeightedKey
from megaclip.data.captions import weighted_keys
from megaclip.data.sources import check_manifest
from megaclip.errors import DataError
from tests.unit.data.data_samples import picture, write_json_pairs, write_table, write_tar

RECORDS = [
    {"short": "s 0", "long": ["l 0", "l 10"], "a:b,c": "x 0"},
    {"short": "s 1", "long": None, "a:b,c": "x 1"},
    {"short": " ", "long": "l 2", "a:b,c": "x 2"},
    {"a:b,c": "x 3"},
    {"short": "s 4", "long": [], "a:b,c": ""},
]
"""Sample 3 has neither `short` nor `long`."""


def json_lines(folder):
    write_json_pairs(folder, RECORDS)
    rows = [{"image": f"files/{number:06d}.png", **record} for number, record in enumerate(RECORDS)]
    return write_table(folder / "pairs.jsonl", rows)


def parquet(folder):
    lists = ([value] if isinstance(value, str) else value for value in (record.get("long") for record in RECORDS))
    rows = [
        {"image": picture(number), "long": long, **{key: record.get(key) for key in ("short", "a:b,c")}}
        for number, (record, long) in enumerate(zip(RECORDS, lists, strict=True))
    ]
    return write_table(folder / "pairs.parquet", rows)


def encoded(record):
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: write_json_pairs(folder, RECORDS)[0],
        lambda folder: write_json_pairs(folder, RECORDS)[1],
        json_lines,
        parquet,
    ],
    ids=["tar", "folder", "json_lines", "parquet"],
)
def test_every_source_has_the_captions_of_all_keys(tmp_path, make):
    """A key that a sample lacks, or whose captions are blank, is left out; a sample without any key is bad."""
    spec = [make(tmp_path)]
    dataset = open_pairs(spec, caption_key="short:3, long:1")
    short, long = WeightedKey("short", 3.0), WeightedKey("long", 1.0)
    expected = [
        (("s 0", "l 0", "l 10"), ((short, 1), (long, 2))),
        (("s 1",), ((short, 1),)),
        (("l 2",), ((long, 1),)),
        None,
        (("s 4",), ((short, 1),)),
    ]
    for row, captions in enumerate(expected):
        if captions is None:
            with pytest.raises(BadSample) as caught:
                dataset.read(row)
            assert caught.value.kind == "missing caption"
        else:
            sample = dataset.read(row)
            assert (sample.captions.texts, sample.captions.shares) == captions
            assert sample.image == picture(row) and dataset.caption(row) == "\n".join(captions[0])
    assert open_pairs(spec, caption_key="a:b,c:1").caption(3) == "x 3"
    with pytest.raises(DataError, match=r"no .*lnog"):
        open_pairs(spec, caption_key="short:3,lnog:1")


def test_members_of_tar_shards_are_keys(tmp_path):
    members = [
        ("0.png", picture(0)), ("0.short", b"s 0"), ("0.long.txt", b"l 0"), ("0.txt", b"spare"),
        ("1.png", picture(1)), ("1.json", encoded({"short": "s 1"})), ("1.long.txt", b"\xfc"),
        ("2.png", picture(2)), ("2.long.txt", b"l 2"),
        ("3.png", picture(3)),
    ]  # fmt: skip
    dataset = open_pairs(
        [str(write_tar(tmp_path / "0.tar", members))], caption_key="short,long.txt", max_bad_fraction=1
    )
    assert [dataset.read(row).captions.texts for row in (0, 2)] == [("s 0", "l 0"), ("l 2",)]
    with pytest.raises(BadSample, match="caption is not UTF-8"):
        dataset.read(1)
    account = dataset.accounts[0]
    assert account.problems == {"missing caption": 1} and account.seen == 10 == account.in_samples + 1
    assert dataset.sources[0].columns["caption"] == ".long.txt (3), .short (1), json.short (1)"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [("", None)]),
        ("alt;txt", [("alt;txt", None)]),
        ("dc:title", [("dc:title", None)]),
        ("short:0.7,long:0.3", [("short", 0.7), ("long", 0.3)]),
        ("json.dc:title:2 , a,b:1e-1", [("json.dc:title", 2.0), ("a,b", 0.1)]),
        ("short, long", [("short", None), ("long", None)]),
        ("view:1:1", [("view:1", 1.0)]),
        ("a;b:1,txt:2", [("a;b", 1.0), ("txt", 2.0)]),
    ],
)
def test_keys_with_weights_are_parsed(value, expected):
    assert [(key.name, key.weight) for key in weighted_keys(value)] == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((f"short:{weight},long:1", r"has the weight .*; use a positive, finite number")
          for weight in ("0", "-1", "nan", "inf", "-Infinity", "1e400", "1.2.3")),
        *((value, "--caption-key") for value in ("short:1,long", "short:1,short:2", "a,,b", ",", "a:1,:2", "a:1;b:2")),
    ],
)  # fmt: skip
def test_incomplete_keys_and_weights_that_are_not_positive_and_finite_are_refused(value, message):
    with pytest.raises(DataError, match=message):
        weighted_keys(value)


def test_keys_are_drawn_by_weight_among_those_that_the_sample_has():
    """With weights 5, 3 and 2, a sample without the second key has the others with 5/7 and 2/7 (four deviations)."""
    keys = [(WeightedKey("a", 5e300), 1), (WeightedKey("b", 3e300), 2), (WeightedKey("c", 2e300), 1)]
    for shares, weights in (
        (keys, {"a": 0.5, "b 0": 0.15, "b 1": 0.15, "c": 0.2}),
        (keys[::2], {"a": 5 / 7, "c": 2 / 7}),
    ):
        texts = [text for text in ("a", "b 0", "b 1", "c") if text[0] in [key.name for key, _ in shares]]
        captions = Captions(tuple(texts), tuple(shares))
        drawn = Counter(texts[captions.number(7, epoch, number)] for epoch in range(4) for number in range(5000))
        for text, weight in weights.items():
            assert abs(drawn[text] - 20_000 * weight) < 4 * (20_000 * weight * (1 - weight)) ** 0.5
        epochs = {
            tuple(texts[captions.number(seed, epoch, n)] for n in range(50)) for seed in (0, 1) for epoch in (0, 1)
        }
        assert len(epochs) == 4  # seeds and epochs draw differently


@pytest.mark.parametrize(("shares", "texts"), [((1, 3), "abcd"), ((), "abc")])
def test_captions_and_keys_without_weights_are_taken_in_turn(shares, texts):
    """In six epochs every caption of two keys with one and three captions comes 3 and 1 times, one of three twice."""
    captions = Captions(tuple(texts), tuple((WeightedKey(str(count)), count) for count in shares))
    drawn = [[texts[captions.number(0, epoch, sample)] for epoch in range(6)] for sample in (11, 12)]
    expected = {"a": 3, "b": 1, "c": 1, "d": 1} if shares else {"a": 2, "b": 2, "c": 2}
    assert Counter(drawn[0]) == Counter(drawn[1]) == expected
    assert drawn[0] != drawn[1]  # an epoch shows different captions of different images


def test_other_keys_or_weights_are_other_data_for_a_resume(tmp_path):
    spec = [write_json_pairs(tmp_path, RECORDS)[0]]
    manifests = [open_pairs(spec, caption_key=key).manifest() for key in ("short", "short:3,long:1", "short:1,long:1")]
    for saved in manifests:
        for current in manifests:
            if saved == current:
                check_manifest(json.loads(json.dumps(saved)), current)
            else:
                with pytest.raises(DataError, match="keys of --caption-key"):
                    check_manifest(saved, current)
