"""Two machines made of this one: network namespaces with a veth pair between them, and a name each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

_CAN_NOT = "no network namespace can be made here"


@dataclass(frozen=True)
class Host:
    """A machine, which lasts as long as the process that keeps it."""

    name: str
    address: str
    keeper: subprocess.Popen[str]

    def command(self, *arguments: str) -> list[str]:
        """What runs a command there."""
        enter = [
            "nsenter",
            "--target",
            str(self.keeper.pid),
            "--user",
            "--preserve-credentials",
            "--net",
            "--uts",
            "--mount",
        ]
        return [*enter, *arguments]

    def run(self, *arguments: str) -> None:
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, (arguments, done.stderr)

    @contextmanager
    def hp_train(self, *arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            self.command(sys.executable, "-u", "-m", "hp_core", *arguments),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        try:
            yield process
        finally:
            self.kill()
            process.wait()
            process.stdout.close()

    def processes(self) -> list[int]:
        """Every process of the machine but the one that keeps it."""
        here = os.readlink(f"/proc/{self.keeper.pid}/ns/net")
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(path / "ns" / "net") == here and int(path.name) != self.keeper.pid:
                    found.append(int(path.name))
        return found

    def kill(self) -> None:
        """End every process at once; the kernel still tells the other machine."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def unplug(self) -> None:
        """Let nothing in or out any more; no one is told."""
        self.run("ip", "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        self.run("ip", "link", "set", "eth0", "up")


@contextmanager
def _kept(*command: str, name: str, names: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in namespaces of its own, ready when it says so; it ends with its input."""
    # Nobody answers questions for names here; without a server to ask, that is known at once.
    lookup = 'mount --bind "$1" /etc/hosts && mount --bind /dev/null /etc/resolv.conf'
    script = f'hostname "$0" && {lookup} && ip link set lo up && echo ready && exec cat'
    keeper = subprocess.Popen(
        [*command, "unshare", "--net", "--uts", "--mount", "sh", "-c", script, name, str(names)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        if keeper.stdout.readline() != "ready\n":
            pytest.skip(f"{_CAN_NOT}: {keeper.stderr.read().strip()}")
        yield keeper
    finally:
        keeper.communicate()


@contextmanager
def two_hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """`left` and `right`, which reach each other and nothing else; the test is skipped, and says why, without them."""
    names = tmp_path / "hosts"
    # Torch asks for the name of an address as IPv6 has it.
    lines = [
        f"{prefix}10.77.0.{number} {name}" for number, name in ((1, "left"), (2, "right")) for prefix in ("", "::ffff:")
    ]
    names.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    for tool in ("unshare", "nsenter", "ip", "hostname", "mount"):
        if shutil.which(tool) is None:
            pytest.skip(f"{_CAN_NOT}: there is no `{tool}`")
    with ExitStack() as stack:
        # Root of a user namespace may do it all, whoever that is outside.
        first = stack.enter_context(_kept("unshare", "--user", "--map-root-user", name="left", names=names))
        into = ("nsenter", "--target", str(first.pid), "--user", "--preserve-credentials")
        second = stack.enter_context(_kept(*into, name="right", names=names))
        hosts = (Host("left", "10.77.0.1", first), Host("right", "10.77.0.2", second))
        peer = ("peer", "name", "eth0", "netns", str(second.pid))
        hosts[0].run("ip", "link", "add", "eth0", "type", "veth", *peer)
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.plug_in()
        yield hosts
