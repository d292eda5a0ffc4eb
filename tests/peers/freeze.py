"""Stops one thread of another process, and no other of its threads, until stdin ends.

    python3 freeze.py THREAD

Prints `frozen` once it stands still. It is traced for that: exit code 3 where the system does not allow it.
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
