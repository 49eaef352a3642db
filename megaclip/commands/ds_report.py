"""Print DeepSpeed's environment report, including MegaCLIP's op, and the optional packages that MegaCLIP detects.

DeepSpeed's own `ds_report` does not import MegaCLIP's losses, so it cannot list the op that they register.
"""

from importlib import metadata

from megaclip.commands.argument_types import CommandParser
from megaclip.errors import ConfigError


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the table of DeepSpeed's ops")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out why ops cannot be built")
    parser.parse_args()  # DeepSpeed's report reads the same flags
    from deepspeed.env_report import cli_main  # torch is imported after the flags are read

    import megaclip.losses  # noqa: F401  (registers the op)
    from megaclip.comm.parallelism import require_megatron
    from megaclip.models.layers import require_apex

    cli_main()
    print("MegaCLIP's optional packages:")
    for name, require in (("megatron-core", require_megatron), ("apex", require_apex)):
        try:
            require()
        except ConfigError as error:
            print(f"{name} .......... not usable: {error}")
        else:
            version = metadata.version("megatron-core") if name == "megatron-core" else "with CUDA extensions"
            print(f"{name} .......... usable, {version}")
