"""What `make bench` starts: `python benchmarks/run.py --help` tells the options."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, rather than this folder
    from benchmarks.report import main

    sys.exit(main())
