"""The rules of restarts: the hosts and numbers of ranks after a failure, and when a run is given up."""

import json
import re
from pathlib import Path

import pytest

from megaclip.config import load_training_config
from megaclip.errors import ConfigError
from megaclip.hosts.hostfile import Host, read_hostfile, write_hostfile
from megaclip.hosts.policy import End, batch_fits, choose_hosts, decide, failures_by_host, hosts_to_blame, usable

EIGHT = [Host(f"node-{number}", 8) for number in range(4)]


def ranks(hosts: list[Host]) -> list[int]:
    return [host.slots for host in hosts]


@pytest.mark.parametrize(
    ("slots", "batch", "expected"),
    [
        ([8, 8, 8, 8], 4096, [8, 8, 8, 8]),
        ([8, 8, 8], 4096, [8, 8]),  # 24 ranks do not divide the batch; the last host is a spare one
        ([8, 8, 8], 4104, [8, 8, 8]),
        ([8, 4], 4096, [8]),
        ([4, 8], 4096, [4, 4]),
        ([1], 4096, [1]),
        ([3], 4096, [2]),
        ([], 4096, []),
    ],
)
def test_the_largest_number_of_ranks_that_divides_the_batch_is_used(
    slots: list[int], batch: int, expected: list[int]
) -> None:
    hosts = [Host(str(place), count) for place, count in enumerate(slots)]
    assert ranks(choose_hosts(hosts, lambda world: batch % world == 0)) == expected


def test_no_number_of_ranks_fits() -> None:
    assert choose_hosts(EIGHT, lambda world: world == 64) == []


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Write a ds_config.json without gradient_accumulation_steps."""
    settings = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path / "config.json"


def test_the_run_s_own_rules_decide_which_numbers_of_ranks_fit(config_file: Path) -> None:
    fits = batch_fits(load_training_config(config_file))
    assert [world for world in range(1, 14) if fits(world)] == [1, 2, 3, 4, 6, 12]
    settings = json.loads(config_file.read_text()) | {"gradient_accumulation_steps": 3}
    config_file.write_text(json.dumps(settings))
    assert [world for world in range(1, 14) if batch_fits(load_training_config(config_file))(world)] == [4]


def test_a_batch_that_would_change_with_the_number_of_ranks_is_refused(config_file: Path) -> None:
    settings = json.loads(config_file.read_text())
    del settings["train_batch_size"]
    config_file.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="--restarts requires train_batch_size"):
        batch_fits(load_training_config(config_file))


@pytest.mark.parametrize(
    ("codes", "lost", "expected"),
    [
        ({"a": 1, "b": 255}, ["b"], {"b"}),
        ({"a": 1, "b": 247}, [], {"b"}),  # DeepSpeed's launcher: its rank was ended by SIGKILL
        ({"a": 137, "b": 1}, [], {"a"}),  # a shell: the launcher was ended by SIGKILL
        ({"a": 250, "b": 245}, [], {"b"}),  # SIGABRT, by which NCCL ends the ranks of every host, and SIGSEGV
        ({"a": 1, "b": 1}, [], set()),
        ({"a": 75, "b": 75}, [], set()),
        ({"a": 247, "b": 247}, [], set()),
        ({}, [], set()),
    ],
)
def test_hosts_that_caused_a_failure(codes: dict[str, int], lost: list[str], expected: set[str]) -> None:
    assert hosts_to_blame(codes, lost) == expected


def lost(host: str, step: int) -> End:
    return End(1, step, frozenset({host}), frozenset({host}))


def test_a_host_that_failed_twice_is_left_out() -> None:
    ends = [lost("node-1", 10), End(1, 20, frozenset({"node-2"})), lost("node-1", 30)]
    assert failures_by_host(ends) == {"node-1": 2, "node-2": 1}
    assert usable(EIGHT, ends) == [EIGHT[0], EIGHT[2], EIGHT[3]]


@pytest.mark.parametrize(
    ("ends", "restarts", "exit_code", "reason"),
    [
        ([End(0, 50)], False, 0, "complete"),
        ([End(1, 10), End(0, 50)], False, 0, "complete"),
        ([End(143, 10)], False, 143, "stopped on request"),
        ([End(138, 10)], False, 138, "stopped on request"),
        ([End(130, 10)], False, 130, "stopped on request"),
        ([End(78, 0)], False, 78, "settings were refused"),
        ([End(2, 0)], False, 2, "settings were refused"),
        ([End(138, 10, for_more_hosts=True)], True, 0, "on more hosts"),
        ([End(1, 10, for_more_hosts=True)], True, 0, "failure 1"),  # it failed before it had saved
        ([End(1, 10)], True, 0, "failure 1 of at most 4"),
        ([End(75, 10), End(1, 20), End(1, 30)], True, 0, "failure 3 of at most 4"),
        ([End(1, 10), End(1, 20), End(1, 30), End(1, 40)], False, 1, "--restarts 3"),
        ([End(1, 10), End(1, 10)], False, 1, "failed twice without a checkpoint after step 10"),
        ([End(1, 0), End(75, 0)], False, 1, "failed twice without a checkpoint after step 0"),
        ([End(1, 10), End(138, 10, for_more_hosts=True), End(1, 10)], False, 1, "failed twice"),
        ([lost("a", 10), End(1, 10)], True, 0, "failure 2"),  # the first failure is caused by the lost host
        ([lost("a", 10), lost("b", 10)], True, 0, "failure 2"),
        ([lost("a", 10), End(1, 10), End(1, 10)], False, 1, "failed twice"),
    ],
)
def test_stop_or_restart(ends: list[End], restarts: bool, exit_code: int, reason: str) -> None:
    verdict = decide(ends, 3)
    assert (verdict.restarts, verdict.exit_code) == (restarts, exit_code)
    assert reason in verdict.reason


def test_a_hostfile_is_read_as_the_script_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# two hosts\n\nme@node-0 slots=2\r\n\t10.0.0.1   slots=16 # a note\n")
    hosts = read_hostfile(path)
    assert hosts == [Host("me@node-0", 2), Host("10.0.0.1", 16)]
    assert [host.address for host in hosts] == ["node-0", "10.0.0.1"]
    write_hostfile(path, hosts)
    assert read_hostfile(path) == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node-0 slots=1\nnode-1\n", "line 2: 'node-1'; expected HOST slots=RANKS"),
        ("a;b slots=1\n", "line 1: 'a;b slots=1'"),
        ("$(id) slots=1\n", "line 1: "),
        ("-oProxyCommand=x slots=1\n", "line 1: "),
        ("a slots=0\n", "line 1: "),
        ("a slots=1\na slots=2\n", "line 2: a is listed twice"),
        ("# nothing\n", "lists no host"),
        ("a slots=١\n", "line 1: "),
    ],
)
def test_bad_hostfiles_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hostfile").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_hostfile(tmp_path / "hostfile")
