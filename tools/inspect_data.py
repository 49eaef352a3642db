"""`megaclip inspect`, from a checkout."""

from megaclip.commands.inspect_data import main

if __name__ == "__main__":
    main()
