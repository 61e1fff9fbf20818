"""``python -m MODULE ...`` with a fork (``starter.interpreter``): passes signals on, and ends as the fork has ended.

Whoever kills this process kills the fork, too.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    address, option, module, *arguments = sys.argv[1:]
    if option != "-m":
        sys.exit(f"{sys.argv[0]}: {option} is not known, only -m")
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(address)
    request = json.dumps([module, arguments, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(link, [request], [0, 1, 2])
    pid = int(link.recv(64))
    for number in PASSED_ON:
        if signal.getsignal(number) is signal.SIG_IGN:
            continue  # by whoever started this
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(link.recv(64) or -signal.SIGKILL)  # with its parent
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
