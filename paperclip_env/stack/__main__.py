"""`python -m paperclip_env.stack`."""

import sys

from paperclip_env.stack.cli import main

sys.exit(main(sys.argv[1:]))
