"""A run with a constant learning rate can be resumed with more steps, and equals a run of the larger length.

The scalars are compared bit by bit on one machine with the same instruction set and number of threads.
"""

from pathlib import Path

from tests.end_to_end.training_runs import flags, run_in_ranks, scalars


def test_a_prolonged_run_equals_the_long_run(tiny_run: Path, tmp_path: Path) -> None:
    def command(name: str, steps: int, **changes: str) -> list[str]:
        return flags(tiny_run, tiny_run / "zero1.json", tmp_path, name=name, train_steps=steps, warmup=2, **changes)

    const = {"lr_scheduler": "const"}
    commands = [
        command("long", 6, **const),
        command("prolonged", 4, **const),
        command("prolonged", 6, **const, resume="auto"),
    ]
    *_, resumed = ended = run_in_ranks(commands)
    for ends in ended:
        assert all(end.exit_code == 0 for end in ends), ends[0].output
    assert "resumed with changed settings: --train-steps from 4 to 6\n" in resumed[0].output
    prolonged, long = scalars(tmp_path / "prolonged"), scalars(tmp_path / "long")
    for name in ("loss", "learning_rate", "gradient_norm"):
        assert sorted(long[f"train/{name}"]) == list(range(1, 7))
        assert prolonged[f"train/{name}"] == long[f"train/{name}"]
