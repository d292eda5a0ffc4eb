START = dict(globals())

import ctypes
import gc
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import warnings

PR_GET_PDEATHSIG = 2


def kind(value):
    return value if isinstance(value, (str, type(None))) else type(value).__name__


def status():
    with open("/proc/self/status") as file:
        fields = dict(line.rstrip("\n").split(":", 1) for line in file)
    names = ["Name", "Umask", "Groups", "Threads", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Cpus_allowed"]
    return {name: fields[name].strip() for name in names}


def descriptors():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the descriptor of the listing itself
        found[number] = [target.split("[")[0], os.get_inheritable(int(number))]
    return found


def stream(stream):
    raw = getattr(stream.buffer, "raw", stream.buffer)
    about = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through", "name")}
    about |= {"types": [kind(stream), kind(stream.buffer), kind(raw)], "seekable": stream.seekable(), "raw": raw.name}
    return about | {"mode": raw.mode, "closefd": raw.closefd, "isatty": stream.isatty()}


def parent_death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def spawned(queue):
    queue.put([__name__, sys.argv])


def spawn():
    """Environment of a child that multiprocessing starts with a new interpreter."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=spawned, args=(queue,))
    child.start()
    found = queue.get()
    child.join()
    return [found, child.exitcode, multiprocessing.current_process().name, multiprocessing.parent_process()]


def dump():
    parent = os.getppid()
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    with open("/proc/self/cmdline", "rb") as cmdline, open("/proc/self/cgroup") as cgroup:
        command_line, ranks_cgroup = cmdline.read().rstrip(b"\0").decode(), cgroup.read().strip().split("/")[-1]
    with open(f"/proc/{parent}/comm") as comm, open("/proc/self/oom_score_adj") as oom:
        parent_name, oom_score = comm.read(), oom.read()
    return {
        "main": {name: kind(value) for name, value in START.items()},
        "main_is_current": sys.modules["__main__"].__dict__ is globals(),
        "argv": sys.argv,
        "orig_argv": getattr(sys, "orig_argv", None),
        "command_line": command_line,
        "path": sys.path,
        "flags": str(sys.flags),
        "executable": sys.executable,
        "warnings": [sys.warnoptions, str(warnings.filters)],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile()],
        "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
        "original_streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "handlers": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "c_environment": sorted(subprocess.check_output(["env", "-0"]).decode().split("\0")),
        "directory": os.getcwd(),
        "parent": [parent_name, os.getsid(parent) == os.getsid(0)],
        "leads_group": os.getpgrp() == os.getpid(),
        "parent_death_signal": parent_death_signal(),
        "status": status(),
        "descriptors": descriptors(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "cgroup": ranks_cgroup,
        "oom_score": oom_score,
        "nice": os.nice(0),
        "spawn": spawn(),
    }


if __name__ == "__main__":
    found = json.dumps(dump())
    with open(os.environ["DUMP"] + os.environ["RANK"], "w") as file:
        file.write(found)
