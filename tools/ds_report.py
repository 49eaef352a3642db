"""DeepSpeed's environment report with MegaCLIP's op in it.

usage: python tools/ds_report.py [--hide_operator_status] [--hide_errors_and_warnings]

DeepSpeed's own `ds_report` never imports megaclip, so it cannot list an op that is registered in the running process.
"""

from deepspeed.env_report import cli_main

import megaclip  # noqa: F401  (registers the op)

if __name__ == "__main__":
    cli_main()
