"""`python -m megaclip COMMAND ...`, and `deepspeed --module megaclip COMMAND ...` on every rank."""

from megaclip.commands import main

if __name__ == "__main__":
    main()
