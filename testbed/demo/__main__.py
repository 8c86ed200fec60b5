"""`python -m testbed.demo`."""

import sys

from testbed.demo.main import main

sys.exit(main())
