"""One action of a hostile user, chosen by a seed: files of its job, its processes, sockets, and the daemon's socket.

Usage: hostile_actions.py SEED NODE HOME CANARY DAEMON_PID HONEST_DIR [AGENT_DIR]. HOME belongs to the user, NODE holds
the daemon's directories. Prints its action, and `unreaped MARK` for jobs whose reaper it attacks.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time

seed, node, home, canary, daemon, honest = sys.argv[1:7]
agent = sys.argv[7] if len(sys.argv) > 7 else None
random.seed(int(seed))
daemon_socket = f"{node}/xlaunch.sock"
HOLD_SECONDS = 1.5
NAMES = [
    "agent.sock", "agent.log", "status.pb", ".status.pb.new", "result.json", ".result.json.new", "agent.json", "lock",
    "begun-1", "begun-2", "ticket-1", "logs", "logs/attempt_0", "logs/attempt_0/0", "logs/attempt_0/0/stdout.log",
    "logs/attempt_0/0/stderr.log", "unknown",
]


def replace(path):
    """Removes whatever is at this path; renames it if it is a directory."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.isdir(path) and not os.path.islink(path):
        os.rename(path, f"{home}/old-{time.monotonic_ns()}")
    elif os.path.lexists(path):
        os.unlink(path)


def link(path):
    targets = [canary, "/etc/shadow", f"/proc/{daemon}/mem", f"/proc/{daemon}/environ", honest, "/dev/zero", "/dev/tty",
               f"{honest}/result.json", f"{honest}/agent.sock", f"{node}/state/journal", path, "/", "/proc/self/fd/0"]
    os.symlink(random.choice(targets), path)


def listen(path):
    """Listens, accepts, and answers with garbage, for a while."""
    with socket.socket(socket.AF_UNIX) as server:
        # An absolute path may be too long for a socket, but a relative one is not.
        os.chdir(os.path.dirname(path))
        server.bind(os.path.basename(path))
        server.listen()
        server.settimeout(HOLD_SECONDS)
        try:
            while True:
                connection, _ = server.accept()
                connection.sendall(os.urandom(random.choice([0, 100, 100_000])))
        except OSError:
            pass


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(random.choice([1 << 20, 1 << 21, 1 << 40]))


def garbage(path):
    with open(path, "wb") as file:
        file.write(os.urandom(random.choice([1, 1000, 2_000_000])))


def nest(path):
    os.mkdir(path)
    os.chdir(path)
    for _ in range(10_000):
        os.mkdir("d")
        os.chdir("d")
    os.chdir("/")


def widen(path):
    os.mkdir(path)
    for number in range(20_000):
        os.close(os.open(f"{path}/{number}", os.O_CREAT | os.O_WRONLY))


def files():
    path = f"{agent}/{random.choice(NAMES)}"
    kinds = [link] * 5 + [listen, sparse, sparse, garbage, garbage, os.mkfifo, os.mkdir, nest, widen]
    kinds.append(lambda path: os.link(random.choice([canary, f"{node}/daemon.toml", f"{node}/state/journal"]), path))
    kinds.append(lambda path: os.rename(f"{agent}/{random.choice(NAMES)}", path))
    kind = random.choice(kinds)
    print(kind.__name__, path)
    replace(path)
    kind(path)
    if random.random() < 0.2 and not os.path.islink(path):
        os.chmod(path, random.choice([0o000, 0o1777, 0o4777]))


def bait():
    """Replaces a file that the daemon reads for users by a link to a file that only root can read."""
    name = random.choice(["logs", "logs/attempt_0/0", "logs/attempt_0/0/stdout.log", "logs/attempt_0/0/stderr.log",
                          "result.json"])
    print("bait", name)
    replace(f"{agent}/{name}")
    os.symlink(f"{node}/bait/{name}", f"{agent}/{name}")
    if name == "result.json":
        # The daemon reads it once the agent has exited.
        command = b"xlaunch\0agent\0" + agent.encode() + b"\0"
        for pid in os.listdir("/proc"):
            if pid.isdigit() and read(pid, "cmdline") == command:
                os.kill(int(pid), signal.SIGKILL)


def forge():
    pids = [1, int(daemon), 0, -1, 2**32 - 1, 2**40]
    pids += [int(name) for name in os.listdir("/proc") if name.isdigit()][:50]
    identity = {"protocol": 3, "version": "0.2.0", "pid": random.choice(pids), "started": random.choice([0, 1, 2**63]),
                "boot": open("/proc/sys/kernel/random/boot_id").read().strip(), "start": random.choice([1, 2])}
    result = {"exit": random.choice([0, 1, 255, 256, -1, "0", None]), "stopped": random.choice([True, False]),
              "reason": "forged\n\x1b[2J " * random.choice([1, 10_000]), "report": "r\n" * random.choice([1, 300_000]),
              "rank": random.choice([None, 0, 2**32]), "attempt": 0, "start": random.choice([0, 1, 2, 2**32])}
    name, content = random.choice([("agent.json", identity), ("result.json", result), ("result.json", result)])
    print("forge", name, str(content)[:200])
    replace(f"{agent}/{name}")
    with open(f"{agent}/{name}", "w") as file:
        json.dump(content, file)


