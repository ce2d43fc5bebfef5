"""Processes that start warm: forked from one that has imported torch and slipstream already.

A fresh interpreter spends four to seven seconds of a core on imports, and the tests need over a hundred processes.
`use` puts `Popen` of this file in the place of subprocess's in the modules that start ours; what it forks can fork
further ones. pytest-xdist's own processes start warm too: it calls `python warm.py -u -c CODE` instead of `python -u -c
CODE` (conftest.py). A few tests start theirs cold, with the real thing (`cold` in conftest.py, and the tests of the
command).
No fork after CUDA: where there is a GPU, every process starts cold (conftest.py).

The server (`python warm.py DESCRIPTOR DESCRIPTOR PATH`) listens on a socket, which is there before the server is: a
request that comes too early waits. It is the command, its environment, its folder and its open files; the answer is
the process's number and, when it has ended, its status. The server goes when the process that started it goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

STARTERS = ("slipstream.distributed.launch", "slipstream.bench.race", "slipstream.bench.train")
PRELOADED = (
    "torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp", "slipstream.cli.train",
    "slipstream.train.session", "slipstream.bench.sample", "slipstream.bench.timeline", "slipstream.study.run",
    "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama", "hypothesis", "pytest",
)  # fmt: skip
NUMBER = struct.Struct("!q")
_place = Path()
_server = None  # its process and our end of the wire to it


# The side that starts processes -------------------------------------------------------------------------


class Popen:
    """As much of `subprocess.Popen` as is used here, for `[python, "-P", "-m", module, ...]` and for code (`-c`)."""

    def __init__(
        self, args, *, env=None, cwd=None, pass_fds=(), stdin=None, stdout=None, stderr=None, text=False
    ):
        assert args[0] == sys.executable, args
        server = path()
        self.args, self.returncode = args, None
        self.stdout, out = _end(stdout, 1, text)
        self.stderr, err = (None, out) if stderr == subprocess.STDOUT else _end(stderr, 2, text)
        blank = os.open(os.devnull, os.O_RDONLY) if stdin in (None, subprocess.DEVNULL) else os.dup(stdin)
        request = pickle.dumps(
            {
                "args": list(args[1:]),
                "environment": dict(os.environ if env is None else env),
                "folder": os.getcwd() if cwd is None else str(cwd),
                "asked_by": os.getpid(),
                "mask": set(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
                "targets": [0, 1, 2, *pass_fds],
            }
        )
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(server)
        socket.send_fds(self._server, [NUMBER.pack(len(request))], [blank, out, err, *pass_fds])
        self._server.sendall(request)
        os.close(blank)
        for end, taken in ((stdout, out), (stderr, err)):
            if end in (subprocess.PIPE, subprocess.DEVNULL):
                os.close(taken)
        self.pid = self._number()

    def _number(self):
        found = self._server.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(found) < NUMBER.size:
            raise RuntimeError("the server of warm processes is gone")
        return NUMBER.unpack(found)[0]

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._number())
            self._server.close()
        return self.returncode

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """What it said, of the ends that are pipes."""
        deadline = None if timeout is None else time.monotonic() + timeout
        said = {}
        left = [pipe for pipe in (self.stdout, self.stderr) if pipe is not None]
        while left:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = select.select(left, [], [], seconds)[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            for pipe in ready:
                part = os.read(pipe.fileno(), 1 << 16)
                said[pipe] = said.get(pipe, b"") + part
                if not part:
                    left.remove(pipe)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

        def words(pipe):
            if pipe is None:
                return None
            return said[pipe].decode() if isinstance(pipe, io.TextIOBase) else said[pipe]

        return words(self.stdout), words(self.stderr)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()


def _end(given, usual, text):
    """The reading end of a pipe, or None, and the descriptor that the process is given."""
    if given == subprocess.PIPE:
        reading, writing = os.pipe()
        return os.fdopen(reading, "r" if text else "rb"), writing
    if given == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    return None, usual if given is None else given if isinstance(given, int) else given.fileno()


def run(args, *, timeout=None, check=False, capture_output=False, **options):
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def children(pid):
    """The processes that process `pid` started. The parent of a warm one is the server; its name tells who asked."""
    with contextlib.suppress(OSError):
        if found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return [int(child) for child in found]
    found = []
    for name in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended since
            if name.read_text() == f"of {pid}\n":
                found.append(int(name.parent.name))
    return sorted(found)


def use(place):
    """From now on, where our modules start processes. `place`: the server's socket, or the folder for it."""
    global _place
    _place = Path(place)
    shim = SimpleNamespace(**{**vars(subprocess), "Popen": Popen, "run": run})
    for name in STARTERS:
        if name in sys.modules:  # else nobody here uses it
            sys.modules[name].subprocess = shim


def path():
    """The socket of the server, which is started when it is first needed."""
    global _place, _server
    if _place.is_dir():
        place = _place / "warm"
        ours, theirs = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(place))
        listener.listen(64)
        given = [theirs.fileno(), listener.fileno()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, __file__, *map(str, given), str(place)], pass_fds=given, env=environment
        )
        theirs.close()
        listener.close()
        _server = process, ours
        _place = place
    return str(_place)


def close():
    if _server is not None:
        process, ours = _server
        ours.close()
        process.wait()


# The server ---------------------------------------------------------------------------------------------


def serve(parent, listener):
    """Fork on request; in the forked process, return what it is to run."""
    parent, listener = socket.socket(fileno=parent), socket.socket(fileno=listener)
    awake, wake = os.pipe()
    for end in (awake, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for those that can answer it
    signal.set_wakeup_fd(wake)
    gc.freeze()
    asked = {}
    while True:
        ready = select.select([parent, listener, awake], [], [])[0]
        if parent in ready:
            os._exit(0)  # the process that started this one is gone
        if awake in ready:
            os.read(awake, 4096)
            _report(asked)
        if listener in ready:
            connection, _ = listener.accept()
            header, files, _, _ = socket.recv_fds(connection, NUMBER.size, 32)
            (length,) = NUMBER.unpack(header)
            request = pickle.loads(connection.recv(length, socket.MSG_WAITALL))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for end in (parent, listener, connection, *asked.values()):
                    end.close()
                os.close(awake)
                os.close(wake)
                return request, files
            for file in files:
                os.close(file)
            connection.sendall(NUMBER.pack(pid))
            asked[pid] = connection


def _report(asked):
    while asked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(OSError):  # nobody wants to know
            asked[pid].sendall(NUMBER.pack(status))
        asked.pop(pid).close()


def become(request, files):
    """Be the process that was asked for."""
    Path("/proc/self/comm").write_text(f"of {request['asked_by']}")
    targets = request["targets"]
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 512) for file in files]  # out of the way of every target
    for file in files:
        os.close(file)
    for file, target in zip(high, targets, strict=True):
        os.dup2(file, target)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    args = [arg for i, arg in enumerate(request["args"]) if i or arg != "-P"]
    kind, what = args[:2]
    sys.argv = args[1:]
    if kind == "-c":
        exec(what, {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1:3] == ["-u", "-c"]:  # as xdist calls it
        use(os.environ["WARM_PLACE"])
        sys.exit(Popen([sys.executable, *sys.argv[2:]], stdin=0).wait())

    import warm  # this file, by the name that forked processes know it by

    *descriptors, place = sys.argv[1:]
    for module in PRELOADED:
        if select.select([int(descriptors[0])], [], [], 0)[0]:
            sys.exit()  # the process that started this one is gone
        with contextlib.suppress(ModuleNotFoundError):  # transformers may be missing
            import_module(module)
    warm.use(place)
    become(*serve(*map(int, descriptors)))
