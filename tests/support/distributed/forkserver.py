"""The parent of `multiprocessing`'s forkserver context, in a fork; its arguments are ``SOCKET FIFO``.

It ends with whoever holds the other end of ``FIFO``.
"""

import os
import socket
import sys
from multiprocessing.forkserver import main

if __name__ == "__main__":
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    main(listener.detach(), os.open(sys.argv[2], os.O_RDONLY), [])
