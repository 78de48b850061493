"""python -m lazyzero"""

import sys

from lazyzero.cli import main

sys.exit(main())
