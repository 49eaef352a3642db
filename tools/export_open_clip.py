"""`megaclip export`, from a checkout."""

from megaclip.commands.export_open_clip import main

if __name__ == "__main__":
    main()
