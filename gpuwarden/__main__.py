"""`python -m gpuwarden`, where the package is on the path but its command is not (a worker image, say)."""

import sys

from gpuwarden.cli.main import main

sys.exit(main())
