"""The files of an attempt: its hostfile, and the exit codes of its hosts.

launch/multi_node.sh writes the exit codes, for the process that restarts the run.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megaclip.errors import MegaclipError, os_reason
from megaclip.hosts.hostfile import Host, write_hostfile

HOST_CODES_FILE = "MEGACLIP_HOST_CODES"
"""Environment variable: the file to which the script writes lines `HOST EXIT_CODE`."""
END_OF_CODES = "ended"
"""Line that the script writes before it ends the other ranks. Exit codes after this line are ignored."""


@contextlib.contextmanager
def attempt_files(hosts: Sequence[Host], parent: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """Write the hostfile of an attempt and an empty file for its exit codes; delete both at the end.

    Args:
        hosts: the hosts of the attempt.
        parent: folder of their folder. None: the system's folder of temporary files.

    Raises:
        MegaclipError: the files cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = tempfile.TemporaryDirectory(prefix=".megaclip-hosts-", dir=parent, ignore_cleanup_errors=True)
            own = Path(stack.enter_context(folder))
            hostfile, codes = own / "hostfile", own / "codes"
            write_hostfile(hostfile, hosts)
            codes.touch()
        except OSError as error:
            raise MegaclipError(
                f"cannot write the hostfile of an attempt: {os_reason(error)}; free space or fix permissions there"
            ) from None
        yield hostfile, codes


def read_codes(path: Path, hosts: Sequence[Host]) -> dict[str, int]:
    """Return the exit codes by host that the script has written before it ended the other ranks.

    Return none if the file cannot be read: a system that deletes old temporary files may have deleted it.
    """
    names = {host.address: host.name for host in hosts} | {host.name: host.name for host in hosts}
    codes: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return codes
    for line in lines:
        if line == END_OF_CODES:
            break
        address, _, code = line.partition(" ")
        if address in names and code.isascii() and code.isdigit():
            codes.setdefault(names[address], int(code))
    return codes
