"""Data, tokenizers, rates and indexes of unknown origin execute no code and raise only our own errors."""

import io
import os
import pickle

import numpy as np
import pytest

from megaclip.data import load_tokenizer, open_labelled, open_pairs
from megaclip.data.batch import BadSample
from megaclip.data.fields import Field
from megaclip.errors import MegaclipError
from megaclip.planner.cluster import GPUS, Rates
from tests.unit.data.data_samples import picture, write_shards, write_tar


class Payload:
    """Object whose pickle creates a folder when it is loaded."""

    def __init__(self, evidence):
        self.evidence = str(evidence)

    def __reduce__(self):
        return os.mkdir, (self.evidence,)


@pytest.fixture
def payload(tmp_path):
    yield Payload(tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()


@pytest.mark.parametrize("name", ["x.parquet", "x.csv", "x.json", "x.tar", "x.model", "rates.json"])
def test_files_that_are_pickles_run_no_code(tmp_path, payload, name):
    (tmp_path / name).write_bytes(pickle.dumps(payload))
    read = {
        "x.model": lambda path: load_tokenizer(path, 77),
        "rates.json": lambda path: Rates.read(path, GPUS["h200"][1]),
    }
    with pytest.raises(MegaclipError) as caught:
        read.get(name, lambda path: open_pairs([path]))(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_pickled_arrays_run_no_code(tmp_path, payload):
    """They are in place of an index, a label and a field."""
    array = io.BytesIO()
    np.save(array, np.array([payload], dtype=object), allow_pickle=True)
    (path,) = write_shards(tmp_path / "pairs", [2])
    open_pairs([str(path)])
    (index,) = (tmp_path / "pairs" / ".megaclip").glob("*.npy")
    index.write_bytes(array.getvalue())
    assert open_pairs([str(path)]).caption(1) == "caption 1"  # the index is made again
    write_tar(tmp_path / "labelled" / "0.tar", [("0.png", picture(0)), ("0.npy", array.getvalue())])
    (tmp_path / "labelled" / "classnames.txt").write_text("cat\ndog\n")
    with pytest.raises(BadSample, match=r"wrong \.npy"):
        open_labelled(tmp_path / "labelled").read(0)
    with pytest.raises(BadSample, match="undecodable field"):
        Field("npy").array(array.getvalue(), "x")


def test_a_table_of_pickles_runs_no_code(tmp_path, payload):
    """Its image cells are pickles, and its schema has pickles in its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    packed = pickle.dumps(payload)
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": packed}
    fields = [pa.field("image", pa.binary(), metadata=extension), pa.field("caption", pa.string())]
    table = pa.table({"image": [packed] * 3, "caption": ["a"] * 3}, pa.schema(fields, {b"pandas": packed}))
    pq.write_table(table, tmp_path / "x.parquet")
    assert open_pairs([str(tmp_path / "x.parquet")]).read(0).image == packed
