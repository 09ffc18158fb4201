"""The faulty engines and what measures them are found by name, as a user's would be."""

import sys
from pathlib import Path

for _folder in ("engines", "shrinking"):
    sys.path.append(str(Path(__file__).parent / _folder))
