"""`python -m impatient train ...`: our command where a disk shows a new file at once or never."""

from slipstream.cli import main
from slipstream.train import same_folder

if __name__ == "__main__":
    same_folder.PATIENCE_SECONDS = 0.5
    main()
