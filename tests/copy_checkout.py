"""Copy what the tests read, and not the packages, so that they can only import what is installed."""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
target = Path(sys.argv[1])
shutil.rmtree(target, ignore_errors=True)
target.mkdir(parents=True)
for name in ("tests", "examples", "docs", "README.md", "CHANGELOG.md", "constraints.txt", "setup.cfg"):
    source = ROOT / name
    if source.is_dir():
        shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    else:
        shutil.copy(source, target / name)
