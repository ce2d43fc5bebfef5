"""`python -m run_script FOLDER NAME`: run NAME.py of FOLDER as a user does, in a process that may be a fork."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    folder, name = sys.argv[1:3]
    sys.path.insert(0, folder)
    runpy.run_path(str(Path(folder) / f"{name}.py"), run_name="__main__")
