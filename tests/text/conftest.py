"""What reads the public suite of JSON Schema is a module beside the tests, and a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
