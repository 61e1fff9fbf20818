"""What the command line imports."""

import sys

from areal_lora import launch

del sys.modules[launch.__name__]  # a fork runs it as its main program
