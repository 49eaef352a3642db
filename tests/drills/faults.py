"""The faults of the drills, and how a run with each fault may end.

A fault is a function `fault(trial)`. It starts the run with `trial.start`, injects the fault at a random time, waits
for the run, and returns a `Verdict`. All random choices use `trial.random`.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megaclip import files
from megaclip.checkpoint import deepspeed_files, durable, manifest, store
from megaclip.engine.metrics import Metrics
from megaclip.guards.watchdog import Watchdog
from tests.drills.jobs import WORLD_SIZE, Job, Prepare, start
from tests.end_to_end.training_runs import data_workers
from tests.end_to_end.two_hosts import ADDRESSES, INTERFACE, Host, connect, set_cable

STEPS, SAVE_EVERY = 24, 4
_CLONE_NEWNET = 0x40000000
"""Flag of setns(2): a network."""
_READ_AHEAD = 8
"""Steps before the end of the run in which a data worker may have read its last batch."""


@dataclass
class Verdict:
    """How a run with a fault ended, and what is required of the resumed run."""

    codes: tuple[int, ...]
    """Correct exit codes if the fault has happened."""
    saves_last_step: bool = False
    """The run must have saved the last step that it has trained."""
    damaged: str = ""
    """Tag of a checkpoint that a resumed run must not use."""
    error: str = ""
    """Words that the log must contain."""


@dataclass
class Trial:
    """One run into which a fault is injected."""

    random: random.Random
    folder: Path
    """New folder. Its subfolder `runs` is --logs."""
    flags: Callable[..., list[str]]
    """Function that returns the command line of the run. Its arguments change flags."""
    reference: dict[int, float]
    """Step -> loss of the run without a fault."""
    step_s: float
    """Seconds of a step of the run without a fault."""
    job: Job | None = None
    held_after: int = 0
    """Step after which the ranks wait for the fault. 0: they do not wait."""
    missed: bool = False
    """The run had ended before the fault happened."""
    undo: list[Callable[[], Any]] = field(default_factory=list)
    """Functions to call before the run is resumed."""
    logs: Path = Path()
    train_data: Path | None = None
    """Copy of the training data, if the fault changes it."""

    @property
    def checkpoints(self) -> Path:
        return self.logs / "run" / "checkpoints"

    def start(self, prepare: Prepare | None = None, **changes: Any) -> Job:
        self.job = start(self.command(**changes), self.folder / "first", prepare)
        return self.job

    def command(self, **changes: Any) -> list[str]:
        if self.train_data is not None:
            changes["train_data"] = str(self.train_data / "*.tar")
        return self.flags(logs=self.logs, **changes)

    def some_time(self, job: Job, last: int = STEPS) -> None:
        """Wait until a random moment between the first step and step `last`."""
        job.wait_for_step(self.random.randrange(1, last))
        time.sleep(self.random.uniform(0, 2 * self.step_s))

    def hold(self) -> Prepare:
        """Return a preparation of the ranks for a fault between two saves and after the first steps.

        --hang-timeout applies only after the fault. The ranks wait before the next save until the file `harmed` exists.
        """
        self.held_after = self.random.randrange(1, STEPS // SAVE_EVERY) * SAVE_EVERY + self.random.choice((2, 3))
        return lambda rank: _hold(self.held_after, self.folder / "harmed")

    def wait_between_saves(self, job: Job) -> None:
        """Wait until a random moment that is one or two steps after a save."""
        job.wait_for_step(self.held_after - 1)
        time.sleep(self.random.uniform(0, 2 * self.step_s))

    def harmed(self) -> None:
        """Record that the fault has been injected."""
        (self.folder / "harmed").touch()

    def send(self, process: int, number: int) -> None:
        """Send a signal to a process, or to all processes of a job: the negative id of its launcher."""
        try:
            os.kill(process, number)
        except ProcessLookupError:
            self.missed = True


def signalled(receiver: str, number: int, verdict: Verdict, trial: Trial) -> Verdict:
    """Send a signal to one "rank", to the "launcher", which forwards SIGTERM to all ranks, or to "all" processes."""
    job = trial.start(**_maybe_async(trial))
    trial.some_time(job)
    receivers = {"rank": trial.random.choice(job.ranks), "launcher": job.launcher, "all": -job.launcher}
    trial.send(receivers[receiver], number)
    return verdict


def rank_stopped(trial: Trial) -> Verdict:
    """Stop one rank with SIGSTOP. The watchdog must notice."""
    job = trial.start(trial.hold(), hang_timeout=3)
    trial.wait_between_saves(job)
    victim = trial.random.randrange(WORLD_SIZE)
    trial.send(job.ranks[victim], signal.SIGSTOP)
    trial.harmed()
    return Verdict((75,), error=f"rank {victim} has not arrived")


def network_cut(trial: Trial) -> Verdict:
    """Pull out the cable between the hosts of the two ranks. Both watchdogs must notice."""
    job, first = _on_two_hosts(trial, trial.hold(), hang_timeout=3)
    trial.wait_between_saves(job)
    set_cable(first, "down")
    trial.harmed()
    return Verdict((75,), error="has not arrived")


def network_healed(trial: Trial) -> Verdict:
    """Pull out the cable for up to two seconds. The run must continue without an error."""
    job, first = _on_two_hosts(trial, **_maybe_async(trial))
    trial.some_time(job)
    set_cable(first, "down")
    time.sleep(trial.random.uniform(0, 2))
    set_cable(first, "up")
    return Verdict((0,), saves_last_step=True)


def worker_killed(trial: Trial) -> Verdict:
    job = trial.start(**_maybe_async(trial))
    trial.some_time(job, STEPS - _READ_AHEAD)
    workers = data_workers(trial.random.choice(job.ranks))
    if not workers or job.last_step() > STEPS - _READ_AHEAD:
        trial.missed = True
    else:
        trial.send(trial.random.choice(workers).pid, signal.SIGKILL)
    return Verdict((1,), saves_last_step=True, error="a data worker died")


def disk_full(trial: Trial) -> Verdict:
    """Fill the disk of the run's folder, a small tmpfs."""
    disk = trial.folder / "disk"
    _mount(trial, disk, "-t", "tmpfs", "-o", "size=24m", "none")
    trial.logs = disk / "runs"
    job = trial.start(**_maybe_async(trial))
    trial.some_time(job, STEPS - SAVE_EVERY)
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(1 << 12))
    trial.undo.append(filler.unlink)
    return Verdict((1,), error="No space left")


