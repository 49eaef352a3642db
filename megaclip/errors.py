"""Errors for the user of a run, and helpers that write their messages.

The message of a `MegaclipError` is one line without a full stop: the setting and its value, what is accepted, what to
do. (Only the error for several unknown arguments has several lines.) The run logs it once and ends every rank with a
non-zero exit code. Any other exception is a bug and keeps its traceback.
"""

import difflib
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import ValidationError

REFUSED_EXIT_CODE = 78
"""Exit code of a run whose settings are refused (EX_CONFIG of sysexits.h). A restart would be refused too."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that stop a run. Its exit code is then 128 + the number of the signal."""

_WRONG_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s'\"]*)", re.IGNORECASE)
_LONG_WORD = re.compile(r"(\S{400})\S+")


def first_line(error: BaseException) -> str:
    """Return the first line of the message of `error`, at most 200 characters, or its class if it has no message."""
    text = str(error).strip()
    return shortened(text.splitlines()[0] if text else type(error).__name__)


def shortened(line: str) -> str:
    """Return `line`, shortened to at most 200 characters."""
    return line if len(line) <= 200 else line[:197] + "..."


def os_reason(error: Exception, beside: str = "") -> str:
    """Return the file of an operating-system error, unless the text `beside` names it, and the reason, in one line."""
    reason, name = getattr(error, "strerror", None) or first_line(error), getattr(error, "filename", None)
    return reason if name is None or str(name) in beside else f"{name}: {reason}"


@contextmanager
def os_errors_as(
    kind: type["MegaclipError"], problem: str, advice: str = "", *, also: type[Exception] = OSError
) -> Iterator[None]:
    """Raise an OSError inside the `with` statement, such as a full disk, as an error "problem: reason; advice".

    also: another class of exceptions that is raised in this way.
    """
    try:
        yield
    except (OSError, also) as error:
        reason = os_reason(error, beside=problem)
        raise kind("; ".join(filter(None, (f"{problem}: {reason}", advice)))) from error


def public(text: str) -> str:
    """Return a URL, or a text with URLs, without user names, passwords and the queries of web servers."""

    def stripped(match: re.Match) -> str:
        scheme, rest = match.groups()
        is_web = scheme.lower().startswith("http")
        if is_web:
            rest = rest.partition("?")[0]
        authority, slash, path = rest.partition("/")
        user, _, host = authority.rpartition("@")  # the user of abfs:// is the container
        return scheme + (host if is_web or ":" in user else authority) + slash + path

    return _URL.sub(stripped, text)


def nearest(word: str, known: set[str]) -> str:
    """Return "; did you mean ...?" with the known word closest to `word`, or "" if none is close."""
    close = closest(word, known, cutoff=0.6)
    return "" if close is None else f"; did you mean {close!r}?"


def closest(word: str, known: set[str], *, cutoff: float) -> str | None:
    """Return the known word closest to `word`, ignoring case and treating _ and / as -; None below the cutoff."""
    plain = {_plain(name): name for name in sorted(known, reverse=True)}  # --lr-min replaces --lr_min
    close = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=cutoff)
    return plain[close[0]] if close else None


def _plain(word: str) -> str:
    return word.lower().replace("_", "-").replace("/", "-").lstrip("-")


class MegaclipError(Exception):
    """Base class of errors whose message is written for users, without the secrets of URLs.

    Words of more than 400 characters are cut.
    """

    exit_code: int = 1
    """Exit code of a run that ends with this error."""
    is_temporary: bool = False
    """True if another rank raised the error and the function `is_temporary` is true of it there."""

    def __str__(self) -> str:
        return _LONG_WORD.sub(r"\1...", public(super().__str__()))


class ConfigError(MegaclipError, ValueError):
    """A setting is unknown, misplaced, without effect, or contradicts another one."""

    exit_code = REFUSED_EXIT_CODE


class VersionError(MegaclipError, ImportError):
    """The installed version of a library is not supported."""

    exit_code = REFUSED_EXIT_CODE


class BusyError(ConfigError):
    """Another run uses a folder or a port. The same settings are accepted when it has ended."""

    exit_code = 1


class DataError(MegaclipError, ValueError):
    """Training or evaluation data is missing, unreadable, or has changed since the run began."""


class CheckpointError(MegaclipError):
    """A checkpoint or exported model is missing, incomplete, or belongs to another model or run."""


def is_temporary(error: MegaclipError) -> bool:
    """Return whether a failure of a disk or network has caused an error, so that a restart may succeed."""
    cause = error.__cause__
    return error.is_temporary or (isinstance(cause, OSError) and not isinstance(cause, _WRONG_PATHS))


@contextmanager
def refused_before_training() -> Iterator[None]:
    """Give errors of data and checkpoints the exit code of refused settings, because a restart would find the same.

    Exceptions are failures of a disk or network. Errors while a run trains keep exit code 1: a restart may succeed.
    """
    try:
        yield
    except (DataError, CheckpointError) as error:
        if not is_temporary(error):
            error.exit_code = REFUSED_EXIT_CODE
        raise


class NonFiniteError(MegaclipError, ArithmeticError):
    """The loss or a gradient became infinite or NaN; raised before the parameters are updated."""


def config_error(error: ValidationError, name: Callable[[str], str] = str) -> ConfigError:
    """Return the first problem of a pydantic `ValidationError` as a `ConfigError`: setting, problem, value.

    name: turns the dotted path of a field into the name that the user wrote, such as "--train-data".
    """
    problem = error.errors()[0]
    setting = name(".".join(map(str, problem["loc"]))) if problem["loc"] else ""
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")
    if not setting:
        return ConfigError(message)
    if problem["type"] == "missing":
        return ConfigError(f"{setting} is required")
    value = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
    return ConfigError(f"{setting}: {message}{value}")
