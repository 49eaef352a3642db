"""Two hosts on one machine, to test launchers: `with two_hosts(folder) as hosts`. Requires Linux and root.

A host is a process with its own network, host name, process table and ssh server. A virtual network cable (veth)
connects the two hosts, which share the file system. The namespaces of a host have no names and exist as long as its ssh
server. When that process ends, the kernel ends all other processes of the host and removes the cable. The ssh server
ends with the test process, so nothing remains even if the test process is killed.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Every pair of hosts has its own network, so all pairs use the same addresses (RFC 2544 reserves 198.18/15 for tests).
ADDRESSES = ("198.18.0.1", "198.18.0.2")
INTERFACE = "eth0"
_CABLE = "cable"
_NAMESPACES = ("--net", "--uts", "--pid", "--fork", "--mount-proc")
# setpriv ends unshare when its parent ends, and unshare ends its child. The child is process 1 of the host. Its
# arguments are the name of the host and its command.
_START = ("sh", "-c", 'hostname "$0"; exec "$@"')
_HOLD = ("setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--kill-child", *_START)
_PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh", "pkill": "procps"}
_START_LIMIT_S = 120.0


def reason_to_skip() -> str | None:
    """Return the reason why this machine cannot create two hosts, or None if it can."""
    if os.geteuid() != 0:
        return "two hosts on one machine need root"
    missing = [package for command, package in _PACKAGES.items() if shutil.which(command) is None]
    if missing:
        return f"two hosts on one machine need the packages {', '.join(missing)}"
    probe = ["unshare", *_NAMESPACES, "ip", "link", "add", INTERFACE, "type", "bridge"]
    done = subprocess.run(probe, capture_output=True, text=True)
    return f"this machine cannot create network namespaces: {done.stderr.strip()}" if done.returncode else None


@dataclass(frozen=True)
class Host:
    """One host."""

    address: str
    server: int
    """Process id of the host's first process, as seen from this machine."""

    def command(self, *command: str | Path, folder: Path | None = None) -> list[str]:
        """Return the command that runs `command` on the host in `folder`. It is started on this machine."""
        enter = ["nsenter", "--target", str(self.server), "--net", "--uts", "--pid", "--mount"]
        return [*enter, "env", f"--chdir={folder or '/'}", *map(str, command)]

    def processes(self, pattern: str) -> list[int]:
        """Return the process ids, as seen from the host, of its processes whose command line matches `pattern`."""
        done = subprocess.run(self.command("pgrep", "-f", "--", pattern), capture_output=True, text=True)
        return [int(process) for process in done.stdout.split()]


@dataclass
class TwoHosts:
    """Two hosts that can reach each other by ssh as root with the options `-F ssh_config`."""

    first: Host
    second: Host
    hostfile: Path
    ssh_config: Path
    _second: ExitStack
    """Context that ends the second host when it is closed."""

    def end_second(self) -> None:
        """End the second host as a power cut would: all its processes are killed, and its network disappears."""
        self._second.close()

    def start_second(self) -> None:
        """Start the second host again, after `end_second`."""
        self.second = self._second.enter_context(_host(self.hostfile.parent, ADDRESSES[1]))
        # The kernel removes the old cable some time after the end of the host.
        subprocess.run(["nsenter", "--target", str(self.first.server), "--net", "ip", "link", "delete", _CABLE])
        _add_cable(self.first, self.second)


def environment(hosts: TwoHosts) -> dict[str, str]:
    """Return the variables of a user who starts a launcher. The ranks get their variables from a deepspeed_env file."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": os.environ["HOME"],
        "PYTHONPATH": str(ROOT),  # the code of this checkout; DeepSpeed forwards the variable to the ranks
        "DS_ACCELERATOR": "cpu",
        "DS_ENV_FILE": str(hosts.hostfile.with_name("deepspeed_env")),
        "PDSH_SSH_ARGS_APPEND": f"-F {hosts.ssh_config}",
    }


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Create two hosts with one slot each. Write keys, hostfile, ssh_config and deepspeed_env to `folder`.

    Call `reason_to_skip` first.
    """
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd requires this folder
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    ssh_config = folder / "ssh_config"
    ssh_config.write_text(
        f"IdentityFile {folder / 'user_key'}\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
    )
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    for_ranks = {name: os.environ[name] for name in ("TORCH_EXTENSIONS_DIR", "PATH") if name in os.environ}
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    for_ranks |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": INTERFACE}
    # Must be written now: a launcher may read it at any time.
    (folder / "deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in for_ranks.items()))
    with _host(folder, ADDRESSES[0]) as first, ExitStack() as second_stack:
        second = second_stack.enter_context(_host(folder, ADDRESSES[1]))
        connect(first, second)
        yield TwoHosts(first, second, hostfile, ssh_config, second_stack)


def connect(first: Host, second: Host) -> None:
    """Give each host a network interface, and connect the two interfaces."""
    # A bridge, which stays when the cable is removed, like a network card.
    _ip(first, f"link add {INTERFACE} type bridge")
    _set_up(first)
    _add_cable(first, second)


def set_cable(first: Host, state: str) -> None:
    """Pull the cable out of the first host ("down"), or put it back ("up")."""
    _ip(first, f"link set {_CABLE} {state}")


def _add_cable(first: Host, second: Host) -> None:
    """Connect two hosts by a virtual cable. The kernel removes the cable when one of the hosts ends."""
    _ip(first, f"link add {_CABLE} type veth peer name {INTERFACE} netns {second.server}")
    _ip(first, f"link set {_CABLE} master {INTERFACE} up")
    _set_up(second)


def _set_up(host: Host) -> None:
    """Set the address of a host's interface, and turn it on."""
    _ip(host, f"address add {host.address}/24 dev {INTERFACE}")
    for interface in ("lo", INTERFACE):
        _ip(host, f"link set {interface} up")


@contextmanager
def _host(folder: Path, address: str) -> Iterator[Host]:
    """Create a host with an ssh server and without a network cable. End all its processes afterwards."""
    options = {
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "user_key.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "PidFile": "none",
        # Otherwise bash runs ~/.bashrc, which may wait for a lock that a shell of an ended host has left in ~.
        "SetEnv": "SHLVL=1",
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
    """Wait until the ssh server listens. Return the process that `unshare` has forked: process 1 of the host."""
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline and holder.poll() is None:
        if "Server listening on 0.0.0.0" in log.read_text():
            return int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
        time.sleep(0.02)
    raise RuntimeError(f"the host did not start (exit code {holder.poll()}): {log.read_text()}")


def _ip(host: Host, arguments: str) -> None:
    subprocess.run(["nsenter", "--target", str(host.server), "--net", "ip", *arguments.split()], check=True)
