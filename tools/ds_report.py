"""`megaclip report`, from a checkout."""

from megaclip.commands.ds_report import main

if __name__ == "__main__":
    main()
