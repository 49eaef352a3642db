"""Translate a command line of open_clip's trainer: write ds_config.json, and print the command of megaclip train.

    megaclip translate -- torchrun --nproc_per_node 8 -m open_clip_train.main --model ViT-B-32 --batch-size 256 ...
    megaclip translate --out siglip.json -- 'python src/open_clip_train/main.py --siglip ...'

The defaults of open_clip are written too. Flags without an equivalent are listed, with the reason.
"""

import argparse
import json
import math
import re
import shlex
import sys
from pathlib import Path, PurePath

from megaclip.commands.argument_types import CommandParser
from megaclip.config.command_line import (
    DEFAULT_EPOCHS,
    DEFAULT_WORKERS,
    FASTCLIP_FLAGS,
    LONGEST_DEFAULT_WARMUP,
    OPEN_CLIP_FLAGS,
    OTHER_TRAINERS,
    TrainArguments,
)
from megaclip.errors import ConfigError, os_errors_as

_IN_DS_CONFIG = OTHER_TRAINERS["open_clip"]["in ds_config.json"]
_LENGTH = ("--batch-size", "--accum-freq", "--workers", "--epochs", "--epochs-cooldown", "--train-num-samples")
_TRANSLATION = OTHER_TRAINERS["translation of open_clip"]


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("ds_config.json"), help="file to write (default: %(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="open_clip's command line, after --")
    arguments = parser.parse_args()
    command, notes = translate(arguments.command[arguments.command[:1] == ["--"] :], arguments.out)
    print(*notes, sep="\n", file=sys.stderr)
    print(re.sub(r"'([^'\"`]*\$[^'\"`]*)'", r'"\1"', shlex.join(command)))  # the shell expands variables


def translate(words: list[str], out: Path) -> tuple[list[str], list[str]]:
    """Write `out`, and a model's description beside it if flags change the model; return the command of MegaCLIP, and
    a line for each file and for each flag that has no equivalent.

    Raises ConfigError if a value has no equivalent, or if `megaclip train` would refuse the settings or the flags.
    """
    from megaclip.config import parse_arguments  # here, as it imports PyTorch, which the help does not need
    from megaclip.config.checks import check_ds_config
    from megaclip.config.training import with_changes
    from megaclip.models.descriptions import describe, model_file
    from megaclip.models.transformers_config import read_card

    launcher, ranks, given = _split(words)
    settings, flags, notes = _equivalents(_with_length(given, ranks))
    if "--warmup" not in flags:
        notes.append(f"--warmup is not given: a tenth of the run if that is below {LONGEST_DEFAULT_WARMUP} steps")
    if ranks:
        batch, chunks = settings["train_micro_batch_size_per_gpu"], settings.pop("gradient_accumulation_steps")
        settings["train_batch_size"] = str(int(batch) * int(chunks) * ranks)
    changes = [f"{key}={value}" for key, value in settings.items()]
    of_model = [change.removeprefix("model.") for change in changes if change.startswith("model.")]
    files = {out: with_changes({}, [change for change in changes if not change.startswith("model.")])[0]}
    name = " ".join(flags["--model"])
    description = with_changes(read_card(model_file(name))["model_cfg"], of_model)[0]
    describe(description, name)
    if of_model:
        flags["--model"] = [str(out.with_name(f"{out.stem}_model.json"))]
        files[Path(*flags["--model"])] = description
    arguments = ["--deepspeed_config", str(out), *(word for flag in flags for word in (flag, *flags[flag]))]
    check_ds_config({key: value for key, value in files[out].items() if key != "wandb"})  # may not be installed here
    parse_arguments(arguments)
    for path, content in files.items():
        with (
            os_errors_as(ConfigError, f"cannot write {path}", "choose another --out"),
            path.open("x", encoding="utf-8") as file,
        ):
            file.write(json.dumps(content, indent=2) + "\n")
    return [*launcher, *arguments], [*(f"wrote {path}" for path in files), *notes]


def _split(words: list[str]) -> tuple[list[str], int | None, dict[str, list[str]]]:
    """Return the words that start `megaclip train`, the number of ranks if they show it, and open_clip's flags."""
    if len(words) == 1:
        lines = re.split(r"&&|\n", re.sub(r"\\[ \t]*(\n|$)", " ", words[0]))  # cd open_clip/src && torchrun ...
        starts = [line for line in lines if re.search(r"^\s*[^\s#].*[/. ]main(\.py)?(\s|$)", line)]
        try:
            words = shlex.split(starts[0] if starts else " ".join(lines))
        except ValueError as error:
            raise ConfigError(f"the quoted command cannot be split into words: {error}") from None
        operators = (at for at, word in enumerate(words) if re.match(r"\d*>|[|&]", word))  # 2>&1 | tee log
        words = words[: next((at for at in operators if words[at - 1] != "--csv-separator"), None)]
    trainers = [index for index, word in enumerate(words) if re.search(r"(^|[/.])main(\.py)?$", word)]
    if not trainers and not (words and words[0].startswith("--")):
        raise ConfigError("the command has no open_clip_train.main; give open_clip's command, or only its flags")
    launcher, rest = (words[: trainers[0]], words[trainers[0] + 1 :]) if trainers else ([], words)
    while launcher[-1:] in (["-m"], ["--module"], ["--"]):
        launcher.pop()
    options, ranks = _flags(launcher), None
    names = {PurePath(word).name for word in launcher}
    start = ["--module" if "deepspeed" in names else "-m", "megaclip", "train"]
    if {"torchrun", "torch.distributed.run", "torch.distributed.launch"} & names:
        start = ["-m", "--", "megaclip", "train"]  # without --, torchrun takes --logs as its own --logs-specs
        counts = [options.get(flag, ["1"])[0] for flag in ("--nproc-per-node", "--nnodes")]
        ranks = math.prod(map(int, counts)) if all(count.isdecimal() for count in counts) else None
    elif re.match(r"(\w+=\S* )*\S*python", " ".join(launcher)):
        ranks = 1
    return [*launcher, *start] if launcher else ["megaclip", "train"], ranks, _flags(rest)


