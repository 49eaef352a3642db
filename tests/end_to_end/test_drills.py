"""One trial of each drill, and tests of the drills' counts, which must report the faults that they exist for."""

import re
import subprocess
import sys

import pytest

from tests.drills.faults import FAULTS
from tests.drills.soak import growth
from tests.end_to_end.training_runs import ROOT, launcher_environment

VARIATIONS = {"file_truncated", "file_deleted", "shard_deleted", "shard_unreadable", "sigusr1"}
"""Faults that a run notices as it notices another one of the list. Tests of single modules cover them too."""


@pytest.mark.long
def test_one_trial_of_each_drill_except_variations():
    faults = [name for name in FAULTS if name not in VARIATIONS]
    done = subprocess.run(
        [sys.executable, "-m", "tests.drills", "--trials", "1", "--seed", "5", "--soak-steps", "0", "--only", *faults],
        cwd=ROOT,
        env=launcher_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    rows = re.findall(r"^\| ([a-z ]+) \| 1 \| [01] \|(.*)\|$", done.stdout, re.M)
    assert len(rows) >= len(faults) - 4, done.stdout  # without root four are left out
    assert done.returncode == 0, done.stdout
    assert all(set(re.findall(r"\d+", counts)) == {"0"} for _, counts in rows)


def test_growth_is_found_and_noise_is_not():
    flat = [100.0 + number % 3 for number in range(200)]
    assert growth(flat, 1.0, 0.0)[2] is False
    assert growth([value + 0.05 * number for number, value in enumerate(flat)], 1.0, 0.01)[2] is True
    assert growth([20.0 + number // 50 for number in range(200)], 0.0, 0.0)[2] is True
