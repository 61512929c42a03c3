"""``python -m fsdpc.checkpoint``."""

import sys

from fsdpc.checkpoint.cli import main

sys.exit(main())
