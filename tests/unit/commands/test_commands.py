"""The command line `megaclip COMMAND`: every command starts, also with the launcher's argument, and from its file."""

import importlib.metadata
import importlib.util
import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaclip import commands
from megaclip.checkpoint.weight_files import read_tensors
from megaclip.commands import COMMANDS, evaluate, import_open_clip, list_models, main
from megaclip.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["launch", "check-hosts"])
def test_a_command_that_imports_torch_prints_its_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["megaclip", name, "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr().out
    assert not end.value.code and "usage: " in printed and "--help" in printed


EVERY_HELP = """
import sys
from megaclip.commands import COMMANDS, main

for name in COMMANDS.keys() - {"check-hosts", "launch"}:
    sys.argv = ["megaclip", name, "--help"]
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, None) and "torch" not in sys.modules, name
"""


def test_the_help_of_a_command_needs_no_pytorch_and_names_the_command_that_was_typed():
    shown = subprocess.run([sys.executable, "-c", EVERY_HELP], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    named = set(re.findall(r"^usage: megaclip ([a-z-]+)", shown.stdout, re.MULTILINE))
    assert named >= {name for name, command in COMMANDS.items() if not command.module.endswith(".py")} - {
        "check-hosts",
        "launch",
    }
    assert re.search(r"^Required:\n.*^Data:\n.*^Evaluation:\n", shown.stdout, re.MULTILINE | re.DOTALL)


def test_every_module_is_a_command():
    helpers = {"__init__", "argument_types", "evaluate_saved", "planned_run"}
    modules = {path.stem for path in Path(commands.__file__).parent.glob("*.py")} - helpers
    assert modules == {command.module for command in COMMANDS.values() if not command.module.endswith(".py")}


def test_the_files_of_a_checkout_start_the_command_that_they_name():
    modules = {command.module: name for name, command in COMMANDS.items()}
    for path in (ROOT / "launch").glob("*.py"):
        if path.stem in modules:
            text = path.read_text()
            assert f"`megaclip {modules[path.stem]}`" in text
            direct = f"from megaclip.commands.{path.stem} import main\n"
            assert direct in text or f'sys.argv.insert(1, "{modules[path.stem]}")' in text


def test_the_launchers_rank_reaches_the_command(monkeypatch):
    """`deepspeed --module megaclip evaluate` starts `python -m megaclip --local_rank=1 evaluate`."""
    seen = []
    monkeypatch.setattr(evaluate, "main", lambda: seen.append(sys.argv))
    monkeypatch.setattr(sys, "argv", ["megaclip", "--local_rank=1", "evaluate", "runs/x"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code is None and seen == [["megaclip evaluate", "runs/x", "--local_rank=1"]]


def test_characters_that_the_output_cannot_encode_are_escaped(tmp_path, monkeypatch):
    (tmp_path / "K\u00e4se.csv").write_text("filepath\ttitle\na.png\tan \u00e4pfel\n", encoding="utf-8")
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", ["megaclip", "inspect", str(tmp_path / "K\u00e4se.csv"), "--seconds", "0"])
    with pytest.raises(SystemExit):
        main()
    assert b"K\\xe4se.csv" in output.buffer.getvalue()


def test_the_log_of_deepspeed_is_not_part_of_the_output_of_a_command(tmp_path, monkeypatch, capfd):
    """DeepSpeed logs the accelerator that it finds when it is imported."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    command = [sys.executable, "-m", "megaclip", "translate", "--", "--model", "ViT-B-32", "--train-data", "x.tar"]
    subprocess.run(command, cwd=tmp_path, check=True)
    output, log = capfd.readouterr()
    assert output.count("\n") == 1 and output.startswith("megaclip train ")
    assert re.search(r"^[\d:]{8} (INFO|WARNING) Setting", log, re.MULTILINE)


def test_output_that_nobody_reads_is_no_traceback():
    """Example: `megaclip --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        command = [sys.executable, "-m", "megaclip", "--help"]
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_broken_connection_of_a_command_keeps_its_traceback(monkeypatch):
    def lose_connection():
        raise BrokenPipeError

    monkeypatch.setattr(evaluate, "main", lose_connection)
    monkeypatch.setattr(sys, "argv", ["megaclip", "evaluate"])
    with pytest.raises(BrokenPipeError):
        main()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"),
        (
            PermissionError(13, "Permission denied", "/root/x.json"),
            1,
            "error: [Errno 13] Permission denied: '/root/x.json'; give this user access to it, or another path\n",
        ),
    ],
)
def test_what_the_user_has_caused_is_one_line(monkeypatch, capfd, error, code, message):
    def fail():
        monkeypatch.setenv("LOCAL_RANK", "1")  # it may be the error of this rank alone
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        raise error

    monkeypatch.setattr(evaluate, "main", fail)
    monkeypatch.setattr(sys, "argv", ["megaclip", "evaluate"])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capfd.readouterr().err) == (code, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "error: unknown command 'trian'; expected one of train, .*; did you mean 'train'"),
        (["launch", "trian"], "error: unknown command 'trian'; expected one of train, .*; did you mean 'train'"),
        (["models", "ViT-Z-32"], "error: unknown model 'ViT-Z-32'"),
        (["models", "vit-b-32"], "error: unknown model 'vit-b-32'; .* the nearest of which is 'ViT-B-32'; `megaclip"),
        (["tokenizer", "data.csv", "--vocab-size", "10", "--out", "t.model"], "Vocabulary size is smaller than .*char"),
        (["tokenizer", "data.csv", "--out", "data.csv/t.model"], "error: cannot write 'data.csv': File exists"),
        (
            ["train", "--deepspeed_config", '{"a":1}' * 99, "--model", "ViT-B-32", "--train-data", "data.csv"],
            "File name too long: .*; give the path of a file or folder, not its content",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "data.csv").write_text("filepath,title\na.png,the quick brown fox jumps over the lazy dog\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["megaclip", *arguments])
    monkeypatch.setattr(logging, "disable", lambda level: None)  # it would also apply to later tests
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code in (1, 78) and error.startswith("error: ") and re.search(message, error)


def test_own_models_are_listed_without_open_clip(monkeypatch, capsys):
    """Listing MegaCLIP's own models must not read open_clip's version, because open_clip may not be installed."""

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "open_clip" else installed(name))
    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    monkeypatch.setattr(logging, "disable", lambda level: None)
    monkeypatch.setattr(sys, "argv", ["models", "ViT-B-32"])
    list_models.main()
    assert capsys.readouterr().out.startswith("1 of the 1 descriptions run: 1 with MegaCLIP's own towers, 0 with")


@pytest.mark.parametrize("model", [[], ["--model", "ViT-B-32"]])
def test_importing_a_path_that_does_not_exist_asks_for_no_model(model, tmp_path, monkeypatch):
    """The error must name the missing path. It must not ask for --model."""
    monkeypatch.setattr(sys, "argv", ["import", str(tmp_path / "epoch_32.pt"), str(tmp_path / "out"), *model])
    with pytest.raises(
        CheckpointError, match=r"epoch_32\.pt does not exist; expected a model's directory or a weights file"
    ):
        import_open_clip.main()


def test_importing_a_run_names_the_export(tmp_path, monkeypatch):
    """The error must name `megaclip export`. It must not ask for --model or search for open_clip's weights."""
    step = tmp_path / "run" / "checkpoints" / "step_00000004"
    step.mkdir(parents=True)
    (step.parent / "latest").write_text(step.name)
    for source in (tmp_path / "run", step.parent, step):
        monkeypatch.setattr(sys, "argv", ["import", str(source), str(tmp_path / "out")])
        with pytest.raises(
            CheckpointError, match=f"write them with `megaclip export {source} OUT_DIR` and give OUT_DIR"
        ):
            import_open_clip.main()
        with pytest.raises(CheckpointError, match=r"holds DeepSpeed checkpoints of a run.*megaclip export"):
            read_tensors(source)
    states = step / "mp_rank_00_model_states.pt"
    states.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"write them with `megaclip export {step} OUT_DIR`"):
        read_tensors(states)


def test_the_tokenizer_accepts_the_column_that_its_error_asks_for(tmp_path, monkeypatch, capsys):
    """The error names --image-key, so the command must have this flag."""
    rows = "".join(f"a.png,a photo of a dog number {n}\n" for n in range(50))
    (tmp_path / "data.csv").write_text(f"Photo,title\n{rows}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging, "disable", lambda level: None)  # it would also apply to later tests
    command = ["megaclip", "tokenizer", "data.csv", "--vocab-size", "60", "--out", "t.model"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        main()
    assert "it has Photo, title; set --image-key to one of them" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, "--image-key", "Photo"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code is None and (tmp_path / "t.model").stat().st_size > 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan --deepspeed-confg x", "unknown argument '--deepspeed-confg'; did you mean '--deepspeed-config'?"),
        ("plan --train_num_samples=9", "unknown argument '--train_num_samples'; did you mean '--train-num-samples'?"),
        ("evaluate --zero-shot-data x", "unknown argument '--zero-shot-data'; did you mean '--zeroshot-data'?"),
        ("tokenizer --vocabsize 9", "unknown argument '--vocabsize'; did you mean '--vocab-size'?"),
        ("check-hosts --logz x", "unknown argument '--logz'; did you mean '--logs'?"),
        ("launch --nproc_per_nod 8 train --model x", "unknown argument '--nproc_per_nod'; did you mean '--nproc"),
        ("models --quite-different", "unknown argument '--quite-different'\n"),
        ("plan --rates=", "--rates: the value is empty; give it a value, or leave it out"),
        ("inspect data.csv --tokenizer ''", "--tokenizer: the value is empty; give it a value, or leave it out"),
        ("export '' out", "an argument: the value is empty; give it a value, or leave it out"),
    ],
)
def test_an_unknown_flag_or_an_empty_value_is_one_line(command, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["megaclip", *(word.strip("'") for word in command.split())])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["keep_alive_interval", "join_timeout", "read_timeout", "is_host"])
def test_a_wrong_value_of_the_rendezvous_is_refused_by_name(name, monkeypatch, capsys):
    words = ["launch", "--rdzv-endpoint", "localhost:1", "--rdzv-conf", f"{name}=x", "check-hosts"]
    monkeypatch.setattr(sys, "argv", ["megaclip", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == ConfigError.exit_code and f"option '{name}' does not" in capsys.readouterr().err
