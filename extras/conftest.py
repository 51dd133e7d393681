"""Before a test is imported: put the root on the path, and tell Triton to interpret, which it decides when imported."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TRITON_INTERPRET", "1")
