"""Two hosts on one machine: `with two_hosts(folder) as hosts`, for tests of the launchers. Linux, root.

A host is a process with its own network, host name, process table and ssh server; a virtual cable (veth) joins the two,
and the file system is shared. All of it lives in namespaces without a name, held by the ssh server's process alone:
when that ends, everything on the host ends with it and the kernel removes the cable. The processes are told to die with
the test process, so nothing is left behind even when that is killed.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

# Each pair of hosts has networks of its own: the same addresses serve all (198.18/15 is reserved for tests, RFC 2544).
ADDRESSES = ("198.18.0.1", "198.18.0.2")
INTERFACE = "eth0"
_NAMESPACES = ("--net", "--uts", "--pid", "--fork", "--mount-proc")
# Die with the parent; take the child, process 1 of the host, along. The child's arguments: its name and its command.
_START = ("sh", "-c", 'hostname "$0"; exec "$@"')
_HOLD = ("setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--kill-child", *_START)
_PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh", "pkill": "procps"}
_START_LIMIT_S = 120.0


def why_not() -> str | None:
    """The reason why two hosts cannot be had here; None if they can."""
    if os.geteuid() != 0:
        return "two hosts on one machine need root"
    missing = [package for command, package in _PACKAGES.items() if shutil.which(command) is None]
    if missing:
        return f"two hosts on one machine need the packages {', '.join(missing)}"
    probe = ["unshare", *_NAMESPACES, "ip", "link", "add", INTERFACE, "type", "veth"]
    done = subprocess.run(probe, capture_output=True, text=True)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else None


@dataclass(frozen=True)
class Host:
    """One host; `server` is its first process, as this machine numbers it."""

    address: str
    server: int

    def command(self, *command: str | Path, folder: Path | None = None) -> list[str]:
        """What to run on this machine so that `command` runs on the host, in `folder`."""
        enter = ["nsenter", "--target", str(self.server), "--net", "--uts", "--pid", "--mount"]
        return [*enter, "env", f"--chdir={folder or '/'}", *map(str, command)]

    def processes(self, pattern: str) -> list[int]:
        """Ids, on the host, of its processes whose command line matches."""
        done = subprocess.run(self.command("pgrep", "-f", pattern), capture_output=True, text=True)
        return [int(process) for process in done.stdout.split()]


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts that reach each other by ssh as root, with the options `-F ssh_config`."""

    first: Host
    second: Host
    hostfile: Path
    ssh_config: Path


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Two hosts with one slot each; keys, hostfile and ssh_config go to `folder`. See `why_not` first."""
    Path("/run/sshd").mkdir(exist_ok=True)  # the server insists on it
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    ssh_config = folder / "ssh_config"
    ssh_config.write_text(
        f"IdentityFile {folder / 'user_key'}\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
    )
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    with ExitStack() as stack:
        first, second = (stack.enter_context(_host(folder, address)) for address in ADDRESSES)
        _ip(first, f"link add {INTERFACE} type veth peer name {INTERFACE} netns {second.server}")
        for host in (first, second):
            _ip(host, f"address add {host.address}/24 dev {INTERFACE}")
            for interface in ("lo", INTERFACE):
                _ip(host, f"link set {interface} up")
        yield TwoHosts(first, second, hostfile, ssh_config)


@contextmanager
def _host(folder: Path, address: str) -> Iterator[Host]:
    """A host without a network yet, and its ssh server; all its processes are gone afterwards."""
    options = {
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "user_key.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "PidFile": "none",
    }
    server = [shutil.which("sshd") or "sshd", "-D", "-e", "-f", "/dev/null"]
    server += [f"-o{name}={value}" for name, value in options.items()]
    name = f"host-{address.rpartition('.')[2]}"
    with open(folder / f"{name}.log", "w") as log:
        holder = subprocess.Popen([*_HOLD, name, *server], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield Host(address, _server(holder, Path(log.name)))
    finally:
        holder.kill()
        holder.wait()


def _server(holder: subprocess.Popen, log: Path) -> int:
    """The process that `unshare` forked, number 1 of the new namespace, once it answers."""
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline and holder.poll() is None:
        if "Server listening on 0.0.0.0" in log.read_text():
            return int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
        time.sleep(0.02)
    raise RuntimeError(f"the host did not start (exit code {holder.poll()}): {log.read_text()}")


def _ip(host: Host, arguments: str) -> None:
    subprocess.run(["nsenter", "--target", str(host.server), "--net", "ip", *arguments.split()], check=True)