def lock():
    with open(f"{agent}/{random.choice(['lock', 'result.json', 'agent.log', 'begun-1'])}", "a") as file:
        print("lock", file.name)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(HOLD_SECONDS)


def modes():
    path = random.choice([agent, f"{agent}/logs", f"{agent}/logs/attempt_0/0", f"{agent}/agent.sock"])
    mode = random.choice([0o000, 0o1777, 0o777, 0o2777, 0o700, 0o700, 0o700])
    print("chmod", oct(mode), path)
    os.chmod(path, mode)


def rename():
    print("rename", agent)
    for source, target in [(agent, f"{home}/taken-{time.monotonic_ns()}"), (f"{agent}/logs", f"{home}/logs-{seed}")]:
        try:
            os.rename(source, target)
        except OSError as error:
            print(error)


def read(pid, name):
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def parent(pid):
    return read(pid, "stat").rpartition(b") ")[2].split()[1:2]


def signals():
    """Kills or stops a process of a job: an agent, a worker, rarely a reaper."""
    mine = [pid for pid in os.listdir("/proc") if pid.isdigit() and os.stat(f"/proc/{pid}").st_uid == os.getuid()]
    is_of_node = lambda pid: node.encode() in read(pid, "cmdline") + read(pid, "environ")
    agents = [pid for pid in mine if read(pid, "cmdline").startswith(b"xlaunch\0agent\0") and is_of_node(pid)]
    workers = [pid for pid in mine if b"HOSTILE_MARK=" in read(pid, "environ") and is_of_node(pid) and b"python3" not in
               read(pid, "cmdline")]
    reapers = [pid for pid in mine if read(pid, "cmdline").startswith(b"launch-reaper") and
               any(agent.encode() in parent(pid) for agent in agents)]
    victims = random.choice([agents, agents, workers, workers, reapers])
    if not victims:
        return
    victim, number = random.choice(victims), random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    print("signal", number, victim, read(victim, "cmdline"))
    if victims is reapers:
        # If they have left its session, it is unknown which of them belong to the job.
        for worker in workers:
            print("\nunreaped", read(worker, "environ").partition(b"HOSTILE_MARK=")[2].partition(b"\0")[0].decode())
    os.kill(int(victim), number)


def squat():
    """Takes names in the temporary directory, and listens on ports."""
    print("squat")
    for name in ["xlaunch-0", "xlaunch-1", "xlaunch", "xlaunch.sock"]:
        if not os.path.lexists(f"/tmp/{name}"):
            os.symlink(canary, f"/tmp/{name}")
    servers = []
    for port in random.sample(range(20_000, 60_000), 50):
        server = socket.socket()
        servers.append(server)
        try:
            server.bind(("127.0.0.1", port))
            server.listen()
        except OSError:
            pass
    time.sleep(HOLD_SECONDS)


def connect():
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(HOLD_SECONDS)
    connection.connect(daemon_socket)
    return connection


def half_open():
    print("half-open connections")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    connections = []
    try:
        for _ in range(100):
            connections.append(connect())
            connections[-1].sendall(preface[: random.randrange(len(preface) + 1)])
    except OSError as error:
        print(error)
    time.sleep(HOLD_SECONDS)


def bytes_on_socket():
    """Garbage, and valid HTTP/2 frames with garbage in them."""
    print("garbage on the socket")
    preface, settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\4\0\0\0\0\0"
    end = time.monotonic() + 0.3

    def send():
        while time.monotonic() < end:
            try:
                connection = connect()
                data = random.choice([b"", preface, preface + settings])
                for _ in range(random.randrange(20)):
                    payload = os.urandom(random.randrange(100))
                    kind, stream = random.randrange(12), random.choice([0, 1, 3, 5])
                    data += len(payload).to_bytes(3, "big") + bytes([kind, random.randrange(256)])
                    data += stream.to_bytes(4, "big") + payload
                connection.sendall(data)
                connection.recv(1000)
            except OSError:
                pass

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def clean():
    print("clean")
    for entry in os.listdir(home):
        if entry.startswith(("old-", "logs-")):
            shutil.rmtree(f"{home}/{entry}", ignore_errors=True)


on_job = [files] * 10 + [bait] * 6 + [forge] * 3 + [lock, modes, rename] + [signals] * 3
on_node = [squat, half_open, bytes_on_socket, clean]
try:
    random.choice(on_job * 2 + on_node if agent else on_node)()
except (OSError, ValueError, RecursionError) as error:
    print(error)
