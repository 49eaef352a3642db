"""Ending a run early without losing what it has trained: a signal is noted, and acted on between two steps.

One rank that receives SIGTERM, SIGINT or SIGUSR1 is enough: after each step all ranks ask each other (`agreed`), save
and end. The same SIGTERM or SIGINT again ends a rank at once; SIGUSR1 may come as often as it likes. A signal to all
hosts may reach a rank last when the others have already made it save, or when it has trained to the end: it does not
die of that on its way out, unless it is SIGTERM and a peer has left already.

Exit code: 128 + the signal's number, as a shell reports it. Zero means trained to the end, so that whatever started the
run can tell that it is to go on; the deepspeed launcher, `pdsh -S` and srun pass the code on. They end the other ranks
when the first one leaves with it: by then all have saved.

What the deepspeed launcher does decides the rest. Told to end, by Ctrl-C (of which every rank has its own SIGINT too)
or SIGTERM, it sends SIGTERM to one rank after the other with its data workers, and SIGKILL 30 s later. It does the same
when a rank has died; the others may then wait in a collective for ever, so a rank that misses one of its host's ends at
once. Neither that nor a second signal can wait for the main thread: a thread reads what the signals' C handlers write.
"""

import os
import signal
import socket
import threading
from types import FrameType, TracebackType

import psutil

from megaclip.comm.collectives import gather_integers
from megaclip.comm.groups import ranks_of_this_node
from megaclip.logging import get_logger

logger = get_logger(__name__)

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Context manager, in the main thread: notes the signals that reach this rank.

    The handlers stay until the process ends, unless an error ends the run.
    """

    def __init__(self) -> None:
        self._noted = 0
        """The first signal's number."""
        self._ends = False
        """Whether all is saved, or about to be: signals change nothing any more."""

    def __enter__(self) -> "StopSignals":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, self._note) for number in STOPPING}
        for number in STOPPING:
            signal.siginterrupt(number, False)  # libraries need not expect interrupted system calls
        threading.Thread(target=self._listen, name="stop-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._ends = True
            return
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.shutdown(socket.SHUT_WR)  # ends the thread, whatever forked processes still hold
        self._writer.close()

    def agreed(self) -> signal.Signals | None:
        """The signal to end with, if any rank has noted one; the same on every rank, which call it together."""
        noted = gather_integers([self._noted])
        first = next((signal.Signals(number) for (number,) in noted if number), None)
        self._ends = first is not None
        return first

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted = self._noted or number

    def _listen(self) -> None:
        """The thread. Other signals that have handlers (SIGCHLD of data workers) come by here too."""
        seen: set[int] = set()
        with self._reader:
            while numbers := self._reader.recv(1):
                number = numbers[0]
                if number not in STOPPING:
                    continue
                if (number in seen and number != signal.SIGUSR1) or (number == signal.SIGTERM and _misses_a_rank()):
                    os._exit(128 + number)
                if not seen and not self._ends:
                    logger.info("%s: saving and ending after this step", signal.Signals(number).name)
                seen.add(number)


def _misses_a_rank() -> bool:
    """Whether a rank of this host has ended: the launcher, their parent, has fewer children than it started."""
    ranks = ranks_of_this_node()
    if ranks is None:
        return False
    try:
        children = psutil.Process(os.getppid()).children()
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in children) < ranks
    except psutil.NoSuchProcess:  # one that ends just now
        return True
