"""`megaclip tokenizer`, from a checkout."""

from megaclip.commands.train_tokenizer import main

if __name__ == "__main__":
    main()
