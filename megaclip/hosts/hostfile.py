"""Read and write hostfiles: lines `HOST slots=RANKS`, one per host, as DeepSpeed reads them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaclip.errors import ConfigError, shortened

# launch/multi_node.sh accepts the same lines. Characters that a shell expands are not accepted.
_NAME = r"([A-Za-z0-9_][A-Za-z0-9_.@-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*"
_LINE = re.compile(rf"\s*(?P<name>{_NAME})\s+slots=(?P<slots>[1-9][0-9]{{0,3}})\s*(#.*)?", re.ASCII)
_NOTE = re.compile(r"\s*(#.*)?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A line of a hostfile."""

    name: str
    """Name or address for ssh, possibly USER@NAME."""
    slots: int
    """Number of ranks that the host can run."""

    @property
    def address(self) -> str:
        """Name or address without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a hostfile in its order.

    Raises:
        ConfigError: the file cannot be read, a line is not `HOST slots=RANKS`, or a host is listed twice or never.
    """
    try:
        lines = path.read_bytes().decode("utf-8", "replace").split("\n")  # a note may have any encoding
    except OSError as error:
        raise ConfigError(f"cannot read the hostfile {str(path)!r}: {error}; pass another --hostfile") from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        if _NOTE.fullmatch(line):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ConfigError(
                f"{path}, line {number}: {shortened(line)!r}; expected HOST slots=RANKS, with HOST of letters, digits "
                "and . _ - @"
            )
        host = Host(found["name"], int(found["slots"]))
        if host.name in {known.name for known in hosts}:
            raise ConfigError(f"{path}, line {number}: {host.name} is listed twice; remove one of the lines")
        hosts.append(host)
    if not hosts:
        raise ConfigError(f"{path} lists no host; add lines HOST slots=RANKS")
    return hosts


def write_hostfile(path: Path, hosts: Sequence[Host]) -> None:
    """Write `hosts` to `path` in their order."""
    path.write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts), encoding="utf-8")
