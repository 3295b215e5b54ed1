import sys

from linvit.cli import main

sys.exit(main())
