"""A run with tensor parallelism trains, evaluates, is killed, and resumes on one rank without tensor parallelism.

The held-out images have one to three captions, so ranks encode different numbers of captions. The run has the losses
and scores of a run of one rank that never stopped. The runs have no patch dropout, because its masks depend on the
order of the samples in a chunk, and this order differs.
"""

import io
import signal
import tarfile
from pathlib import Path

import pytest

from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.megatron_mark import MEGATRON
from tests.end_to_end.test_resume import Sent, record
from tests.end_to_end.training_runs import flags, run_in_ranks, scalars, write_config
from tests.tolerances import RUN, assert_close

pytestmark = [pytest.mark.long, MEGATRON]

STEPS, SAVED, KILLED_AFTER = 6, 3, 4


def with_more_captions(shards: list[Path], out: Path) -> Path:
    """Write the samples of `shards` to one shard, each with one to three lines of captions."""
    captions: list[bytes] = []
    with tarfile.open(out, "w") as target:
        for path in shards:
            with tarfile.open(path) as source:
                for member in source:
                    file = source.extractfile(member)
                    content = file.read() if file else b""
                    if member.name.endswith(".txt"):
                        captions.append(content.strip())
                        content = b"\n".join(captions[-1 : -2 - len(captions) % 3 : -1])
                        member.size = len(content)
                    target.addfile(member, io.BytesIO(content))
    return out


@pytest.fixture(scope="module")
def folder(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs `serial` (one rank), `size 2` (two ranks) and `split` (two ranks, killed, then one rank)."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    held_out = with_more_captions(sorted((tiny_run / "held_out").glob("*.tar")), folder / "held_out.tar")
    evaluation = {"val_data": held_out, "group_captions": [], "zeroshot_data": tiny_run / "zero_shot"}
    shared = {"train_steps": STEPS, "save_every_steps": SAVED, "eval_every_steps": SAVED, "eval_batch_size": 16}

    def command(name: str, size: int, **changes) -> list[str]:
        changes_of_batch = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": None}
        section = {"tensor_parallel_size": size}
        path = write_config(folder / f"size_{size}.json", megaclip=section, **changes_of_batch)
        return flags(tiny_run, path, folder, name=name, **shared, **evaluation, **changes)

    with pytest.raises(RankFailure, match="2 of 2 ranks failed"):
        kill = Sent(signal.SIGKILL, KILLED_AFTER, ranks=(0, 1))
        run_ranks(record, 2, command("split", 2), str(folder / "unused"), kill)
    (serial,), (resumed,) = run_in_ranks([command("serial", 1), command("split", 1, resume="auto")], 1)
    ((first, second),) = run_in_ranks([command("size 2", 2)])
    assert [end.exit_code for end in (serial, resumed, first, second)] == [0] * 4, (serial, resumed, first, second)
    assert "converting a checkpoint of 2 ranks" in resumed.output and "tensor-parallel size 2" in first.output
    return folder


@pytest.mark.parametrize(("name", "steps"), [("split", range(SAVED + 1, STEPS + 1)), ("size 2", range(1, STEPS + 1))])
def test_losses_equal_those_of_one_rank(folder, name, steps):
    for scalar in ("loss", "gradient_norm", "logit_scale"):
        found, expected = (scalars(folder / run)[f"train/{scalar}"] for run in (name, "serial"))
        # The norm falls from 65 to 5, and its rounding errors do not: the gradients of the samples cancel each other.
        size = expected[1] if scalar == "gradient_norm" else None
        for step in steps:
            assert_close(found[step], expected[step], RUN[scalar], f"{scalar} of step {step}", size=size)


@pytest.mark.parametrize("name", ["split", "size 2"])
def test_scores_equal_those_of_one_rank(folder, name):
    """The scores depend on ranks of similarities only, so features that differ by rounding give equal scores."""
    found, expected = (scalars(folder / run) for run in (name, "serial"))
    scores = [key for key in expected if key.startswith("evaluation/")]
    assert len(scores) >= 8
    for key in scores:
        assert found[key][STEPS] == expected[key][STEPS], key
