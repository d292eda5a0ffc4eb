# The preloading process: imports modules once, then forks workers when xlaunch's agent requests them.
#
# Run as `python -u -c PROGRAM SOCKET AGENT MODULE,... -- PYTHON -u SCRIPT ARGUMENT...`. SOCKET is the descriptor number
# of the socket to the agent, AGENT the agent's process id. The command line of a worker follows `--`. The program uses
# only the standard library of Python 3.8. Messages are JSON, preceded by their length. Strings from the agent contain
# one character per byte, because arguments and environments need not be UTF-8.
#
# A worker is forked twice, so that it becomes a child of the agent, which is a subreaper. It starts once the agent has
# adopted it, in the same state as a new interpreter: see `become_worker` and `run`. Frames of this program are removed
# from its tracebacks.
import sys

NEW_MAIN = {name: value for name, value in globals().items() if name != "sys"}

import ctypes
import importlib
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import struct
import types
import warnings

PR_SET_PDEATHSIG = 1
PR_SET_MM = 35
PR_SET_MM_ARG_END = 9
CUDA_ERROR_NOT_INITIALIZED = 3
# Descriptors of a request: stdin, stdout, stderr, and the pipe on which the agent confirms that it adopted the worker.
DESCRIPTORS = 4
INT_BYTES = struct.calcsize("i")

# Modules imported together with the named one, because scripts import them late, which takes seconds in every attempt.
LATE_IMPORTS = {"torch": "torch._dynamo"}

libc = ctypes.CDLL(None, use_errno=True)


def main():
    number, agent, modules = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
    command_line = sys.argv[sys.argv.index("--") + 1 :]
    os.set_inheritable(number, False)
    control = socket.socket(fileno=number)
    os.dup2(2, 1)
    area = command_line_area()
    # The first word of `command_line` is not used: it may be a wrapper that starts the interpreter.
    interpreter = ctypes.string_at(area[0]) if area[0] else os.fsencode(sys.executable)
    show_command_line(area, [interpreter, b"-u", b"xlaunch-preload", *map(os.fsencode, modules)])
    # With a safe path (`-P`, `-I`), `sys.path` has no entry for the script.
    old_path = new_path = None
    if sys.path[:1] == [""]:
        sys.path[0] = old_path = script_directory(command_line)
    sys.argv = command_line[2:]
    send(control, {"error": import_all(modules), "threads": other_threads()})
    request, descriptors = serve(control)
    command_line = [interpreter, *(word.encode("latin-1") for word in request["argv"][1:])]
    become_worker(request, descriptors, agent)
    show_command_line(area, command_line)
    command_line = [os.fsdecode(word) for word in command_line]
    if old_path is not None and old_path in sys.path:
        sys.path[sys.path.index(old_path)] = script_directory(command_line)
    run(command_line)


def import_all(modules):
    """Imports the modules. Returns the reason why they cannot be used, or None."""
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            import traceback

            traceback.print_exception(type(error), error, error.__traceback__.tb_next)
            reason = traceback.format_exception_only(type(error), error)[-1].strip()
            return f"`import {module}` failed: {reason}"
        if module in LATE_IMPORTS:
            try:
                importlib.import_module(LATE_IMPORTS[module])
            except BaseException:
                                pass  # the script may not need it
        used = cuda_in_use()
        if used:
            return f"`import {module}` initialised CUDA, which does not survive a fork: {used}"
    return None


def cuda_in_use():
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "`torch.cuda.is_initialized()` is true"
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None  # it is not loaded
    # Open device files would not prove anything: NVML opens the same ones, and survives a fork.
    if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED:
        return "the driver library is initialised"
    return None


def other_threads():
    """Returns the names of other threads, which forked workers will not have."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as comm:
                if int(thread) != os.getpid():
                    names.append(comm.read().strip())
        except OSError:
            pass  # it has exited
    return names


def serve(control):
    """Forks workers. Returns only in the workers, each with its request and descriptors."""
    while True:
        request, descriptors = receive(control)
        if request is None:
            os._exit(0)
        try:
            pid = fork_twice()
        except OSError as error:
            send(control, {"error": f"fork: {error.strerror}"})
            pid = None
        if pid == 0:
            control.close()
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        if pid:
            send(control, {"pid": pid})


def fork_twice():
    """Forks a grandchild that leads a process group. Returns its process id once its parent has exited, and 0 in it."""
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        pid = -1
        try:
            os.close(reader)
            pid = fork()
            if pid > 0:
                os.setpgid(pid, pid)
                os.write(writer, str(pid).encode())
        except OSError as error:
            os.write(writer, str(-error.errno).encode())
        finally:
            if pid != 0:
                os._exit(0)
        os.close(writer)
        return 0
    os.close(writer)
    pid = int(os.read(reader, 32) or b"-5")
    os.close(reader)
    os.waitpid(child, 0)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return pid


def fork():
    with warnings.catch_warnings():
        # Python 3.12 warns if there are other threads; the agent has told the user.
        warnings.simplefilter("ignore")
        return os.fork()


def become_worker(request, descriptors, agent):
    """Waits until the agent has adopted this process, then sets it up like a program that the agent starts."""
    stdin, stdout, stderr, adopted = descriptors
    if os.read(adopted, 1) == b"":
        os._exit(1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
    # If the agent died before this call, the signal is never sent.
    if os.getppid() != agent:
        os._exit(1)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    # A worker that reads the terminal must be stopped, rather than get an error, until the agent lets it read.
    signal.signal(signal.SIGTTIN, signal.SIG_DFL)
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    reopen_stdin()
    for descriptor in descriptors:
        os.close(descriptor)
    if request["cpus"] is not None:
        os.sched_setaffinity(0, request["cpus"])
    for name in request["unset"]:
        os.environb.pop(name.encode("latin-1"), None)
    for name, value in request["set"]:
        os.environb[name.encode("latin-1")] = value.encode("latin-1")
    # `random` seeds itself after a fork; numpy's global generator does not.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def reopen_stdin():
    """Reopens `sys.stdin`, which was opened on the preloading process's own input, the way `python -u` opens it."""
    old = sys.stdin
    if old is not None:
        buffer = io.open(0, "rb", closefd=False)
        buffer.raw.name = "<stdin>"
        text = io.TextIOWrapper(buffer, encoding=old.encoding, errors=old.errors, write_through=True)
        sys.stdin = sys.__stdin__ = text
        sys.stdin.mode = "r"


