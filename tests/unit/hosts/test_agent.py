"""The rules of `megaclip launch`, with two launchers on this machine whose ranks are shell scripts."""

import logging
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megaclip.errors import MegaclipError
from megaclip.hosts import agent as agent_module
from tests.distributed.harness import run_ranks
from tests.end_to_end.training_runs import free_port

# Each start of a rank appends its number and the number of ranks to the file `starts`. RANK 1 is on the second host.
SCRIPTS = {
    "complete": "exit 0",
    "one host refuses a setting": "((RANK)) && exit 78; sleep 60",
    "a rank of the second host fails twice at the same step": "((RANK)) && exit 3; exec sleep 60",
    "each attempt saves and fails": (
        "((RANK)) && echo $(($(cat step) + 1)) >next && mv next step && kill -KILL $$; exec sleep 60"
    ),
    "a rank was stopped, and all have saved": "exit 143",
    "one launcher was stopped, and all ranks have saved": (
        "((RANK)) && until [[ -e stopped ]]; do sleep 0.1; done && exit 138;"
        "trap 'touch stopped; exit 138' USR1; kill -USR1 $PPID; sleep 60 & wait"
    ),
    "one launcher was stopped before any rank has saved": (
        "rm -f step; ((RANK)) && exec sleep 60; kill -TERM $PPID; exec sleep 60"
    ),
    "the second host comes later": (
        "((WORLD_SIZE == 2)) && exit 0; trap 'exit 143' TERM; touch running; sleep 60 & wait"
    ),
    "the second host comes later, when the rank has saved": "((WORLD_SIZE == 2)) && exit 0; touch running; exit 143",
}


AT_ONCE = 3
"""Scripts that run at the same time."""


def launch(folder: Path, ports: dict[str, int]) -> dict[str, tuple[int, list[str]]]:
    """Run the launcher of one host for each script of its pair of ranks; return its exit code and its log."""
    from megaclip.commands import launch as command

    (pair, own_rank), results, records = divmod(int(os.environ["RANK"]), 2), {}, []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megaclip").addHandler(handler)
    logging.getLogger("megaclip").setLevel(logging.INFO)
    parse = command.config_from_args
    for name, script in list(SCRIPTS.items())[pair::AT_ONCE]:
        own = folder / name
        own.mkdir(exist_ok=True)
        (own / "step").write_text("4")
        records.clear()

        def newest_step(own: Path = own) -> int:
            return int((own / "step").read_text()) if (own / "step").exists() else 0

        def with_script(arguments: Any, script: str = script, own: Path = own) -> tuple[Any, str, list[str]]:
            return parse(arguments)[0], "bash", ["-c", f'cd "{own}"; echo $RANK $WORLD_SIZE >>starts; {script}']

        command.config_from_args = with_script  # type: ignore[assignment]
        command.checked_training = lambda *_, newest_step=newest_step: newest_step  # type: ignore[assignment]
        later = "later" in name
        while later and own_rank and not (own / "running").exists():
            time.sleep(0.1)
        words = ["--nnodes", "1:2" if later else "2", "--max-restarts", "2"]
        words += ["--local-addr", "localhost", "--rdzv-endpoint", f"localhost:{ports[name]}"]
        # A busy machine may pause a launcher for seconds. After a stop the launchers wait for hosts for this time too.
        quick = f"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt={30 if later else 8}"
        words += ["--rdzv-conf", f"is_host={1 - own_rank},{quick}", "train"]
        with pytest.raises(SystemExit) as end:
            command.main(words)
        results[name] = end.value.code, list(records)
    return results


def test_when_a_run_ends_and_when_it_starts_again(tmp_path: Path) -> None:
    ends = run_ranks(launch, 2 * AT_ONCE, tmp_path, {name: free_port() for name in SCRIPTS})
    first, second = ({name: end for of_rank in ends[host::2] for name, end in of_rank.items()} for host in (0, 1))

    def starts(name: str) -> list[str]:
        return sorted((tmp_path / name / "starts").read_text().splitlines())

    expected = {
        "complete": (0, 1, ""),
        "one host refuses a setting": (78, 1, "host localhost has refused a setting"),
        "a rank of the second host fails twice at the same step": (
            1,
            2,
            "host localhost: rank 1 ended with exit code 3",
        ),
        "each attempt saves and fails": (1, 3, "host localhost: rank 1 was ended by SIGKILL"),
        "a rank was stopped, and all have saved": (143, 1, "a signal to a rank"),
        "one launcher was stopped, and all ranks have saved": (138, 1, "stopped by SIGUSR1"),
        "one launcher was stopped before any rank has saved": (1, 1, "stopped by SIGTERM, without a checkpoint"),
    }
    for name, (code, attempts, message) in expected.items():
        for own_code, log in (first[name], second[name]):
            assert own_code == code, (name, first[name], second[name])
            assert any(message in line for line in log) or not message, (name, log)
        # The second host may start its rank once more before it reads that the run has ended.
        assert starts(name).count("0 2") == attempts and starts(name).count("1 2") - attempts in (0, 1), name
    for later in ("the second host comes later", "the second host comes later, when the rank has saved"):
        assert (first[later][0], second[later][0]) == (0, 0), (first[later], second[later])
        # The first host starts alone again if the second one, on a busy machine, misses torch's last call.
        assert set(starts(later)[:-2]) == {"0 1"} and starts(later)[-2:] == ["0 2", "1 2"]
    fails_twice = first["a rank of the second host fails twice at the same step"]
    assert "failed twice without a checkpoint after step 4" in fails_twice[1][-1]
    assert "--max-restarts 2 allows no further restart" in first["each attempt saves and fails"][1][-1]


def test_a_host_is_lost_also_if_torch_removes_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of host b dies. Its ranks save, so those of host a end with them. torch removes b after 15 s."""
    agent, now = agent_module.Agent.__new__(agent_module.Agent), [0.0]
    agent._silence_s, agent._beats, agent._hosts = 15, {}, {"a": "host-a", "b": "host-b"}
    agent._notes, agent._newest_step = HashStore(), lambda: 4
    agent._rendezvous_handler = SimpleNamespace(num_nodes_waiting=lambda: 0)
    agent._worker_group = SimpleNamespace(group_rank=0)

    def state() -> SimpleNamespace:
        beats = {"a": now[0] // 3} | ({"b": -1} if now[0] < 15 else {})
        return SimpleNamespace(last_heartbeats=beats)

    def look_after_a_pause(_: float) -> None:
        now[0] += 1.1
        agent._look()

    monkeypatch.setattr(agent, "_read_state", state)
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=look_after_a_pause))
    assert agent._after_exit({0: 143}) is None
    assert "host host-b is lost" in agent._note("failure")[0] and now[0] < 20


def test_a_port_of_a_program_that_answers_nothing_ends_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from megaclip.commands import launch as command

    monkeypatch.setattr(command, "checked_training", lambda *_: lambda: None)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with socket.create_server(("localhost", 0)) as other:
        endpoint = f"localhost:{other.getsockname()[1]}"
        with pytest.raises(MegaclipError, match=f"{endpoint}: no answer in 2 s; another program may use the port"):
            command.main(["--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=0,read_timeout=1", "train"])
