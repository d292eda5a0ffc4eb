"""Two nodes with 2 gloo workers each: time to start, to end after a failure, and to train again.

    python3 tests/peers/several_nodes.py torchrun target/release/xlaunch [--rounds 10] [--cases start,worker] [--json F]

The nodes are network namespaces of this machine (root; `ip`, `nft`, `nsenter`, `unshare`), and the Python that runs
this script must have PyTorch. Every round has new namespaces. Ranks all-reduce every 50 ms; failures occur after 2 s,
on node 1. `--preload torch` is passed on to xlaunch, as `PET_PRELOAD`. Times are in seconds:

    start      from the start of both launchers to rank 0's first all-reduce
    worker     a worker is killed, no restart is allowed: until no process is left on either node
    restart    a worker is killed, three restarts are allowed: until rank 0's next all-reduce
    agent      the launcher on node 1 is killed: until no process is left on either node
    host       node 1 is cut off: until no process is left on either node

An event that has not happened after --limit seconds counts as never.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

CASES = ["start", "worker", "restart", "agent", "host"]
START_LIMIT = 120
WORKERS = 2
INTERVAL = 0.05
TRAINING_TIME = 2


def worker(log):
    """One rank. Appends `host rank process step time` to the log; step -1 is the start of the process."""
    where = f"{os.uname().nodename} {os.environ['RANK']} {os.getpid()}"

    def record(step):
        with open(log, "a") as file:
            file.write(f"{where} {step} {time.time()}\n")

    record(-1)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(1_000_000):
        dist.all_reduce(torch.ones(1000))
        record(step)
        time.sleep(INTERVAL)


def run(command, text=""):
    subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.DEVNULL)


class Namespaces:
    """Namespaces kept alive by `cat`, which exits when its input, a pipe from this process, is closed. All processes
    inside then end."""

    def __init__(self, options, files, setup):
        script = f"set -e\n{setup}\necho ready\nexec env --ignore-signal=CHLD cat > /dev/null"
        command = ["unshare", *options, "sh", "-c", script]
        self.keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self.keeper.stdout.readline() != b"ready\n":
            sys.exit("cannot create namespaces")
        self.pid = self.keeper.pid
        self.enter = ["nsenter"] + [f"--{option}=/proc/{self.pid}/ns/{file}" for option, file in files.items()]

    def close(self):
        self.keeper.stdin.close()
        self.keeper.wait()
        self.keeper.stdout.close()


class Host(Namespaces):
    FILES = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt", "pid": "pid_for_children"}

    def __init__(self, name, scratch, variables):
        setup = f"echo {name} > /proc/sys/kernel/hostname\nmount -t tmpfs t /dev/shm\nmount -t tmpfs t /run\n"
        setup += f"mkdir -m 700 -p /run/user/0 /run/tmp\nmount --bind {scratch}/names /etc/hosts"
        options = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        super().__init__(options, self.FILES, setup)
        self.name, self.scratch, self.variables = name, scratch, variables
        init = pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0]
        self.proc = pathlib.Path(f"/proc/{init}/root/proc")

    def start(self, command):
        """Starts a launcher, with its output in a file."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLAUNCH_", "PET_", "TORCHELASTIC_"))}
        environment |= {"XDG_RUNTIME_DIR": "/run/user/0", "TMPDIR": "/run/tmp", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"PYTHON_EXEC": sys.executable, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        environment |= {"XLAUNCH_TOKEN": "several-nodes-on-one-machine", **self.variables}
        command = [*self.enter, f"--wdns={self.scratch}", "setsid", *command]
        with open(self.scratch / f"{self.name}.log", "w") as log:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def is_empty(self):
        return all(entry == "1" for entry in os.listdir(self.proc) if entry.isdecimal())

    def outer(self, pid):
        """Returns the process id, in this process's namespace, of a process on the host."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid_for_children")
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            try:
                status = pathlib.Path(f"/proc/{entry}/status").read_text()
                ids = status.split("NSpid:")[1].split("\n")[0].split()
                if ids[-1] == str(pid) and os.readlink(f"/proc/{entry}/ns/pid") == namespace:
                    return int(entry)
            except OSError:
                pass
        raise RuntimeError(f"no process {pid} on {self.name}")


class Line:
    def __init__(self, text):
        self.host, *numbers = text.split()
        self.rank, self.pid, self.step = map(int, numbers[:3])
        self.time = float(numbers[3])


class Round:
    """Two hosts on a switch, and a launcher on each."""

    def __init__(self, launcher, restarts, backend, variables, scratch):
        self.scratch, self.log = scratch, scratch / "log"
        (scratch / "names").write_text("127.0.0.1 localhost\n10.77.0.10 h0\n10.77.0.11 h1\n")
        self.switch = Namespaces(["--net"], {"net": "net"}, "")
        run([*self.switch.enter, "ip", "-batch", "-"], "link add br0 type bridge\nlink set br0 up\n")
        self.hosts = []
        for index in range(2):
            host = Host(f"h{index}", scratch, variables)
            self.hosts.append(host)
            port = f"link add p{index} type veth peer name eth0 netns {host.pid}\n"
            port += f"link set p{index} master br0\nlink set p{index} up\n"
            run([*self.switch.enter, "ip", "-batch", "-"], port)
            interface = f"addr add 10.77.0.1{index}/24 dev eth0\nlink set lo up\nlink set eth0 up\n"
            run([*host.enter[:2], "ip", "-batch", "-"], interface)
        flags = ["--nnodes", "2", "--nproc-per-node", str(WORKERS), "--max-restarts", str(restarts)]
        flags += ["--rdzv-backend", backend, "--rdzv-id", "job"]
        flags += ["--rdzv-endpoint", "h0:" + {"c10d": "29400", "static": "29500"}[backend]]
        target = [str(pathlib.Path(__file__).resolve()), "--worker", str(self.log)]
        self.started = time.time()
        self.agents = []
        for index, host in enumerate(self.hosts):
            rank = ["--node-rank", str(index)] if backend == "static" else []
            self.agents.append(host.start([launcher, *flags, *rank, *target]))

    def lines(self):
        text = self.log.read_text() if self.log.exists() else ""
        return [Line(line) for line in text.split("\n")[:-1]]

    def wait(self, limit, poll):
        """Returns the result of `poll` once it is true; None after `limit` seconds."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if found := poll():
                return found
            time.sleep(0.005)
        return None

    def first_step(self):
        poll = lambda: next((line for line in self.lines() if line.rank == 0 and line.step == 0), None)
        found = self.wait(START_LIMIT, poll)
        if not found:
            raise RuntimeError("no all-reduce\n" + "".join(p.read_text() for p in self.scratch.glob("h*.log"))[-3000:])
        return found

    def ended(self, limit):
        """Returns the time when no process is left on either host."""
        return self.wait(limit, lambda: all(host.is_empty() for host in self.hosts) and time.time())

    def worker_on_node_1(self):
        """Returns the process id of a worker on node 1, as seen from outside."""
        return self.hosts[1].outer(next(line.pid for line in self.lines() if line.host == "h1"))

    def cut(self):
        rules = "table bridge x { chain f { type filter hook forward priority 0; drop; }; }\n"
        run([*self.switch.enter, "nft", "-f", "-"], rules)

    def close(self):
        for namespaces in [*self.hosts, self.switch]:
            namespaces.close()
        for agent in self.agents:
            agent.wait()


def measure(case, round, limit):
    """Returns the time of one round; None for never."""
    first = round.first_step()
    if case == "start":
        return first.time - round.started
    time.sleep(TRAINING_TIME)
    if case in ("worker", "restart"):
        pid = round.worker_on_node_1()
    elif case == "agent":
        pid = int(pathlib.Path(f"/proc/{round.agents[1].pid}/task/{round.agents[1].pid}/children").read_text())
    failed = time.time()
    if case == "host":
        round.cut()
    else:
        os.kill(pid, signal.SIGKILL)
    if case == "restart":
        is_next = lambda line: line.rank == 0 and line.pid != first.pid and line.step >= 0
        found = round.wait(limit, lambda: next(filter(is_next, round.lines()), None))
        return found and found.time - failed
    ended = round.ended(limit)
    return ended and ended - failed


def rows(case, launcher, times):
    finite = sorted(at for at in times if at is not None)
    median = f"{statistics.median(finite):.2f}" if finite else "-"
    high = f"{finite[min(len(finite) - 1, int(0.99 * len(finite)))]:.2f}" if finite else "-"
    print(f"| {case} | {launcher} | {median} | {high} | {len(times) - len(finite)} of {len(times)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launchers", nargs="*", help="programs with torchrun's command line")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--backend", choices=["c10d", "static"], default="c10d")
    parser.add_argument("--preload", help="Python modules that xlaunch preloads")
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker)
    print("| case | launcher | median (s) | 99 % (s) | never |\n|---|---|---|---|---|")
    results = []
    variables = {"PET_PRELOAD": options.preload} if options.preload else {}
    for case in options.cases.split(","):
        for launcher in options.launchers:
            name = pathlib.Path(launcher).name
            path = launcher if "/" not in launcher else str(pathlib.Path(launcher).resolve())
            times = []
            for _ in range(options.rounds):
                with tempfile.TemporaryDirectory(prefix="xsn-") as scratch:
                    restarts = 3 if case == "restart" else 0
                    round = Round(path, restarts, options.backend, variables, pathlib.Path(scratch))
                    try:
                        times.append(measure(case, round, options.limit))
                    finally:
                        round.close()
            rows(case, name, times)
            load = os.getloadavg()[0]
            results.append({"case": case, "launcher": name, "backend": options.backend, "seconds": times, "load": load})
    if options.json:
        text = json.dumps({"limit": options.limit, "cpus": os.cpu_count(), "results": results}, indent=1)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
