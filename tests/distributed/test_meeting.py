"""Ranks meet before their process group exists, and those that do not come are named."""

import logging
import os
import time
from pathlib import Path

import pytest
import torch

from megaclip.engine import process_group
from megaclip.errors import MegaclipError
from tests.distributed.harness import run_ranks
from tests.end_to_end.training_runs import free_port

CASES = {  # WORLD_SIZE of the two ranks, RANK of the second one, seconds for which it waits for others
    "late": ((2, 2), 1, 600.0),
    "absent": ((4, 4), 2, 1.0),
    "two with one rank": ((3, 3), 0, 600.0),
    "other sizes": ((2, 3), 1, 600.0),
}


def meet_in_every_case(ports: dict[str, int], folder: Path) -> dict[str, tuple[str, list[str], int]]:
    """Return, for every case, the error of this process, its warnings and its exit code.

    The second process comes when the first one has reported that it waits, however busy the machine is.
    """
    process_group._REPORT_S = 0.1
    place = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(place)  # each host counts its own restarts
    results = {}
    for name, (sizes, second, limit_s) in CASES.items():
        rank = (0, second)[place]
        numbers = {"RANK": rank, "WORLD_SIZE": sizes[place], "MASTER_PORT": ports[name], "LOCAL_RANK": 0}
        os.environ.update({key: str(value) for key, value in numbers.items()})
        if place == 1 and rank == 0:  # of another host: it does not create the store
            os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"})
        lines: list[str] = []

        def emit(record: logging.LogRecord, lines: list[str] = lines, reported: Path = folder / name) -> None:
            lines.append(record.getMessage())
            reported.touch()

        handler = logging.Handler()
        handler.emit = emit  # type: ignore[method-assign]  # a subclass would take more lines
        process_group.logger.addHandler(handler)
        while place == 1 and not (folder / name).exists():
            time.sleep(0.01)
        error, store, code = "", None, 0
        try:
            store = process_group.meet_all_ranks(limit_s if place == 1 else 600.0)
        except MegaclipError as problem:
            error, code = str(problem), problem.exit_code
        torch.distributed.barrier()  # the first rank's store outlives the second rank
        del store
        process_group.logger.removeHandler(handler)
        results[name] = (error, lines, code)
    return results


@pytest.fixture(scope="module")
def meetings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, list[str], int]]]:
    ports = {name: free_port() for name in CASES}
    first, second = run_ranks(meet_in_every_case, 2, ports, tmp_path_factory.mktemp("reported"))
    return {name: [first[name], second[name]] for name in CASES}


def test_a_late_rank_is_named_until_it_comes(meetings):
    (error, lines, _), (other, _, _) = meetings["late"]
    assert (error, other) == ("", "")
    assert lines and set(lines) == {"waiting for 1 of 2 ranks: 1"}


def test_absent_ranks_are_named_in_one_error(meetings):
    (error, lines, code), (other, _, other_code) = meetings["absent"]
    assert error == other and "\n" not in error and code == other_code == 1
    assert error.startswith("the run does not start: after 1 s it still waits for 2 of 4 ranks: 1, 3; see the output")
    assert lines[0] == "waiting for 3 of 4 ranks: 1, 2, 3"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two with one rank", "RANK is 0 in two processes"),
        ("other sizes", "WORLD_SIZE is 3 on rank 1, but 2 on another one"),
    ],
)
def test_numbers_that_contradict_those_of_another_rank_end_both(meetings, case, message):
    assert [(message in error, code) for error, _, code in meetings[case]] == [(True, 78), (True, 78)]
