"""Copy what the tests read, and not the packages, so that they can only import what is installed."""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What running the examples leaves behind.
LEFT_OUT = ("__pycache__", "runs", "build", "*.egg-info")
target = Path(sys.argv[1])
shutil.rmtree(target, ignore_errors=True)
target.mkdir(parents=True)
for name in ("tests", "examples", "docs", "README.md", "CHANGELOG.md", "constraints.txt", "setup.cfg"):
    source = ROOT / name
    if source.is_dir():
        shutil.copytree(source, target / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    else:
        shutil.copy(source, target / name)
