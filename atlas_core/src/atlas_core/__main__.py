"""``python -m atlas_core`` is ``atlas``."""

import sys

from atlas_core.cli.main import main

sys.exit(main())
