"""Files and command lines that Hypothesis makes up raise only our own errors, of one line, and nothing else happens.

Each test has a short form, and a long one of five times as many examples. Both try the same examples in every run.
"""

import copy
import json
import os
import subprocess
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from data_samples import picture, write_tar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from megaclip.checkpoint import manifest
from megaclip.checkpoint.model_card import CARD_NAME, OPENAI_PREPROCESS, read_model_card, write_model_card
from megaclip.config import TrainArguments, load_training_config, parse_arguments
from megaclip.config.open_clip_flags import OPEN_CLIP_FLAGS
from megaclip.data import ImageTransform, open_pairs
from megaclip.data.batch import BadSample
from megaclip.data.tar_walk import walk_shard
from megaclip.errors import ConfigError, MegaclipError
from megaclip.hosts.hostfile import read_hostfile
from megaclip.hosts.remote import environment_of_ranks
from megaclip.models import load_model_config

ROOT = Path(__file__).resolve().parents[2]
ODD = [
    "",
    "auto",
    "x",
    "../x",
    "/etc/passwd",
    "\0",
    "1",
    "nan",
    "1e400",
    "-",
    "--",
    "{1..9}",
    "a b",
    "é" * 300,
    "9" * 5000,
]
SCALARS = (
    st.none() | st.booleans() | st.sampled_from([0, 1, -1, 2, 10**40, 0.5, 1e308]) | st.floats() | st.sampled_from(ODD)
)
VALUES = st.recursive(
    SCALARS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(ODD), part, max_size=3),
    max_leaves=5,
)
"""Everything that JSON can hold."""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.long)]),
]


def outcomes(check: Callable[[Any], Hashable], examples: int, strategy: st.SearchStrategy) -> Counter:
    """Call `check` with examples of a strategy; return how often it returned each value."""
    found: Counter = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Any) -> None:
        found[check(example)] += 1

    with pytest.MonkeyPatch.context() as patch:
        # Hypothesis also tries constants of the loaded modules of this repository, which other tests choose.
        patch.setattr(providers, "is_local_module_file", lambda _: False)
        run()
    return found


def is_accepted(function: Callable[[], Any], first_line_of: str = "") -> bool:
    """Return whether the function returned; any error but ours of one line fails the test."""
    try:
        function()
    except MegaclipError as error:
        text = str(error)
        assert len(text) < 2000 and ("\n" not in text or (first_line_of and text.startswith(first_line_of))), text
        return False
    return True


@st.composite
def changed(draw: st.DrawFn, documents: list[dict[str, Any]], keys: list[str]) -> dict[str, Any]:
    """Draw a document with one or two values replaced, at any depth, some of them under another key.

    Every other value is one that a document has under this key.
    """
    known = {key: [part[key] for part in sections(documents) if key in part] for key in keys}
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 2))):
        place = document
        while isinstance(place.get(key := draw(st.sampled_from([*place, *keys]))), dict) and draw(st.integers(0, 4)):
            place = place[key]
        place[key] = copy.deepcopy(draw(st.sampled_from(known[key]) | VALUES if known.get(key) else VALUES))
    return document


