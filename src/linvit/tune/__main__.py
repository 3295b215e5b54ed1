"""`python -m linvit.tune`: a worker process, which another process tells what to do."""

import sys

from linvit.tune.worker import main

sys.exit(main())
