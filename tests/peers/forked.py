"""Runs scripts in forks of a process that has imported PyTorch and transformers, which takes longer than most scripts.

    python3 forked.py serve NAME                  # until its standard input ends
    python3 forked.py ask NAME SCRIPT [ARGUMENT...]

A script has the arguments, environment, directory and standard streams of the process that asks for it. That process
ends with the exit code of the script; if it is killed, so are the script and its children. NAME is that of an abstract
socket.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback

IMPORTED = ["torch", "transformers.models.llama.modeling_llama", "peft", "trl.trainer.sft_trainer"]


def run(script):
    """Returns the exit code."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def answer(connection):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgrp()
    request, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    for stream, file in enumerate(files):
        os.dup2(file, stream)
        os.close(file)
    directory, environment, sys.argv = json.loads(request)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = os.path.dirname(sys.argv[0])

    def end_with_the_process_that_asked():
        connection.recv(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_the_process_that_asked, daemon=True).start()
    code = run(sys.argv[0])
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(bytes([code]))
    os._exit(code)


def serve(name):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(64)
    print("listening", flush=True)
    for module in IMPORTED:
        try:
            importlib.import_module(module)
        except ImportError:
            pass
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(connection)
        connection.close()
    # Nothing is left to do, and the interpreter would take seconds for it.
    os._exit(0)


def ask(name, *arguments):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{name}")
    request = json.dumps([os.getcwd(), dict(os.environ), arguments])
    socket.send_fds(connection, [request.encode()], [0, 1, 2])
    code = connection.recv(1)
    sys.exit(code[0] if code else f"{arguments[0]} was killed")


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
