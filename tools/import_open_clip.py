"""`megaclip import`, from a checkout."""

from megaclip.commands.import_open_clip import main

if __name__ == "__main__":
    main()
