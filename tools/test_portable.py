"""Run the tests that compare numbers under several settings of the processor, and print their errors as shares of
bounds.

    python tools/test_portable.py [--short] [--settings NAME ...] [--python PATH ...] [--jobs N]

A setting selects the instruction set (and thereby the order of sums), the number of OpenMP threads, and whether two
busy loops run beside the tests. Every setting runs with every Python. `--python` names further interpreters, each of an
environment with the dependencies of `pip install -e '.[open-clip,demo,dev]'`.

The table has a row for each run: the tests that passed and failed, the largest error as a share of its bound, and the
smallest factor by which a planted fault exceeds its bound. A share above 1/3 is not a failure, but should be
investigated: bounds are derived with a margin of a factor of three (tests/tolerances.py). The exit code is 1 if a test
fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AVX2 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
# PyTorch's kernels without AVX, and MKL's code for any processor.
BASIC = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
BUSY_LOOPS = 2
# Training through the engine, the losses over ranks, the tiles: where roundings come nearest to their bounds.
SHORT_TESTS = [
    "tests/unit/ops/test_tiles.py",
    "tests/distributed/test_clip_loss.py",
    "tests/distributed/test_engine.py",
]


@dataclass(frozen=True)
class Setting:
    """Environment variables of the tests."""

    variables: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    busy: bool = False


SETTINGS = {
    "native": Setting(),
    "native, 2 threads": Setting(threads=2),
    "native, busy": Setting(busy=True),
    "AVX2": Setting(AVX2),
    "AVX2, 2 threads, busy": Setting(AVX2, threads=2, busy=True),
    "basic": Setting(BASIC),
}
# `make test` is the native setting; the short form adds the instruction set that most processors have.
SHORT_SETTINGS = ["AVX2"]


def environment(setting: Setting, python: str, errors: Path) -> dict[str, str]:
    """Return the environment of one run."""
    threads = {"OMP_NUM_THREADS": str(setting.threads)}
    if setting.threads > 1:
        threads["OMP_WAIT_POLICY"] = "PASSIVE"  # ranks share the cores: a spinning thread delays other ranks
    ops = {}
    if python != sys.executable:  # compiled ops belong to one Python
        ops["TORCH_EXTENSIONS_DIR"] = str(Path(python).parents[1] / "torch_extensions")
    return {
        **os.environ,
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "MEGACLIP_TEST_ERRORS": str(errors),
        **setting.variables,
        **threads,
        **ops,
    }


def run(setting: Setting, python: str, tests: list[str], jobs: int) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Run the tests in `jobs` processes; return the numbers of tests by outcome, and the records of the comparisons."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as loops:
        report, errors = Path(folder) / "report.xml", Path(folder) / "errors.jsonl"
        for _ in range(BUSY_LOOPS if setting.busy else 0):
            loop = loops.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            loops.callback(loop.kill)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(report)]
        command += ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
        command += ["-m", "numbers and not gpu and not long", *tests]
        subprocess.run(command, cwd=ROOT, env=environment(setting, python, errors), check=False)
        lines = errors.read_text().splitlines() if errors.exists() else []
        return outcomes(report), [json.loads(line) for line in lines]


def outcomes(report: Path) -> dict[str, int]:
    """Return the numbers of passed, failed and skipped tests in pytest's report."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return {"passed": tests - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}


def row(name: str, counts: dict[str, int], comparisons: list[dict[str, Any]]) -> str:
    """Return one line of the table."""
    plain = [entry for entry in comparisons if not entry["fault"]]
    faults = [entry for entry in comparisons if entry["fault"]]
    largest = max(plain, key=lambda entry: entry["share"], default=None)
    smallest = min(faults, key=lambda entry: entry["share"], default=None)
    share = f"{largest['share']:.2f} ({largest['bound']})" if largest else "none"
    margin = f"{smallest['share']:.1f} ({smallest['bound']})" if smallest else "none"
    return f"{name:40} {counts['passed']:6} {counts['failed']:6} {counts['skipped']:7}  {share:40} {margin}"


def near_bounds(comparisons: list[dict[str, Any]]) -> list[str]:
    """Return a line for each test and bound with a comparison that uses more than a third of the bound."""
    near = {}
    for entry in sorted(comparisons, key=lambda entry: entry["share"]):
        if not entry["fault"] and entry["share"] > 1 / 3:
            near[entry["test"], entry["bound"]] = f"{entry['share']:.2f} of {entry['bound']}: {entry['test']}"
    return list(near.values())


def version_of(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer tests and settings, for continuous integration")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="settings to run. Default: all")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="a further interpreter; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests side by side. Default: 2")
    parser.add_argument("tests", nargs="*", help="test files. Default: all that compare numbers")
    options = parser.parse_args()
    names = options.settings or (SHORT_SETTINGS if options.short else list(SETTINGS))
    tests = options.tests or (SHORT_TESTS if options.short else [])
    rows, failed = [], False
    for python in [sys.executable, *options.python]:
        for name in names:
            label = f"Python {version_of(python)}, {name}"
            print(f"--- {label}", flush=True)
            counts, comparisons = run(SETTINGS[name], python, tests, options.jobs)
            rows.append(row(label, counts, comparisons))
            print("".join(f"{line}\n" for line in near_bounds(comparisons)), end="")
            print(rows[-1], flush=True)  # the table at the end is lost if the command is interrupted
            failed = failed or counts["failed"] > 0 or not counts["passed"]
    print(f"{'setting':40} {'passed':>6} {'failed':>6} {'skipped':>7}  {'largest share of a bound':40} smallest margin")
    print("\n".join(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
