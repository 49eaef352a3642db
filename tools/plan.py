"""`megaclip plan`, from a checkout."""

import sys

from megaclip.commands import main

if __name__ == "__main__":
    sys.argv.insert(1, "plan")
    main()
