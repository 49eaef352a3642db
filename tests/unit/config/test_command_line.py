"""The command line: open_clip's flags, readable errors, and no overlap with ds_config.json."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from examples.digits import demo
from megaclip.config import MegaclipSection
from megaclip.config.command_line import FASTCLIP_FLAGS, OPEN_CLIP_FLAGS, TrainArguments, build_parser, parse_arguments
from megaclip.data import DATASET_TYPES
from megaclip.data.text_tables import separator_of
from megaclip.engine import run
from megaclip.errors import ConfigError
from megaclip.losses.settings import FastClipSettings

REQUIRED = ["--deepspeed_config", "c.json", "--model", "ViT-B-32", "--train-data", "a.tar", "b.tar"]


def test_flags_are_typed():
    arguments = parse_arguments(
        [*REQUIRED, "--warmup", "5", "--aug-scale", "0.5", "1", "--lock-image", "--local_rank=1"]
    )
    assert arguments.train_data == ["a.tar", "b.tar"] and arguments.warmup == 5
    assert arguments.aug_scale == (0.5, 1.0) and arguments.lock_image and arguments.local_rank == 1
    assert arguments.image_mean is None
    assert parse_arguments([*REQUIRED, "--image-mean", "0.5", "0.4", "0.3"]).image_mean == (0.5, 0.4, 0.3)


def test_the_largest_seed_is_one_that_torch_accepts():
    seed = parse_arguments([*REQUIRED, "--seed", str(2**64 - 1)]).seed
    torch.Generator().manual_seed(seed)
    with pytest.raises(ValueError, match="Overflow"):
        torch.Generator().manual_seed(seed + 1)


def test_resume_latest_means_auto_as_in_open_clip():
    words = ("auto", "latest", "runs/latest")
    resumed = [parse_arguments([*REQUIRED, "--name", "x", "--resume", word]).resume for word in words]
    assert resumed == ["auto", "auto", "runs/latest"]


MISTAKES = f"""
--warmpu 5 | unknown argument '--warmpu'; did you mean '--warmup'?
--train_dta x | unknown argument '--train_dta'; did you mean '--train-data'?
--warm_up x | unknown argument '--warm_up'; did you mean '--warmup'?
--lrr 1 | unknown argument '--lrr'; if you mean '--lr', that is set in ds_config.json: optim
surplus --seed 1 more | unknown argument 'more'
--objective f.py:X | --objective is set in ds_config.json: megaclip.objective; on the command line: --set
--hang-timeout 1e9 | --hang-timeout: Input should be less than or equal to 10000000
--batch-size 64 | --batch-size is set in ds_config.json: train_micro_batch_size_per_gpu
--batch_size 64 | --batch_size is set in ds_config.json: train_micro_batch_size_per_gpu
--lr=1 | --lr is set in ds_config.json
--lr_tau 1 | --lr_tau is set in ds_config.json: megaclip.fastclip.temperature_learning_rate
--multiply_tau | --multiply_tau is set in ds_config.json: megaclip.loss (fastclip_v3 with the flag
--imagenet-val x | --imagenet-val is not a flag here; use --zeroshot-data
--warmup many | --warmup: Input should be a valid integer
--workers {2**63} | --workers: Input should be less than or equal to 1024
--epochs {2**63} | --epochs: Input should be less than or equal to 2147483647
--warmup -1 | --warmup: Input should be greater than or equal to 0
--logs= | --logs: the value is empty; give it a value, or leave it out, got ''
--pretrained-text= | --pretrained-text: the value is empty; give it a value, or leave it out
--resume= | --resume: the value is empty; give it a value, or leave it out
--val-data= | --val-data: the value is empty; give it a value, or leave it out, got ['']
--resume latest | --resume auto requires --name; set it to the name of the run to resume
--seed {2**64} | --seed: Input should be less than or equal to {2**64 - 1}
--epochs 1 --train-steps 2 | --epochs and --train-steps exclude each other; use one of them
--lr-scheduler const-cooldown | const-cooldown together with --epochs-cooldown
--epochs-cooldown 1 | --lr-scheduler is cosine; use const-cooldown together with --epochs-cooldown or --cooldown-steps
--lr-scheduler linear | 'cosine', 'const' or 'const-cooldown'
--train-data-weights 1 | one weight for each
--lr-min -1 | --lr-min: Input should be greater than or equal to 0
--lr-min 4e-5 --lr-scheduler const | --lr-min has no effect with --lr-scheduler const; leave it out, or use cosine
--lr-cooldown-end inf | --lr-cooldown-end: Input should be a finite number
--lr-cooldown-end 1e-5 | --lr-cooldown-end has no effect with --lr-scheduler cosine
--lr-scheduler const --lr-cooldown-power 2 | --lr-cooldown-power has no effect with --lr-scheduler const
--image-std 0.2 0 0.2 | --image-std: Input should be greater than 0
--logit-scale-max 0.5 | --logit-scale-max: Input should be greater than or equal to 1
--aug-scale 1 | expected 2 arguments
--aug-scale 0.9 0.5 | --aug-scale is 0.9 0.5; write two fractions, the smaller one first
--no-augmentation --aug-scale 0.5 1 | --aug-scale has no effect with --no-augmentation
--no-augmentation --image-decoder gpu | --image-decoder gpu cannot be used with --no-augmentation
--lock-text-unlocked-layers 1 | requires --lock-text
--keep-text-positions 20 | requires --pretrained or --pretrained-text
--eval-every-steps 1 | requires --val-data or --val-fraction or --zeroshot-data or --suite; add it
--eval-ema | --eval-ema requires --val-data or --val-fraction or --zeroshot-data or --suite; add it
--feature-cache x | requires features that never change: add --lock-image and --no-augmentation
--feature-cache x --lock-image | requires features that never change
--feature-cache x --lock-image --no-augmentation --lock-image-unlocked-groups 1 | leave out --lock-image-unlocked-groups
--feature-cache x --lock-image --no-augmentation --id-key image | --id-key is image; use caption
--name ../../x | --name: the run's folder would not be in --logs
"""


def test_a_mistake_is_one_line_that_names_the_flag():
    for row in MISTAKES.strip().splitlines():
        words, expected = row.split(" | ")
        with pytest.raises(ConfigError) as error:
            parse_arguments([*REQUIRED, *words.split()])
        assert expected in str(error.value) and "\n" not in str(error.value), row


def test_several_unknown_flags_are_listed_one_per_line():
    """The command line of an open_clip user may contain many unknown flags."""
    extra = ["--batch-size", "64", "--horovod", "--lr=1e-3", "--warmpu", "5", "--wd", "0.2", "--lr", "2"]
    with pytest.raises(ConfigError) as error:
        parse_arguments([*REQUIRED, *extra])
    first, *lines = str(error.value).split("\n")
    assert first.startswith("these arguments are not accepted")
    assert [line.split()[0] for line in lines if "unknown" not in line] == ["--batch-size", "--horovod", "--lr", "--wd"]
    assert "  unknown argument '--warmpu'; did you mean '--warmup'?" in lines


def test_a_run_stays_in_the_folder_of_all_runs():
    for name in ("/tmp/x", "a/../../b", "..", ".", "", "a\nb", "a\0b", "a/.."):
        with pytest.raises(ConfigError, match=r"--name: the run's folder would not be in --logs"):
            parse_arguments([*REQUIRED, "--name", name])
    for name in ("my-run", "group/my run", "..x", "$(touch x)", "grün;"):
        assert parse_arguments([*REQUIRED, "--name", name]).name == name


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        *(("--name", name, "is not the name of a folder in runs/") for name in ("../data", "/tmp", "..", "a/b")),
        ("--steps", "0", "argument --steps: '0' is not an integer of at least 1"),
    ],
)
def test_the_demo_refuses_wrong_values_of_its_own_flags(monkeypatch, capsys, flag, value, message):
    monkeypatch.setattr("sys.argv", ["demo.py", flag, value])
    with pytest.raises(SystemExit):
        demo.parse_arguments()
    assert message in capsys.readouterr().err


def test_the_demo_needs_no_deepspeed_beside_the_interpreter(monkeypatch, tmp_path):
    """The system's Python installs scripts in /usr/local/bin or ~/.local/bin."""
    commands = []
    interpreter = tmp_path / "python"
    interpreter.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(demo.subprocess, "run", lambda command, **options: commands.append(command))
    monkeypatch.setattr("sys.argv", ["demo.py"])
    demo.train(tmp_path / "data", tmp_path / "run", demo.parse_arguments())
    ((program, *arguments),) = commands
    assert Path(program).is_file() and arguments[:2] == ["-m", "deepspeed.launcher.runner"]


NEWER_FLAGS = {"--image-layer-decay", "--visual-layer-decay", "--text-layer-decay"}
"""Flags of open_clip's development version (4.2.0.dev0) with a corresponding setting in MegaCLIP."""


def test_every_flag_of_open_clips_trainer_is_accepted_or_explained():
    """Compare with open_clip's source. The flags and settings that an explanation names must exist."""
    package = importlib.util.find_spec("open_clip_train")
    assert package is not None and package.submodule_search_locations
    source = (Path(package.submodule_search_locations[0]) / "params.py").read_text()
    theirs = set(re.findall(r"""['"](--[a-z0-9-]+)['"],""", source))
    ours = {option for action in build_parser()._actions for option in action.option_strings}
    assert len(theirs) > 80 and OPEN_CLIP_FLAGS.keys() == (theirs | NEWER_FLAGS) - ours
    for flag, advice in (FASTCLIP_FLAGS | OPEN_CLIP_FLAGS).items():
        assert set(re.findall(r"--[a-z-]+", advice)) <= ours, flag
        for key, inner in re.findall(r"\bmegaclip\.(\w+)(?:\.(\w+))?", advice):
            assert key in MegaclipSection.model_fields and (not inner or inner in FastClipSettings.model_fields), flag


def test_the_help_names_required_flags_defaults_even_zero_and_choices():
    described = {action.dest: action.help for action in build_parser()._actions}
    required = [name for name, text in described.items() if "(required)" in text]
    assert required == ["deepspeed_config", "model", "train_data"]
    assert "(default 0)" in described["seed"] and "(default 0.0)" in described["lr_cooldown_end"]
    assert "(default 0.9 1.0)" in described["aug_scale"]
    assert "default" not in described["lock_image"] and "default" not in described["resume"]
    assert described["lr_scheduler"] == "learning rate schedule; one of cosine, const, const-cooldown (default cosine)"
    assert get_args(TrainArguments.model_fields["dataset_type"].annotation) == DATASET_TYPES
    assert all(name in described["dataset_type"] for name in DATASET_TYPES)
    text = build_parser().format_help()  # each flag once, with short names of its values
    assert "--train-data DATA [DATA ...]\n" in text and "--train_data" not in text
    assert "--image-mean MEAN MEAN MEAN\n" in text and "  --lock-image  " in text


def test_a_missing_flag_is_named():
    with pytest.raises(ConfigError, match="--train-data is required"):
        parse_arguments(REQUIRED[:4])


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [60.0])])
def test_the_first_rank_logs_an_error_at_once_and_the_others_wait(monkeypatch, caplog, rank, waits):
    """The first rank logs at once. The other ranks wait, because the first one usually ends them."""
    waited: list[float] = []
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(run.time, "sleep", waited.append)
    argv = ["--deepspeed_config", "nowhere.json", "--model", "x", "--train-data", "y"]
    assert run.main(argv, other_ranks_delay_s=60.0) == ConfigError.exit_code
    assert "nowhere.json" in caplog.text and waited == waits


@pytest.mark.parametrize(("separator", "word"), [("\t", "tab"), (";", "semicolon"), (",", "comma")])
def test_the_advice_on_csv_separator_names_the_separators_that_are_detected(separator, word):
    assert separator_of(separator.join(("filepath", "title")) + "\n") == separator
    assert word in OPEN_CLIP_FLAGS["--csv-separator"]
