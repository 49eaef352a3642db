"""`megaclip check-hosts`, from a checkout."""

import sys

from megaclip.commands.check_hosts import main

if __name__ == "__main__":
    sys.exit(main())
