"""`megaclip translate`: its batch, optimizer, schedule and loss are compared with those of open_clip's own code."""

import json
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from open_clip_train.params import parse_args
from open_clip_train.scheduler import const_lr, const_lr_cooldown, cosine_lr

from megaclip.commands import main
from megaclip.config import TrainArguments, TrainingConfig, load_training_config, parse_arguments
from megaclip.engine.schedule import RunLength, chosen_schedule
from megaclip.models import load_model_config
from megaclip.models.descriptions import model_file

TWO = "python -m torch.distributed.run --nproc-per-node=2"
EIGHT = "CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node 4 --nnodes=2 --rdzv_endpoint h:1"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run `megaclip translate` in an empty folder. Return its exit code, output and errors."""

    def translate(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["megaclip", "translate", *words])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    monkeypatch.chdir(tmp_path)
    return translate


def translated(run, launcher: str, flags: str) -> tuple[list[str], TrainArguments, TrainingConfig, str]:
    """Return the words before the flags of `megaclip train`, the checked flags and settings, and the notes."""
    code, output, notes = run("--", *shlex.split(f"{launcher} {flags}"))
    assert not code, notes
    words = shlex.split(output)
    start = words.index("train") + 1
    arguments = parse_arguments(words[start:])
    return words[:start], arguments, load_training_config(arguments.deepspeed_config), notes


def their_steps(args: Namespace, ranks: int) -> int:
    """Return the optimizer steps of an epoch, as get_wds_dataset and main of open_clip compute them."""
    workers = max(1, args.workers)
    batches = -(-args.train_num_samples // (args.batch_size * ranks))
    return -(-batches // workers) * workers // args.accum_freq


DATA = "--train-data 'a/{00000..00331}.tar' --dataset-type webdataset --train-num-samples"


@pytest.mark.parametrize(
    ("launcher", "ranks", "flags"),
    [
        (EIGHT, 8, f"{DATA} 10968539 --batch-size 320 --workers 6 --model ViT-B-32 --accum-freq 2 --epochs 40"),
        (EIGHT, 8, f"{DATA}=9999999 --batch_size=64 --lr 1e-3 --wd .1 --warmup 2000 --model RN50 --precision fp32"),
        (TWO, 2, f"{DATA} 400000 --model ViT-B-16 --beta1 0.8 --eps 1e-7 --epochs 3 --warmup 50 --precision amp_bf16"),
        (TWO, 2, f"{DATA} 90000 --model ViT-B-32 --lr-scheduler const --grad-clip-norm 1 --warmup 9 --workers 0"),
        (
            TWO,
            2,
            f"{DATA} 90000 --model ViT-B-32 --lr-scheduler const-cooldown --epochs 9 --epochs-cooldown 2 --warmup 10 "
            "--lr-cooldown-end 1e-5 --lr-cooldown-power 2.0",
        ),
        (TWO, 2, f"{DATA} 90000 --siglip --model ViT-B-16 --grad-checkpointing --warmup 5 --force-image-size 240 240"),
    ],
)
def test_batch_optimizer_schedule_and_loss_are_those_of_open_clip(run, launcher, ranks, flags):
    trainer = "src/open_clip_train/main.py" if launcher == TWO else "-m open_clip_train.main --"
    words, arguments, config, _ = translated(run, f"{launcher} {trainer}", flags)
    assert words == [*launcher.split(), "-m", "--", "megaclip", "train"]
    theirs = parse_args(shlex.split(flags.replace("_size", "-size")))
    layout = config.batch_layout(ranks)
    assert layout.global_batch == theirs.batch_size * theirs.accum_freq * ranks
    assert (layout.micro_batch, layout.accumulation) == (theirs.batch_size, theirs.accum_freq)
    params = config.optimizer.params
    assert (params.lr, params.betas, params.eps) == (theirs.lr, [theirs.beta1, theirs.beta2], theirs.eps)
    assert params.weight_decay == theirs.wd and config.settings.gradient_clipping == (theirs.grad_clip_norm or 0)
    assert config.bf16 == (theirs.precision != "fp32") and not config.accumulates_in_bf16
    assert config.activation_checkpointing == theirs.grad_checkpointing
    assert config.megaclip.loss == ("siglip" if theirs.siglip else "clip")
    model = load_model_config(arguments.model)
    if theirs.siglip:  # as main and create_model of open_clip change the model
        original = json.loads(model_file(theirs.model).read_text())
        assert (model.init_logit_bias, model.vision_cfg.image_size) == (-10, 240)
        assert model.init_logit_scale == pytest.approx(torch.tensor(10.0).log().item())
        assert json.loads(Path(arguments.model).read_text())["text_cfg"] == original["text_cfg"]
    else:
        assert arguments.model == theirs.model
    assert arguments.train_data == [theirs.train_data] and arguments.workers == theirs.workers
    epoch = their_steps(theirs, ranks)
    length = RunLength.of(arguments, theirs.train_num_samples, layout.global_batch)
    assert length.total_steps == epoch * theirs.epochs
    optimizer = Namespace(param_groups=[{}])
    schedule, common = chosen_schedule(arguments, length, params.lr), (theirs.lr, theirs.warmup, length.total_steps)
    their_schedule = {"const": const_lr, "cosine": cosine_lr, "const-cooldown": const_lr_cooldown}[theirs.lr_scheduler]
    cooldown = () if theirs.epochs_cooldown is None else (
        epoch * theirs.epochs_cooldown, theirs.lr_cooldown_power, theirs.lr_cooldown_end,
    )  # fmt: skip
    adjust = their_schedule(optimizer, *common, *cooldown)
    for step in [0, 1, theirs.warmup, *range(length.total_steps // 2, length.total_steps, 97)]:
        adjust(step)
        assert schedule(step) * params.lr == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-12)


def test_flags_of_both_and_flags_with_other_names_are_kept(run, monkeypatch):
    flags = """--train-data 'a b.csv::c.csv' --dataset-type csv --csv-img-key file --csv-caption-key=text
        --val-data v.csv --imagenet-val /data/in --model ViT-B-32 --name 'my run' --lock-image
        --lock-image-unlocked-groups 2 --seed 7 --delete-previous-checkpoint --train-num-samples 999
        --aug-cfg 'scale=(0.4, 1.0)' --image-mean 0.5 0.4 0.3 --pretrained '' --workers 2
        --skip-scheduler --warmup 5 --report-to wandb,tensorboard --wandb-project-name clip"""
    monkeypatch.setattr("megaclip.config.checks._is_installed", lambda package: package == "wandb")
    words, arguments, config, notes = translated(run, "python -u -m training.main", flags)
    assert words == ["python", "-u", "-m", "megaclip", "train"]
    assert config.deepspeed["wandb"] == {"enabled": True, "project": "clip"}
    given = arguments.model_dump(exclude_unset=True)
    given.pop("deepspeed_config")
    assert given == {
        "train_data": ["a b.csv", "c.csv"], "dataset_type": "csv", "image_key": "file", "caption_key": "text",
        "val_data": ["v.csv"], "zeroshot_data": "/data/in", "model": "ViT-B-32", "name": "my run", "lock_image": True,
        "lock_image_unlocked_groups": 2, "seed": 7, "keep_last": 1, "aug_scale": (0.4, 1.0), "workers": 2,
        "image_mean": (0.5, 0.4, 0.3), "lr_scheduler": "const", "warmup": 0,
    }  # fmt: skip
    assert "--imagenet-val: the folder also requires classnames.txt" in notes and "--warmup" not in notes


def test_pipes_are_named_because_no_run_reads_them(run):
    *_, notes = translated(run, "", "--model ViT-B-32 --train-data 'pipe:cat a.tar' --val-data b.tar")
    assert "--train-data pipe: pipes are not read; give the URL itself" in notes and "--val-data" not in notes


def test_every_flag_without_an_equivalent_is_named_with_the_reason(run):
    flags = """--train-data a.tar --train-num-samples 999 --dataset-resampled --local-loss --gather-with-grad --horovod
        --loss-dist-impl bidir --model ViT-B-32
        --remote-sync s3://b --pretrained laion2b --pretrained-image --use-bn-sync --lr_tau 1
        --imagenet-v2 x --my-own 3 --aug-cfg color_jitter=0.1"""
    _, arguments, config, notes = translated(run, "srun python -u src/training/main.py", flags)
    named = {word.strip(":") for word in re.findall(r"^--\S+", notes, re.MULTILINE)}
    given = set(re.findall(r"--[\w-]+", flags.replace("_", "-")))
    assert named == given - {"--train-data", "--model"} | {"--precision", "--warmup"}
    assert "--my-own is a flag of neither open_clip nor MegaCLIP" in notes
    layout = config.batch_layout(4)  # the number of ranks is unknown
    assert (layout.global_batch, arguments.train_steps, arguments.epochs) == (256, None, None)


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("cd open_clip/src && torchrun -m open_clip_train.main FLAGS", "torchrun -m --"),
        (
            "# torchrun -m training.main\ncd src\ntorchrun --node_rank $RANK -m training.main FLAGS \\\n\n# end\n",
            'torchrun --node_rank "$RANK" -m --',
        ),
        ("deepspeed --num_gpus 2 src/training/main.py FLAGS \\", "deepspeed --num_gpus 2 --module"),
        ("nohup torchrun -m training.main FLAGS > log 2>&1 &", "nohup torchrun -m --"),
        ("torchrun -m training.main --csv-separator '|' FLAGS 2>&1 | tee log", "torchrun -m --"),
    ],
)
def test_one_quoted_command_is_split_as_by_a_shell(run, command, launcher):
    flags = "--train-data 'x y.tar' \\\n    --model=ViT-B-32 \\\n --lr 1e-3"
    code, output, _ = run("--out", "new.json", "--", command.replace("FLAGS", flags))
    assert not code and output.startswith(f"{launcher} megaclip train --deepspeed_config new.json --model ViT-B-32 ")
    assert "'x y.tar'" in output and load_training_config("new.json").learning_rate == 1e-3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the command has no open_clip_train.main; give open_clip's command, or only its flags"),
        ("--name='mine", "the quoted command cannot be split into words: No closing quotation"),
        ("torchrun train.py --model RN50", "the command has no open_clip_train.main"),
        (
            "--train-data a.tar --opt timm/adan",
            "--opt timm/adan has no equivalent; use one of adamw, timm/adamw, timm/",
        ),
        ("--train-data a.tar --lr fast", "optimizer.params.lr: Input should be a valid number, got 'fast'"),
        ("--train-data a.tar --batch-size 1e3", "invalid literal for int() with base 10: '1e3'; --batch-size, --acc"),
        ("--train-data a.tar --model", "model '' is "),
        ("--train-data a.tar --model ViT-B-33", "unknown model 'ViT-B-33'"),
        ("--model ViT-B-32", "--train-data is required\n"),
        (
            "--val-data a.csv --imagenet-val b --pretrained c.pt",
            "`megaclip evaluate DIRECTORY` with --val-data and --z",
        ),
        ("--train-data a.tar --dataset-type synthetic --model ViT-B-32", "--dataset-type: Input should be 'auto'"),
        ("--train-data a.tar --out-of --model ViT-B-32 --seed x", "--seed: Input should be a valid integer"),
    ],
)
def test_a_command_that_cannot_be_translated_is_one_error_and_writes_nothing(run, tmp_path, words, message):
    code, output, error = run("--", *words.split())
    assert code == 78 and output == "" and error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_overwritten(run, tmp_path):
    (tmp_path / "ds_config.json").write_text("mine")
    code, _, error = run("--", "--train-data", "a.tar", "--model", "ViT-B-32")
    assert code == 78 and "cannot write ds_config.json: File exists; choose another --out" in error
    assert (tmp_path / "ds_config.json").read_text() == "mine"
