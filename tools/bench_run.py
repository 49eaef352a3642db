"""Measure whole training runs on JPEG shards, as a user sees them: MegaCLIP beside open_clip's own trainer.

    python tools/bench_run.py --model ViT-B-16 --batch 1024 --workers 14
    python tools/bench_run.py --model ViT-B-32 --batch 4096 --gpus 2 --workers 8 --only megaclip

It writes shards of JPEGs as img2dataset does (shorter side 384, quality 90, about 67 KB), with captions of the lengths
of tools/bench_train.py, and starts each trainer on them with the same model, batch, workers, bf16 and torch.compile. A
row has the samples per second over the last half of the log, by the times of its lines; the milliseconds of a step in
which MegaCLIP waited for data (its `wait`); the CPU time of the first rank without its workers, as a share of the time;
the seconds from the start of the process to the first line of a step; and the largest memory that was taken on the
host. The row `synthetic` has the steps of tools/bench_train.py, equally many and without decoding. open_clip's trainer
requires webdataset <= 0.2.86, and at least as many shards of 512 samples as workers.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from bench_samples import synthetic_captions
from PIL import Image

SHARD = 512
"""Samples of a shard."""
PROGRESS = {
    "megaclip": re.compile(r" step (\d+)/"),
    "synthetic": re.compile(r" step (\d+) in "),
    "open_clip": re.compile(r"Train Epoch: 0 \[ *(\d+)/"),
}
"""Steps of a line of a trainer's log, or open_clip's samples."""
WAIT = re.compile(r"wait ([\d.]+)s")
HEAD = "| trainer | samples/s | wait, ms | CPU of a rank | seconds to the first step | GiB of the host |"


def write_shard(path: Path, side: int) -> None:
    """Write one shard of smooth pictures with noise, in which no two are equal."""
    generator = np.random.default_rng(int(path.stem))
    captions = synthetic_captions("realistic", 77)
    with tarfile.open(path, "w") as tar:
        for number in range(SHARD):
            coarse = generator.integers(0, 256, (12, 15, 3), dtype=np.uint8)
            picture = np.asarray(Image.fromarray(coarse).resize((side * 5 // 4, side), Image.Resampling.BICUBIC))
            noise = generator.normal(0, 8.5, picture.shape)
            jpeg = io.BytesIO()
            Image.fromarray((picture + noise).clip(0, 255).astype(np.uint8)).save(jpeg, "jpeg", quality=90)
            for extension, content in (("jpg", jpeg.getvalue()), ("txt", captions[number].encode())):
                member = tarfile.TarInfo(f"{path.stem}{number:04d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def commands(arguments: argparse.Namespace, data: Path, logs: Path) -> dict[str, list[str]]:
    """Return the command of each trainer."""
    shards = f"{data}/{{0000..{arguments.samples // SHARD - 1:04d}}}.tar"
    total, micro_batch = arguments.batch * arguments.gpus, arguments.micro_batch or arguments.batch
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(arguments.gpus)]
    common = ["--model", arguments.model, "--train-data", shards, "--workers", str(arguments.workers)]
    megaclip = [
        *(*launcher, "--module", "megaclip", "train", *common),
        *("--deepspeed-config", arguments.config, "--logs", str(logs), "--name", "megaclip"),
        *("--train-steps", str(arguments.steps), "--save-frequency", "0", "--log-every-n-steps", "5"),
        *("--set", f"train_batch_size={total}", f"train_micro_batch_size_per_gpu={micro_batch}"),
        f"megaclip.compile={str(not arguments.no_compile).lower()}",  # not "auto": a short run would not compile
        *arguments.megaclip_flags,
    ]
    synthetic = [
        *(*launcher, "tools/bench_train.py", "--methods", "megaclip", "--model", arguments.model),
        *("--batch", str(total), "--micro-batch", str(micro_batch), "--steps", str(arguments.steps)),
        *("--deepspeed_config", arguments.config, "--workers", str(arguments.workers)),
        *("--compile", str(not arguments.no_compile).lower()),
    ]
    open_clip = [
        *(*launcher, "--no_local_rank", "--module", "open_clip_train.main", *common),
        *("--dataset-type", "webdataset", "--train-num-samples", str(arguments.steps * total), "--epochs", "1"),
        *("--batch-size", str(micro_batch), "--accum-freq", str(arguments.batch // micro_batch)),
        *("--precision", arguments.precision, "--local-loss", "--gather-with-grad"),
        *("--log-every-n-steps", "5", "--logs", str(logs), "--name", "open_clip"),
        *("--warmup", "10", "--save-frequency", "0"),
        *(["--dataset-resampled"] if arguments.steps * total > arguments.samples else []),
        *([] if arguments.no_compile else ["--torchcompile"]),
    ]
    return {"megaclip": megaclip, "synthetic": synthetic, "open_clip": open_clip}


def measure(name: str, command: list[str], batch: int) -> str:
    """Run a trainer with this global batch and return its row."""
    began, first, waits, lines = time.monotonic(), 0.0, list[float](), list[str]()
    marks: list[tuple[float, float, float]] = []  # of each line of a step: when it came, samples, CPU seconds of a rank
    before, memory = psutil.virtual_memory().available, [0]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def watch() -> None:
        while process.poll() is None:
            # The memory of each process would be read under a lock that its page faults wait for.
            memory[0] = max(memory[0], before - psutil.virtual_memory().available)
            time.sleep(1)

    threading.Thread(target=watch, daemon=True).start()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if found := PROGRESS[name].search(line):
            if not first:
                first = time.monotonic() - began
                processes = psutil.Process(process.pid).children(recursive=True)
                rank = max(reversed(processes), key=lambda each: len(each.children()))  # the one that has workers
            waits += [1000 * float(seconds) for seconds in WAIT.findall(line)]
            with contextlib.suppress(psutil.NoSuchProcess):  # the last lines may be read after its end
                samples = float(found[1]) * (1 if name == "open_clip" else batch)
                marks.append((time.monotonic(), samples, sum(rank.cpu_times()[:2])))
    if process.wait() or len(marks) < 4:
        print("".join(lines[-30:]), file=sys.stderr)
        return f"| {name} | ended with {process.returncode} | | | | |"
    seconds, samples, cpu = (end - start for start, end in zip(marks[len(marks) // 2], marks[-1], strict=True))
    wait = f"{statistics.median(waits[len(waits) // 2 :]):,.0f}" if waits else ""
    figures = f"{samples / seconds:,.0f} | {wait} | {cpu / seconds:.2f} | {first:.0f} | {memory[0] / 2**30:.1f}"
    return f"| {name} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--batch", type=int, default=1024, help="samples of each GPU and step")
    parser.add_argument("--micro-batch", type=int, help="samples of each GPU in a chunk (default: --batch)")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14, help="data workers of each GPU")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=int, default=16384, help="JPEGs, read again and again")
    parser.add_argument("--side", type=int, default=384, help="shorter side of the JPEGs")
    parser.add_argument("--config", default="ds_configs/zero1.json", help="MegaCLIP's ds_config.json")
    parser.add_argument("--precision", default="pure_bf16", help="open_clip's")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--only", nargs="*", choices=PROGRESS, default=list(PROGRESS))
    parser.add_argument("--megaclip-flags", nargs=argparse.REMAINDER, default=[], help="further flags of MegaCLIP")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, logs = Path(folder) / "data", Path(folder) / "logs"
        data.mkdir()
        shards = [(data / f"{number:04d}.tar", arguments.side) for number in range(arguments.samples // SHARD)]
        with multiprocessing.Pool(os.cpu_count()) as pool:
            pool.starmap(write_shard, shards)
        size = sum(path.stat().st_size for path, _ in shards) / arguments.samples
        print(f"{arguments.samples} JPEGs of {size / 1000:.0f} KB\n")
        print(HEAD, "| --- " * HEAD.count(" |") + "|", sep="\n")
        for name, command in commands(arguments, data, logs).items():
            if name in arguments.only:
                print(measure(name, command, arguments.batch * arguments.gpus), flush=True)


if __name__ == "__main__":
    main()
