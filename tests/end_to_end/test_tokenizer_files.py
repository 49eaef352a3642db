"""A run's folder and its exports contain the files of one tokenizer only, also if they had those of another one."""

import shutil
from pathlib import Path

from megaclip.checkpoint import manifest
from megaclip.checkpoint.model_card import read_model_card
from megaclip.checkpoint.model_directory import export_checkpoint
from megaclip.engine.tokenizer_choice import choose_tokenizer
from tests.end_to_end.training_runs import flags, run_in_ranks


def models(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.model"))


def test_a_renamed_tokenizer_replaces_the_previous_file(tiny_run, tmp_path):
    renamed = tmp_path / "renamed.model"
    shutil.copyfile(tiny_run / "tokenizer.model", renamed)
    options = {"lr_scheduler": "const", "resume": "auto"}

    def command(**changes):
        return flags(tiny_run, tiny_run / "zero1.json", tmp_path, **options, **changes)

    run_in_ranks([command(train_steps=1)])
    first = tmp_path / "first"
    export_checkpoint(tmp_path / "run", first, None)
    assert models(first) == ["tokenizer.model"]
    (first / "notes.txt").write_text("mine")

    card = tmp_path / "run" / "checkpoints" / "model"
    # At last the only copy is in the run's folder.
    run_in_ranks([command(train_steps=2, tokenizer=renamed), command(train_steps=3, tokenizer=card / renamed.name)])
    assert models(card) == ["renamed.model"] and manifest.find_damage(card) == []
    assert (card / "renamed.model").read_bytes() == renamed.read_bytes()

    export_checkpoint(tmp_path / "run", first, None, overwrite=True)
    assert models(first) == ["renamed.model"] and manifest.find_damage(first) == []
    assert (first / "notes.txt").read_text() == "mine"
    exported = read_model_card(first)
    own, given = (choose_tokenizer(name, exported, exported.config).tokenizer for name in (None, str(renamed)))
    assert own(["a red three"]).equal(given(["a red three"]))
