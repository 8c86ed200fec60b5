"""`python -m deploy.demo`."""

import sys

from deploy.demo.main import main

sys.exit(main())
