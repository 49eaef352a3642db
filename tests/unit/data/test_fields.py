"""Extra fields of samples: from every kind of storage, drawn together with the view and the caption, and bad ones."""

import io
import json

import numpy as np
import pytest
import torch

from megaclip.data import ImageTransform, TrainLoader, open_pairs
from megaclip.data.batch import BadSample, Captions, RawSample
from megaclip.data.fields import Field, draw
from megaclip.errors import DataError
from tests.unit.data.data_samples import CountingTokenizer, picture, write_table, write_tar

COUNT = 8
VECTOR, SCORE = Field("vector", (3,), torch.float16), Field("score")


def npy(array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array))
    return buffer.getvalue()


def npz(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def vector(number: int) -> list[float]:
    return [number, number + 0.5, -number]


def shard(path, more):
    """Write samples with a caption and the members that `more` returns for each."""
    members = []
    for number in range(COUNT):
        members += [(f"{number}.png", picture(number)), (f"{number}.txt", f"caption {number}".encode())]
        members += [(f"{number}.{extension}", content) for extension, content in more(number).items()]
    return str(write_tar(path, members))


def batch_of(spec, fields, **options):
    """Return one batch of all samples, whose first token is the number of the sample, and its loader."""
    data = open_pairs([spec], fields=fields, max_bad_fraction=1.0), ImageTransform(8, training=True)
    loader = TrainLoader(*data, CountingTokenizer(), micro_batch_size=COUNT, max_bad_fraction=1.0, **options)
    return next(loader), loader


def test_fields_of_tar_shards_are_those_of_their_samples(tmp_path):
    def more(number):
        return {
            "teacher.npy": npy(np.array(vector(number), dtype=np.float16)),
            "npz": npz(a=np.float32(number), b=np.array([number, 7])),
            "json": json.dumps({"score": number / 2}).encode(),
        }

    spec = shard(tmp_path / "0.tar", more)
    fields = {
        "vector": Field("teacher.npy", (3,), torch.float16),
        "a": Field("npz.a"),
        "b": Field("npz.b", (2,), torch.int64),
        "score": Field("json.score"),
    }
    batch, loader = batch_of(spec, fields, num_workers=2)
    loader.close()
    numbers = batch.tokens[:, 0].tolist()
    assert batch.fields["vector"].dtype == torch.float16 and batch.fields["b"].dtype == torch.int64
    assert batch.fields["vector"].tolist() == [vector(number) for number in numbers]
    assert batch.fields["a"].tolist() == numbers
    assert batch.fields["b"].tolist() == [[number, 7] for number in numbers]
    assert batch.fields["score"].tolist() == [number / 2 for number in numbers]
    (account,) = open_pairs([spec], fields=fields).accounts
    assert not account.left_out  # the members of fields are in samples


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "bytes"])
def test_fields_of_tables_are_those_of_their_rows(tmp_path, kind):
    rows = []
    for number in range(COUNT):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
        cell = npy(vector(number)) if kind == "bytes" else vector(number)
        rows.append({"image": f"{number}.png", "caption": f"caption {number}", "vector": cell, "score": number / 4})
    path = write_table(tmp_path / f"table.{'parquet' if kind == 'bytes' else kind}", rows, "|")
    batch, _ = batch_of(path, {"vector": VECTOR, "score": SCORE})
    numbers = batch.tokens[:, 0].tolist()
    assert sorted(numbers) == list(range(COUNT))
    assert batch.fields["vector"].tolist() == [vector(number) for number in numbers]
    assert batch.fields["score"].tolist() == [number / 4 for number in numbers]