def script_directory(command_line):
    """Returns the first entry of `sys.path` for this command line."""
    how = command_line[2]
    if how == "-m":
        return os.getcwd()
    if how == "-c":
        return ""
    return full_path(how) if is_archive(how) else os.path.dirname(os.path.realpath(how))


def is_archive(script):
    """Returns whether the script is a directory or an archive with a `__main__.py`."""
    return pkgutil.get_importer(script) is not None


def full_path(script):
    return os.path.abspath(script) if sys.version_info >= (3, 9) else script


def run(command_line):
    """Runs PYTHON -u SCRIPT, PYTHON -u -m MODULE or PYTHON -u -c TEXT with their arguments, as the interpreter does."""
    how, arguments = command_line[2], command_line[3:]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv = command_line
    main = types.ModuleType("__main__")
    main.__dict__.update(NEW_MAIN)
    sys.modules["__main__"] = main
    try:
        if how == "-m":
            sys.argv = [how, *arguments[1:]]
            runpy._run_module_as_main(arguments[0])
        elif how == "-c":
            sys.argv = [how, *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            sys.argv = [how, *arguments]
            run_script(how, main)
    except SystemExit:
        raise
    except BaseException:
        hide_own_frames()
        raise


def run_script(script, main):
    path = full_path(script)
    if is_archive(script):
        # Even with a safe path, as the interpreter does.
        if path not in sys.path:
            sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", False)
        return
    try:
        with io.open_code(os.path.abspath(script)) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    if sys.version_info < (3, 15):
        main.__cached__ = None
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def hide_own_frames():
    """Makes the interpreter report the exception being raised without the frames of this program."""
    hook, own = sys.excepthook, globals()

    def report(kind, error, trace):
        sys.excepthook = hook
        while trace is not None and trace.tb_frame.f_globals is own:
            trace = trace.tb_next
        error.__traceback__ = trace
        hook(kind, error, trace)

    sys.excepthook = report


def command_line_area():
    """Returns the start and end addresses of the memory where the kernel finds the command line of this process."""
    with open("/proc/self/stat", "rb") as stat:
        # Fields 48 and 49 of proc(5). The first one after the name in parentheses is field 3.
        fields = stat.read().rsplit(b") ", 1)[1].split()
    return int(fields[45]), int(fields[46])


def show_command_line(area, words):
    """Sets the command line that `ps` shows, unless it does not fit into the memory of the original one."""
    start, end = area
    text = b"".join(word + b"\0" for word in words)
    if 0 < start and len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
        # This needs CAP_SYS_RESOURCE. Without it, zero bytes follow the command line.
        libc.prctl(PR_SET_MM, PR_SET_MM_ARG_END, ctypes.c_ulong(start + len(text)), 0, 0)


def send(control, message):
    data = json.dumps(message).encode()
    try:
        control.sendall(struct.pack("!I", len(data)) + data)
    except OSError:
        os._exit(1)  # the agent is gone


def receive(control):
    """Receives a request and its descriptors; None at the end of the stream."""
    space = socket.CMSG_SPACE(DESCRIPTORS * INT_BYTES)
    data, ancillary, _, _ = control.recvmsg(4, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += struct.unpack(f"{len(payload) // INT_BYTES}i", payload)
    data += receive_exactly(control, 4 - len(data))
    if len(data) < 4:
        return None, []
    (length,) = struct.unpack("!I", data)
    return json.loads(receive_exactly(control, length)), descriptors


def receive_exactly(control, length):
    """Receives this many bytes, or fewer at the end of the stream."""
    data = bytearray()
    while len(data) < length:
        piece = control.recv(length - len(data))
        if not piece:
            break
        data += piece
    return bytes(data)


main()
