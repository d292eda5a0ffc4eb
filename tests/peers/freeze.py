"""Stops one thread of another process until stdin is closed; its other threads continue.

    python3 freeze.py THREAD

Prints `frozen` when the thread has stopped. Uses ptrace: exit code 3 if that is not permitted.
"""

import ctypes
import os
import sys

ATTACH, DETACH = 16, 17
ANY_THREAD = 0x40000000  # __WALL

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
thread = int(sys.argv[1])
if libc.ptrace(ATTACH, thread, None, None) != 0:
    print(f"thread {thread}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    sys.exit(3)
os.waitpid(thread, ANY_THREAD)
print("frozen", flush=True)
sys.stdin.read()
libc.ptrace(DETACH, thread, None, None)