def sections(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the documents and the dictionaries in them, at any depth."""
    inner = [value for document in documents for value in document.values() if isinstance(value, dict)]
    return [*documents, *(sections(inner) if inner else [])]


@st.composite
def damaged(draw: st.DrawFn, contents: list[bytes]) -> bytes:
    """Draw a content in which one to three short parts are replaced."""
    content = bytearray(draw(st.sampled_from(contents)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        content[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(content)


def test_ds_configs(tmp_path: Path, times: int) -> None:
    documents = [json.loads(path.read_text()) for path in sorted((ROOT / "ds_configs").rglob("*.json"))]
    keys = {key for section in sections(documents) for key in section}
    keys |= {"scheduler", "fp16", "flops_profiler", "wandb", "csv_monitor", "timers", "checkpoint", "data_types", "amp"}
    path = tmp_path / "ds_config.json"

    def check(example: tuple[dict[str, Any], int]) -> bool:
        path.write_text(json.dumps(example[0]))
        return is_accepted(lambda: load_training_config(path).batch_plan(example[1]))

    found = outcomes(check, 300 * times, st.tuples(changed(documents, sorted(keys)), st.integers(1, 3)))
    assert found[True] > 2 and found[False] > 100


def test_command_lines(times: int) -> None:
    flags = ["--" + name.replace("_", "-") for name in TrainArguments.model_fields]
    flags += [*sorted(OPEN_CLIP_FLAGS), "-x", "--", "--é"]
    required = ["--deepspeed_config", "c.json", "--model", "m", "--train-data", "a.tar"]
    words = st.sampled_from([*ODD, "0.5", "-1", "0"]) | st.text(max_size=5)
    lines = st.lists(st.tuples(st.sampled_from(flags), words), max_size=2)
    not_accepted = "these arguments are not accepted"  # a list, a line for each of them
    found = outcomes(
        lambda line: is_accepted(
            lambda: parse_arguments([*required, *(word for pair in line for word in pair)]), not_accepted
        ),
        500 * times,
        lines,
    )
    assert found[True] > 20 and found[False] > 100


def test_model_cards(tmp_path: Path, times: int) -> None:
    """A card either gives a model description, a transform and a tokenizer, or it is refused."""
    config = load_model_config("demo-tiny").replace(text_cfg={"vocab_size": 64, "hf_tokenizer_name": "sentencepiece"})
    write_model_card(tmp_path, config, OPENAI_PREPROCESS)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    path = tmp_path / CARD_NAME

    def read() -> None:
        card = read_model_card(tmp_path)
        ImageTransform(card.config.vision_cfg.image_size, **card.pixel_settings)
        card.tokenizer()

    def check(card: Any) -> bool:
        path.write_text(json.dumps(card))
        return is_accepted(read)

    cards = changed([json.loads(path.read_text())], ["unknown", "timm_model_name", "hf_model_name", "pool_type"])
    found = outcomes(check, 400 * times, st.one_of(*[cards] * 9, VALUES))
    assert found[False] > 100


def test_manifests(tmp_path: Path, times: int) -> None:
    """Also with a right checksum of the manifest itself, a changed one is never taken for whole."""
    names = ["a.pt", "b.pt", "sub/c.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 100)
    manifest.write(tmp_path)
    path = tmp_path / manifest.MANIFEST
    original = json.loads(path.read_text())
    original.pop("crc32")
    files = {name: original["files"][name] for name in names}

    def check(content: Any) -> bool:
        if isinstance(content, dict):
            text = json.dumps(content, sort_keys=True)
            content = {**content, "crc32": f"{zlib.crc32(text.encode()):08x}"}
        path.write_text(json.dumps(content))
        problems = manifest.find_damage(tmp_path)
        assert all("\n" not in problem and len(problem) < 10_000 for problem in problems)
        whole = (
            isinstance(content, dict) and {name: content["files"].get(name) for name in names} == files
            if not problems
            else False
        )
        assert whole or problems
        return not problems

    keys = [*names, "../../etc/passwd", "/etc/passwd", ".", "", "size", "crc32", "a\0b"]
    found = outcomes(check, 300 * times, st.one_of(*[changed([original], keys)] * 9, VALUES))
    assert found[False] > 100


def test_damaged_bytes_of_a_manifest(tmp_path: Path, times: int) -> None:
    (tmp_path / "a.pt").write_bytes(b"a" * 100)
    manifest.write(tmp_path)
    path = tmp_path / manifest.MANIFEST
    original = path.read_bytes()

    def check(content: bytes) -> bool:
        path.write_bytes(content)
        problems = manifest.find_damage(tmp_path)
        assert problems or json.loads(content) == json.loads(original)
        return not problems

    assert outcomes(check, 300 * times, damaged([original]))[False] > 100


# ------------------------------------------------------------------------------------------------ hosts

LINES = [b"node-0 slots=2\nnode-1\tslots=16 # a note\n", b"# two\n\nme@10.0.0.1  slots=1\r\nb slots=9999\n"]
VARIABLES = [b"A=b\nC_1=d e\n_X=1=2", b"NCCL_DEBUG=INFO\nEMPTY="]


class Script:
    """launch/multi_node.sh in a folder, with a stub for deepspeed that writes down its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hostfile = folder / "hostfile"
        self.hostfile.write_bytes(LINES[0])
        self.variables = folder / "variables"
        self.variables.write_text("A=b\n")
        self.environment = folder / "environment"
        stub = folder / "bin" / "deepspeed"
        stub.parent.mkdir()
        stub.write_text(f'#!/bin/bash\nenv -0 >{self.environment}\necho 0 >"$MEGACLIP_COMPLETED_FILE"\n')
        stub.chmod(0o755)

    def is_accepted(self) -> bool:
        """Return whether the script starts deepspeed; else it must end with 2 and one line."""
        self.environment.unlink(missing_ok=True)
        done = subprocess.run(
            [ROOT / "launch" / "multi_node.sh", "--hostfile", self.hostfile, "--no_ssh", "--node_rank", "0", "--x"],
            env={"PATH": f"{self.folder}/bin:/usr/bin:/bin", "HOME": "/", "DS_ENV_FILE": str(self.variables)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
        )
        assert not (self.folder / "EVIDENCE").exists()
        if done.returncode == 0:
            return self.environment.exists()
        assert done.returncode == 2 and done.stderr.startswith("multi_node.sh: "), done.stderr
        assert not self.environment.exists()
        return False


TEXTS = st.text("ab1=#_ .-@\t\r\n\v\f\x1c\x85\u2028é;$`'\"\\", max_size=30).map(str.encode)


def test_hostfiles(tmp_path: Path, times: int) -> None:
    """The script and the Python commands accept the same hostfiles."""
    script = Script(tmp_path)

    def check(content: bytes) -> bool:
        script.hostfile.write_bytes(content)
        accepted = is_accepted(lambda: read_hostfile(script.hostfile))
        assert script.is_accepted() == accepted, content
        return accepted

    assert not check(b"\0node slots=2\n")  # bash warns of a null byte in a variable
    assert not check(b"node slots=2\nnode slots=1\n")
    assert check("node slots=2 # größer\n".encode("latin-1"))
    found = outcomes(check, 50 * times, damaged(LINES) | TEXTS.map(lambda text: b"node slots=2 " + text))
    assert found[True] > 3 and found[False] > 10


def test_variables_of_the_ranks(tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script and the Python commands accept the same files, and give the ranks the same variables."""
    script = Script(tmp_path)
    monkeypatch.setenv("DS_ENV_FILE", str(script.variables))

    def check(content: bytes) -> bool:
        script.variables.write_bytes(content)
        try:
            variables = environment_of_ranks()
        except ConfigError as error:
            assert "\n" not in str(error)
            assert not script.is_accepted(), content
            return False
        assert script.is_accepted(), content
        received = dict(one.split(b"=", 1) for one in script.environment.read_bytes().split(b"\0") if one)
        for name, value in variables.items():
            if name not in os.environ:
                assert received[name.encode()].decode(errors="replace") == value, content
        return True

    assert not check(b"\0A=b\n") and not check(b"A=b\0\n")
    found = outcomes(check, 50 * times, damaged(VARIABLES) | TEXTS.map(lambda text: b"A=b\n" + text))
    assert found[True] > 3 and found[False] > 10


# ------------------------------------------------------------------------------------------------ data


@st.composite
def shards(draw: st.DrawFn, contents: list[bytes]) -> bytes:
    """Draw a tar file with changed headers, whose checksums are right again, so that they are read."""
    content = bytearray(draw(st.sampled_from(contents)))
    sizes_and_kind = [*range(124, 136), 156, 157]
    for start in range(0, len(content), 512):
        block = content[start : start + 512]
        if block[257:262] != b"ustar":
            continue
        for _ in range(draw(st.integers(0, 3))):
            block[draw(st.sampled_from(sizes_and_kind) | st.integers(0, 511))] = draw(st.integers(0, 255))
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        content[start : start + 512] = block
    return bytes(content)


def test_tar_headers(tmp_path: Path, times: int) -> None:
    """The walk never raises, never hangs and never finds anything outside of the file."""
    contents = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        name = "x" * 120 + ".png" if kind != tarfile.USTAR_FORMAT else "0.png"
        path = write_tar(tmp_path / "shard.tar", [(name, picture(0)), ("1.txt", b"caption")], format=kind)
        contents.append(path.read_bytes())

    def check(content: bytes) -> bool:
        path.write_bytes(content)
        found = walk_shard(path, ("png",), ("txt",))
        for what in ("image", "caption"):
            size, offset = found.entries[f"{what}_size"], found.entries[f"{what}_offset"]
            assert ((size == -1) | ((size >= 0) & (offset >= 0) & (offset + size <= len(content)))).all()
        return not found.damage

    found = outcomes(check, 200 * times, shards(contents))
    assert found[True] > 10 and found[False] > 10


@pytest.mark.parametrize("ending", ["csv", "jsonl", "tsv"])
def test_tables(tmp_path: Path, times: int, ending: str) -> None:
    """A damaged table is read, refused, or has bad samples."""
    rows = [("0.png", f'caption "{number}", a') for number in range(5)]
    if ending == "jsonl":
        text = "\n".join(json.dumps({"image": image, "caption": caption}) for image, caption in rows)
    else:
        mark = "\t" if ending == "tsv" else ","
        quoted = [caption.replace('"', '""') for _, caption in rows]
        text = "\n".join([f"image{mark}caption", *(f'0.png{mark}"{caption}"' for caption in quoted)])
    folders: Iterator[int] = count()

    def check(content: bytes) -> bool:
        folder = tmp_path / str(next(folders))  # an index is kept beside each table
        folder.mkdir()
        (folder / "0.png").write_bytes(picture(0))
        (folder / f"x.{ending}").write_bytes(content)

        def read() -> None:
            pairs = open_pairs([str(folder / f"x.{ending}")])
            for row in range(len(pairs)):
                try:
                    pairs.read(row)
                except BadSample as bad:
                    assert "\n" not in bad.detail

        return is_accepted(read)

    assert outcomes(check, 25 * times, damaged([text.encode()]))[True] > 2