def test_the_view_its_crop_and_the_caption_are_drawn_together(tmp_path):
    """Row v of every field of views, and row c of the field of captions for caption c. Epochs draw other ones."""
    rows = []
    for number in range(COUNT):
        (tmp_path / f"{number}.png").write_bytes(picture(number, 64, 64))
        views = [[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.25, 0.0, 0.75, 1.0]]
        rows.append(
            {
                "image": f"{number}.png",
                "caption": [f"caption {10 * number + c}" for c in range(3)],
                "crop": views,
                "view": [10 * number + v for v in range(3)],
                "text": [10 * number + c for c in range(3)],
            }
        )
    spec = write_table(tmp_path / "table.parquet", rows)
    fields = {
        "crop": Field("crop", (4,), one_of="views"),
        "view": Field("view", (), torch.int64, one_of="views"),
        "text": Field("text", (), torch.int64, one_of="captions"),
    }
    batch, loader = batch_of(spec, fields)
    seen, shown = set(), set()
    for _ in range(6):
        shown.update(batch.tokens[:, 0].tolist())
        assert batch.fields["text"].tolist() == batch.tokens[:, 0].tolist()
        for image, view, crop in zip(batch.images, batch.fields["view"], batch.fields["crop"], strict=True):
            number, drawn = divmod(int(view), 10)
            seen.add((number, drawn))
            box = np.array(rows[number]["crop"][drawn], dtype=np.float32)
            assert torch.equal(crop, torch.from_numpy(box))
            expected = ImageTransform(8, training=True)(picture(number, 64, 64), crop=box)
            assert torch.equal(image, expected)
        batch = next(loader)
    assert len(seen) > 2 * COUNT and shown == {caption for row in rows for caption in row["text"]}  # six epochs


BAD = {
    "missing field": {},
    "undecodable field": {"npy": b"no array"},
    "a pickled object": {"npy": npy(np.array([{}], dtype=object))},
    "field of wrong shape": {"npy": npy([1.0, 2.0])},
    "not finite": {"npy": npy([1.0, np.nan, 2.0])},
    "text": {"npy": npy(["a", "b", "c"])},
    "truncated": {"npy": npy([1.0, 2.0, 3.0])[:-4]},
}
KINDS = {"a pickled object": "undecodable field", "not finite": "undecodable field"}
KINDS |= {"text": "undecodable field", "truncated": "undecodable field"}


@pytest.mark.parametrize("fault", BAD)
def test_bad_fields_are_counted_as_bad_samples(tmp_path, fault):
    spec = shard(tmp_path / "0.tar", lambda number: BAD[fault] if number == 3 else {"npy": npy(vector(number))})
    batch, loader = batch_of(spec, {"vector": Field("npy", (3,))})
    assert loader.bad_counts[KINDS.get(fault, fault)] == 1
    assert 3 not in batch.tokens[:, 0].tolist()
    assert batch.fields["vector"].tolist() == [vector(number) for number in batch.tokens[:, 0].tolist()]


@pytest.mark.parametrize(
    ("fields", "contents", "message"),
    [
        ({"a": Field("a", one_of="views"), "b": Field("b", one_of="views")},
         {"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0]}, "b has 2 views of 3"),
        # 80 MB of zeros in 80 kB
        ({"a": Field("npz.a", (10_000_000,))}, {"a": npz(a=np.zeros(10_000_000))}, "field too large"),
        ({"a": Field("quality")}, {"a": b"0.5"}, r'the key of a number in a JSON object is "json\.NAME"'),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_used_are_bad_samples(fields, contents, message):
    with pytest.raises(BadSample, match=message):
        draw(fields, RawSample(b"", Captions(("a caption",)), "x", contents), (0, 0, 0))


@pytest.mark.parametrize("wrong", [{"shape": 3}, {"shape": (0,)}, {"dtype": "float32"}, {"one_of": "rows"}])
def test_a_field_that_is_declared_wrongly_is_refused(wrong):
    with pytest.raises(ValueError, match="Field 'a' has shape"):
        Field("a", **wrong)


def test_data_without_the_declared_fields_are_refused_at_start(tmp_path):
    spec = write_table(tmp_path / "a.parquet", [{"image": picture(0), "caption": "caption 0"}])
    with pytest.raises(DataError, match=r"has no field column vector; it has .*set the field's key in the objective"):
        open_pairs([spec], fields={"vector": VECTOR})
    spec = shard(tmp_path / "0.tar", lambda number: {})
    with pytest.raises(DataError, match=r"none of the 8 samples.*has the field vector \(a member \.npy\)"):
        open_pairs([spec], fields={"vector": Field("npy", (3,))})
    spec = shard(tmp_path / "2.tar", lambda number: {"json": b"{}"})
    with pytest.raises(DataError, match=r"have \.json members: set the field's key in the objective to one"):
        open_pairs([spec], fields={"vector": Field("npy", (3,))})
    spec = shard(tmp_path / "1.tar", lambda number: {"npy": npy(vector(number))})
    with pytest.raises(DataError, match=r"all of 8 samples .* has \(3,\), expected \(5,\)\); correct its Field .*dims"):
        open_pairs([spec], fields={"vector": Field("npy", (5,))})
