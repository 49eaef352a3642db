"""Print DeepSpeed's environment report, including MegaCLIP's op, and the optional packages that MegaCLIP detects.

usage: megaclip report [--hide_operator_status] [--hide_errors_and_warnings]

DeepSpeed's own `ds_report` does not import MegaCLIP's losses, so it cannot list the op that they register.
"""

from importlib import metadata

from deepspeed.env_report import cli_main

import megaclip.losses  # noqa: F401  (registers the op)
from megaclip.comm.parallelism import require_megatron
from megaclip.errors import ConfigError
from megaclip.models.layers import require_apex


def main() -> None:
    """Print both reports."""
    cli_main()
    print_optional_packages()


def print_optional_packages() -> None:
    """Print whether Megatron-core and NVIDIA apex can be used, and why not."""
    print("MegaCLIP's optional packages:")
    for name, require in (("megatron-core", require_megatron), ("apex", require_apex)):
        try:
            require()
        except ConfigError as error:
            print(f"{name} .......... not usable: {error}")
        else:
            version = metadata.version("megatron-core") if name == "megatron-core" else "with CUDA extensions"
            print(f"{name} .......... usable, {version}")
