"""Runs a program on its own terminal: `terminal.py STEPS PROGRAM ARGUMENT...`.

STEPS is JSON, a list of `["expect", TEXT]`, which waits for TEXT in the output since the last match, and `["send",
KEYS]`. Then waits for the program to end. Prints everything that the terminal showed, and exits like the program.
"""

import json
import os
import pty
import select
import sys
import termios
import time

# Time limit for a program that hangs; nothing is measured with it.
TIMEOUT = 120


def main():
    steps, command = json.loads(sys.argv[1]), sys.argv[2:]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    before = termios.tcgetattr(terminal)
    shown, at, deadline = b"", 0, time.monotonic() + TIMEOUT

    def read():
        """Returns False at the end of the terminal."""
        nonlocal shown
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            fail("timed out")
        try:
            piece = os.read(terminal, 4096)
        except OSError:
            piece = b""
        shown += piece
        return piece != b""

    def fail(reason):
        sys.stdout.buffer.write(shown)
        sys.stdout.buffer.flush()
        os.kill(pid, 9)
        sys.exit(f"{reason}: {step}")

    for step in steps:
        kind, text = step[0], step[1].encode()
        if kind == "send":
            os.write(terminal, text)
            continue
        while text not in shown[at:]:
            if not read():
                fail("the program ended")
        at = shown.index(text, at) + len(text)
    step = "the end"
    modes = termios.tcgetattr(terminal)
    while read():
        pass
    _, status = os.waitpid(pid, 0)
    sys.stdout.buffer.write(shown)
    if modes[:4] != before[:4]:
        sys.exit("the modes of the terminal have changed")
    sys.exit(os.waitstatus_to_exitcode(status) % 256)


main()
