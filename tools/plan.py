"""`megaclip plan`, from a checkout."""

import sys

from megaclip.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
