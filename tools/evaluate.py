"""`megaclip evaluate`, from a checkout."""

from megaclip.commands.evaluate import main

if __name__ == "__main__":
    main()
