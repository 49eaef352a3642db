"""Write the stacks of all threads of a rank, for a run that hangs."""

import contextlib
import faulthandler
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from megaclip.data.workers import worker_stacks

_SHOWN_COLLECTIVES = 20


def collectives_entered() -> int:
    """Return the number of collectives that this rank has entered, over all its process groups."""
    total = 0
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    for group in groups:
        with contextlib.suppress(RuntimeError, AttributeError):  # no count, or the group has ended
            total += group._get_sequence_number_for_group()
    return total


def write_stacks(folder: Path, rank: int, header: str) -> Path:
    """Write the stacks of this rank and of its data workers, and its last collectives; return the path of the file.

    Raises OSError if the file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"rank_{rank}.txt"
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {header}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.write(f"\n{worker_stacks()}\n{_last_collectives()}")
    return path


def _last_collectives() -> str:
    """Return the last collectives of PyTorch's flight recorder, one per line, or "" if it does not record.

    TORCH_FR_BUFFER_SIZE, which `megaclip.engine.process_group` sets, turns it on.
    """
    recorder: Any = torch._C._distributed_c10d
    try:
        recorded = json.loads(recorder._dump_fr_trace_json())
        entries: list[dict[str, Any]] = recorded["entries"][-_SHOWN_COLLECTIVES:]
        lines = [
            f"  group {' '.join(entry['process_group'])}: collective {entry['collective_seq_id']} "
            f"{entry['profiling_name']} {entry['input_sizes']} {entry['input_dtypes']}, {entry['state']}, "
            f"{'retired' if entry['retired'] else 'not retired'}, time-out {entry['timeout_ms'] / 1000:.0f} s"
            for entry in entries
        ]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # another version of PyTorch
        return ""
    return "\n".join(["the last collectives that this rank has entered, the newest last:", *lines, ""])
