"""Print DeepSpeed's environment report, including MegaCLIP's op.

usage: python tools/ds_report.py [--hide_operator_status] [--hide_errors_and_warnings]

DeepSpeed's own `ds_report` does not import megaclip, so it cannot list an op that megaclip registers.
"""

from deepspeed.env_report import cli_main

import megaclip  # noqa: F401  (registers the op)

if __name__ == "__main__":
    cli_main()
