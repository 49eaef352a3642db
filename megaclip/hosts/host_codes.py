"""The exit codes of a run's hosts, which launch/multi_node.sh writes to a file for the process that restarts it."""

from collections.abc import Sequence
from pathlib import Path

from megaclip.hosts.hostfile import Host

HOST_CODES_FILE = "MEGACLIP_HOST_CODES"
"""Environment variable: the file to which the script writes lines `HOST EXIT_CODE`."""
END_OF_CODES = "ended"
"""Line that the script writes before it ends the other ranks, whose exit codes then mean nothing."""


def read_codes(path: Path, hosts: Sequence[Host]) -> dict[str, int]:
    """Return the exit codes by host that the script has written before it ended the other ranks."""
    names = {host.address: host.name for host in hosts} | {host.name: host.name for host in hosts}
    codes: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line == END_OF_CODES:
            break
        address, _, code = line.partition(" ")
        if address in names and code.isascii() and code.isdigit():
            codes.setdefault(names[address], int(code))
    return codes
