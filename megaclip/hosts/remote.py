"""Run MegaCLIP's commands on the hosts of a hostfile through pdsh and ssh, with the environment of the ranks."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megaclip.errors import ConfigError, shortened
from megaclip.hosts.hostfile import Host

_LINE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f]*")
_TRANSFERRED = re.compile(r"(MLFLOW|MV2|NCCL|PYTHON|UCX)[A-Za-z0-9_]*")
"""Variables that DeepSpeed transfers to the ranks."""
# Never wait at a password prompt; launch/multi_node.sh sets the same for the ranks.
_SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3"
_ENDING_S = 10.0
"""Seconds within which a command on a host must end after its limit."""
_TIMED_OUT = 124
"""Exit code of `timeout` if it has ended the command."""


def run_on_host(host: Host, arguments: Sequence[str], *, limit_s: float) -> tuple[str, str]:
    """Run `python -m megaclip ARGUMENTS` on a host, in the current folder.

    Returns:
        The standard output, and the last line of the errors if the command failed, else "".
    """
    environment = [f"{name}={value}" for name, value in environment_of_ranks().items()]
    # pdsh leaves the command running when it ends, and a network test that hangs would keep its port
    limit = ["timeout", "--kill-after=5", f"{limit_s:.0f}"]
    command = shlex.join([*limit, "env", *environment, sys.executable, "-m", "megaclip", *arguments])
    line = f"cd {shlex.quote(os.getcwd())} && {command}".replace("%", "%%")  # pdsh replaces %n
    own = {
        **os.environ,
        "PDSH_RCMD_TYPE": "ssh",
        "PDSH_SSH_ARGS_APPEND": f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {_SSH_OPTIONS}",
    }
    no_answer = f"no answer within {limit_s:.0f} s"
    try:
        done = subprocess.run(
            ["pdsh", "-S", "-N", "-w", host.name, line],
            env=own,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s + _ENDING_S,
        )
    except FileNotFoundError:
        raise ConfigError("pdsh is not installed: apt-get install pdsh") from None
    except subprocess.TimeoutExpired:
        return "", no_answer
    if done.returncode == _TIMED_OUT:
        return "", no_answer
    if done.returncode == 0:
        return done.stdout, ""
    # pdsh's own line repeats the exit code only.
    lines = [text for text in done.stderr.splitlines() if text.strip() and not text.startswith("pdsh@")]
    return done.stdout, shortened(lines[-1].strip() if lines else f"exit code {done.returncode}")


def environment_of_ranks() -> dict[str, str]:
    """Return the variables that DeepSpeed gives to the ranks of other hosts: some of this process, and .deepspeed_env.

    Raises:
        ConfigError: a line of the file is not NAME=VALUE.
    """
    variables = {name: value for name, value in os.environ.items() if _TRANSFERRED.fullmatch(name)}
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    folders = [Path("/")] if os.path.isabs(name) else [Path.home(), Path()]
    for path in (folder / name for folder in folders):
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if not _LINE.fullmatch(line):
                raise ConfigError(
                    f"{path}, line {number}: expected NAME=VALUE; remove blank lines, comments and control characters"
                )
            variable, _, value = line.partition("=")
            variables[variable] = value
    return variables