def _flags(words: list[str]) -> dict[str, list[str]]:
    """Return each flag, with hyphens, and the words that follow it."""
    flags: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--") and word != "--":
            name, *value = word.split("=", 1)
            values = flags[name.replace("_", "-")] = value
        elif word != "--":
            values.append(word)
    return flags


def _with_length(given: dict[str, list[str]], ranks: int | None) -> dict[str, list[str]]:
    """Return the flags, with open_clip's number of steps and its default warm-up if that number is known."""
    defaults = f"{_TRANSLATION['defaults']} --workers {DEFAULT_WORKERS} --epochs {DEFAULT_EPOCHS}"
    values = _flags(defaults.split()) | given
    try:
        number = {flag: int(" ".join(words)) for flag, words in values.items() if flag in _LENGTH}
    except ValueError as error:
        raise ConfigError(f"{error}; {', '.join(_LENGTH)} are integers in open_clip's command") from None
    table = re.search(r"\b[ct]sv( |$)", " ".join(given.get("--train-data", []) + given.get("--dataset-type", [])))
    if not ranks or table or "--train-num-samples" not in number:  # open_clip counts the rows of tables itself
        return given
    batches = math.ceil(number["--train-num-samples"] / max(1, number["--batch-size"] * ranks))
    workers = max(1, number["--workers"])  # each takes the same number of batches
    epoch = math.ceil(batches / workers) * workers // max(1, number["--accum-freq"])
    changed = {flag: words for flag, words in given.items() if not flag.startswith(("--epochs", "--train-num-samples"))}
    for theirs, ours in (("--epochs", "--train-steps"), ("--epochs-cooldown", "--cooldown-steps")):
        changed |= {ours: [str(epoch * number[theirs])]} if theirs in number else {}
    has_warmup = epoch * number["--epochs"] >= LONGEST_DEFAULT_WARMUP
    return ({"--warmup": [str(LONGEST_DEFAULT_WARMUP)]} if has_warmup else {}) | changed


def _equivalents(given: dict[str, list[str]]) -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """Return the settings (of the model's description with "model." before them), the flags of MegaCLIP, and notes."""
    settings, flags, notes = {"zero_optimization.stage": "2"}, dict[str, list[str]](), list[str]()
    wanted = _flags(_TRANSLATION["defaults"].split()) | given
    if wanted["--opt"] == ["adamw"]:
        kind = " for ViT" if "vit" in " ".join(wanted["--model"]).lower() else ""
        wanted = _flags(_TRANSLATION[f"defaults of adamw{kind}"].split()) | wanted
    if betas := [" ".join(wanted.pop(flag)) for flag in ("--beta1", "--beta2") if flag in wanted]:
        wanted["--betas"] = [f"[{', '.join(betas)}]"]
    rules = _TRANSLATION["flags"]
    for flag, values in sorted(wanted.items(), key=lambda pair: pair[0] in rules):  # --skip-scheduler after --warmup
        word = values[0] if len(set(values)) == 1 else " ".join(values)
        rule = rules.get(flag)
        if isinstance(rule, dict) and (rule := rule.get(word)) is None:
            accepted = ", ".join(filter(None, rules[flag]))
            raise ConfigError(f"{flag} {word} has no equivalent; use one of {accepted}")
        if rule is None and flag in _IN_DS_CONFIG and values:
            rule = f"{_IN_DS_CONFIG[flag].split()[0]}=VALUE"
        if flag == "--aug-cfg" and (scale := re.search(r"scale=\W*([\d.]+)\W+([\d.]+)", word)):
            flags["--aug-scale"] = [scale[1], scale[2]]
        if rule is not None:
            for part in rule.split():
                if part.startswith("--"):
                    words = flags[part] = list[str]()
                elif "=" in part:
                    key, _, value = part.partition("=")
                    settings[key] = value.replace("VALUE", word)
                else:
                    words.append(part.replace("VALUE", word))
        elif replacement := (FASTCLIP_FLAGS | OPEN_CLIP_FLAGS).get(flag):
            notes.append(f"{flag} {replacement}")
        elif flag[2:].replace("-", "_") not in TrainArguments.model_fields:
            notes.append(f"{flag} is a flag of neither open_clip nor MegaCLIP; it is left out")
        elif values != [""]:  # --pretrained '' is open_clip's default
            flags[flag] = word.split("::") if flag == "--train-data" else values
        noted = [name for name in (flag, f"{flag} {word.partition(':')[0]}") if name in _TRANSLATION["notes"]]
        notes += [f"{name}: {_TRANSLATION['notes'][name]}" for name in noted]
    return settings, flags, notes
