"""Tables, saved datasets, tokenizers and indexes of unknown origin execute no code and raise only our own errors."""

import json
import os
import pickle

import numpy as np
import pytest

from megaclip.data import load_tokenizer, open_pairs
from megaclip.data.batch import BadSample
from megaclip.errors import MegaclipError
from megaclip.planner.cluster import GPUS, Rates
from tests.unit.data.data_samples import picture, write_shards


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    """Make `datasets` store its Arrow files in a folder of this test, without network access."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


class Payload:
    """Object whose pickle creates a folder when it is loaded."""

    def __init__(self, evidence):
        self.evidence = str(evidence)

    def __reduce__(self):
        return os.mkdir, (self.evidence,)


@pytest.fixture
def evidence(tmp_path):
    return tmp_path / "evidence"


def write_pickle_as(name):
    def make(folder, evidence):
        (folder / name).write_bytes(pickle.dumps(Payload(evidence)))
        return folder / name

    return make


def parquet_of_pickles(folder, evidence):
    """Write a table whose image cells are pickles, and whose schema has pickles in its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    packed = pickle.dumps(Payload(evidence))
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": packed}
    fields = [pa.field("image", pa.binary(), metadata=extension), pa.field("caption", pa.string())]
    table = pa.table({"image": [packed] * 3, "caption": ["a"] * 3}, pa.schema(fields, {b"pandas": packed}))
    pq.write_table(table, folder / "x.parquet")
    return folder / "x.parquet"


def saved_set_with_pickles(folder, evidence):
    import datasets

    datasets.Dataset.from_dict({"image": [picture(0)], "caption": ["a"]}).save_to_disk(folder / "saved")
    (folder / "saved" / "dataset_info.json").write_text(
        json.dumps({"features": {"image": {"dtype": "__import__('os').mkdir('x')", "_type": "Payload"}}})
    )
    (folder / "saved" / "indices.arrow").write_bytes(pickle.dumps(Payload(evidence)))
    return folder / "saved"


def folder_with_a_script(folder, evidence):
    """Write a dataset script beside tables. datasets before version 4.0 executed such scripts."""
    place = folder / "scripted"
    place.mkdir()
    (place / "scripted.py").write_text(f"import os\nos.mkdir({str(evidence)!r})\n")
    (place / "dataset_infos.json").write_text("{}")
    (place / "x.csv").write_text("image,caption\nnowhere.png,a\n")
    return f"hf:{place}"


def csv_of_formulas(folder, evidence):
    (folder / "x.csv").write_text(
        f"image,caption\n|mkdir {evidence},=cmd|'mkdir {evidence}'!A0\n$(mkdir {evidence}),a\n"
    )
    return folder / "x.csv"


def shards_with_a_pickled_index(folder, evidence):
    """Replace the index of a set of shards by a pickled array of objects."""
    paths = write_shards(folder, [2])
    open_pairs([str(paths[0])])
    (index,) = (folder / ".megaclip").glob("*.npy")
    np.save(index, np.array([Payload(evidence)], dtype=object), allow_pickle=True)
    return paths[0]


MAKERS = [
    write_pickle_as("x.parquet"),
    write_pickle_as("x.csv"),
    write_pickle_as("x.json"),
    write_pickle_as("x.tar"),
    parquet_of_pickles,
    saved_set_with_pickles,
    folder_with_a_script,
    csv_of_formulas,
]


@pytest.mark.parametrize("make", MAKERS)
def test_opening_and_reading_data_runs_no_code(tmp_path, evidence, make):
    spec = make(tmp_path, evidence)
    try:
        dataset = open_pairs([str(spec)])
        for number in range(len(dataset)):
            try:
                dataset.read(number)
            except BadSample as bad:
                assert "\n" not in bad.detail
    except MegaclipError as error:
        assert "\n" not in str(error)
    assert not evidence.exists()


def test_a_pickled_index_runs_no_code(tmp_path, evidence):
    spec = shards_with_a_pickled_index(tmp_path, evidence)
    assert open_pairs([str(spec)]).read(0).caption  # the index is made again
    assert not evidence.exists()


def test_a_tokenizer_that_is_a_pickle_runs_no_code(tmp_path, evidence):
    path = write_pickle_as("x.model")(tmp_path, evidence)
    with pytest.raises(MegaclipError):
        load_tokenizer(str(path), 77)
    assert not evidence.exists()


def test_measured_rates_that_are_a_pickle_run_no_code(tmp_path, evidence):
    path = write_pickle_as("rates.json")(tmp_path, evidence)
    with pytest.raises(MegaclipError):
        Rates.read(path, GPUS["h200"][1])
    assert not evidence.exists()