def flip_a_bit(trial: Trial, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[trial.random.randrange(len(content))] ^= 1 << trial.random.randrange(8)
    path.write_bytes(content)


def truncate(trial: Trial, path: Path) -> None:
    os.truncate(path, trial.random.randrange(path.stat().st_size))


def delete(_: Trial, path: Path) -> None:
    path.unlink()


def replace_by_folder(_: Trial, path: Path) -> None:
    """Even root cannot read a folder as a file."""
    path.unlink()
    path.mkdir()


def power_cut(trial: Trial) -> Verdict:
    """Stop all writes of the file system, ext4 on a loop device, including its journal. Then kill all processes."""
    image, disk = trial.folder / "image", trial.folder / "disk"
    with image.open("wb") as stream:
        stream.truncate(96 << 20)
    _run("mkfs.ext4", "-q", "-F", str(image))
    _mount(trial, disk, "-o", "loop,commit=1", str(image))
    trial.logs = disk / "runs"
    job = trial.start(**_maybe_async(trial))
    trial.some_time(job)
    trial.send(-job.launcher, signal.SIGSTOP)  # no process notices that the file system has stopped
    _shut_down(disk)
    trial.send(-job.launcher, signal.SIGKILL)
    job.wait()
    _unmount(disk)
    # A copy, because the mount namespace of another program may hold the file system, so the image may still be in use.
    shutil.copyfile(image, trial.folder / "copy")
    _run("mount", "-o", "loop", str(trial.folder / "copy"), str(disk))
    return Verdict((-9,))


def _maybe_async(trial: Trial) -> dict[str, Any]:
    return {"async_save": ""} if trial.random.random() < 0.5 else {}


def _hold(step: int, harmed: Path) -> None:
    """Make this rank wait after `step` until the file `harmed` exists. --hang-timeout applies only from then on.

    A rank that is paused before the fault therefore does not count as hanging.
    """
    record, limit_s = Metrics.record_step, Watchdog._limit_s

    def recording(metrics: Metrics, number: int, values: Any) -> None:
        record(metrics, number, values)
        while number == step and not harmed.exists():
            time.sleep(0.002)

    Metrics.record_step = recording  # type: ignore[method-assign]
    Watchdog._limit_s = lambda dog: limit_s(dog) if harmed.exists() else 600.0  # type: ignore[method-assign]


def _on_two_hosts(trial: Trial, prepare: Prepare | None = None, **changes: Any) -> tuple[Job, Host]:
    """Start a run whose ranks have separate networks, joined by a cable. Return it and the first rank's host."""
    hosts = [_host(trial, address) for address in ADDRESSES]
    connect(*hosts)

    def move(rank: int) -> None:
        network = os.open(f"/proc/{hosts[rank].server}/ns/net", os.O_RDONLY)
        _os_error(ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET))
        os.close(network)
        os.environ.update({"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACE})
        if prepare is not None:
            prepare(rank)

    return trial.start(move, **changes), hosts[0]


def _host(trial: Trial, address: str) -> Host:
    """Return a host with its own network, which exists until the run has ended.

    Otherwise the network would disappear with its rank, together with messages on their way to the other rank.
    """
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    trial.undo += [server.kill, server.wait]
    assert server.stdout is not None and server.stdout.readline() == b"\n", "cannot create a network"
    return Host(address, server.pid)


def _os_error(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def killed_in_save(trial: Trial, **changes: Any) -> Verdict:
    """Kill a rank with SIGKILL before, while or after it writes a file of a checkpoint.

    A rank writes DeepSpeed's files first. Then the first rank writes state.json, the manifest and `latest`.
    """
    victim, moment = trial.random.randrange(WORLD_SIZE), trial.random.choice(("before", "during", "after"))
    file = trial.random.randrange(5 if victim == 0 else 1)
    save = trial.random.randrange(1, STEPS // SAVE_EVERY)
    share = trial.random.random()

    def prepare(rank: int) -> None:
        if rank == victim:
            _kill_at_file(save * (5 if victim == 0 else 1) + file, moment, share)

    trial.start(prepare, **changes)
    return Verdict((137,))


def _kill_at_file(number: int, moment: str, share: float) -> None:
    """Make this process kill itself before, while or after it writes a file of its checkpoints.

    number: number of files that it writes before this one. share: part of the file that is written, for "during".
    """
    written = [0]

    def here(when: str) -> None:
        if written[0] == number and moment == when:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any) -> Any:
            here("before")
            time.sleep(0.05)  # gives the other ranks time to continue, and training too with --async-save
            result = original(*arguments)
            here("after")
            written[0] += 1
            return result

        return write

    class Output(durable._CheckedOutput):
        def write(self, data: Any) -> int:
            if written[0] == number and moment == "during":
                view = memoryview(data)
                self._stream.write(view[: int(share * view.nbytes)])
                self._stream.flush()
                if self.size > 0 or share > 0.5:
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().write(data)

    replace = os.replace

    def replacing(source: Any, target: Any) -> None:
        here("during")
        replace(source, target)

    deepspeed_files.save_tensors = counted(durable.save_tensors)
    durable._CheckedOutput = Output  # type: ignore[misc]  # a class cannot be assigned
    writer = counted(files.write_atomically)
    files.os = _Replaced(os, replace=replacing)  # type: ignore[assignment]  # it is no module
    store.write_atomically = writer
    manifest.write_atomically = writer


class _Replaced:
    """A module in which some functions are replaced."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self.__dict__.update(vars(module) | functions)


def checkpoint_damaged(damage: Callable[[Trial, Path], None], trial: Trial) -> Verdict:
    """Stop a run after a random step, and damage a file of its latest checkpoint."""
    job = trial.start(stop_after_steps=trial.random.randrange(SAVE_EVERY + 1, STEPS), **_maybe_async(trial))
    job.wait()
    tag = (trial.checkpoints / "latest").read_text()
    damage(trial, trial.random.choice(sorted(path for path in (trial.checkpoints / tag).iterdir() if path.is_file())))
    return Verdict((0,), damaged=tag)


def shard_damaged(damage: Callable[[Trial, Path], None], trial: Trial) -> Verdict:
    """Damage a shard of the training data while the run reads it. The shard is repaired before the run is resumed.

    With --max-bad-fraction 0 the run ends at the first sample that it cannot read. Otherwise it would replace the
    sample.
    """
    inputs = Path(trial.flags(logs=trial.logs)[5]).parent
    trial.train_data = trial.folder / "train"
    shutil.copytree(inputs, trial.train_data)
    job = trial.start(max_bad_fraction=0, **_maybe_async(trial))
    trial.some_time(job, STEPS - _READ_AHEAD)
    shard = trial.random.choice(sorted(trial.train_data.glob("*.tar")))
    damage(trial, shard)

    def restore() -> None:
        if shard.is_dir():
            shard.rmdir()
        shutil.copy2(inputs / shard.name, shard)

    trial.undo.append(restore)
    return Verdict((1, 0), saves_last_step=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _mount(trial: Trial, folder: Path, *arguments: str) -> None:
    folder.mkdir()
    _run("mount", *arguments, str(folder))


def _unmount(folder: Path) -> None:
    """Unmount a folder. A process that has ended may still use it for a moment."""
    deadline = time.monotonic() + 20
    while subprocess.run(["umount", str(folder)], stderr=subprocess.DEVNULL).returncode != 0:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{folder} is still in use")
        time.sleep(0.1)


def _shut_down(folder: Path) -> None:
    """Stop all writes to the file system that is mounted at `folder`, without writing its journal."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 2))  # EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def unmounted(folder: Path) -> Iterator[None]:
    """Unmount `folder`/disk, if it is mounted, at the end of the `with` statement."""
    try:
        yield
    finally:
        if (folder / "disk").is_mount():
            _unmount(folder / "disk")


FAULTS: dict[str, Callable[[Trial], Verdict]] = {
    "rank_killed": partial(signalled, "rank", signal.SIGKILL, Verdict((137,))),
    "host_killed": partial(signalled, "all", signal.SIGKILL, Verdict((-9,))),
    "launcher_killed": partial(signalled, "launcher", signal.SIGKILL, Verdict((-9,), saves_last_step=True)),
    "killed_in_save": killed_in_save,
    "killed_in_async_save": partial(killed_in_save, async_save=""),
    "power_cut": power_cut,
    "disk_full": disk_full,
    "file_truncated": partial(checkpoint_damaged, truncate),
    "file_flipped": partial(checkpoint_damaged, flip_a_bit),
    "file_deleted": partial(checkpoint_damaged, delete),
    "rank_stopped": rank_stopped,
    "network_cut": network_cut,
    "network_healed": network_healed,
    "sigterm": partial(signalled, "launcher", signal.SIGTERM, Verdict((143,), saves_last_step=True)),
    "sigusr1": partial(signalled, "rank", signal.SIGUSR1, Verdict((138,), saves_last_step=True)),
    "worker_killed": worker_killed,
    "shard_deleted": partial(shard_damaged, delete),
    "shard_truncated": partial(shard_damaged, truncate),
    "shard_unreadable": partial(shard_damaged, replace_by_folder),
}
