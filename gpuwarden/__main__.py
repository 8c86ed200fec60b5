"""`python -m gpuwarden`, for a package on the path without its command."""

import sys

from gpuwarden.cli.main import main

sys.exit(main())
