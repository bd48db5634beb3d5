"""Where the machines of a run meet: torch's c10d rendezvous, with numbers of our own for machines and attempts."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from hp_core.config.launch import LaunchConfig
from hp_core.errors import InputError, RunError
from hp_core.parallel.attempts import RUN_DIRECTORY, Attempts, of_run
from hp_core.parallel.launching.records import Failure

# A machine that has said nothing for so long is gone: power and network fail without a word.
SILENCE_SECONDS = 20.0
_BEAT_SECONDS = 2.0
# How long to wait for what another machine has to say of a failure that both see.
_TELL_SECONDS = 5.0
_READ_SECONDS = 30
# How long the machine of the endpoint may take to have a name, and to start.
_NAME_SECONDS = 30.0
_ANSWER_SECONDS = 600.0
_CONNECT_SECONDS = 5.0
# How long the machines may take to come, and how long one waits for them without a word.
_JOIN_SECONDS = 600
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class Endpoint:
    """`HOST:PORT`, or a port of this machine that the system chooses when it is 0."""

    host: str
    port: int

    @classmethod
    def of(cls, config: LaunchConfig) -> Endpoint:
        """The endpoint of a recipe."""
        if config.rdzv_endpoint is None:
            return cls("localhost", 0)
        host, _, port = config.rdzv_endpoint.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_here(self) -> bool:
        """Whether the host is this machine: only an address of its own can be listened on.

        Raises:
            RunError: nothing is known of such a host.
        """
        for family, kind, _, _, address in self._looked_up():
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
        return False

    def _looked_up(self) -> list[Any]:
        deadline = time.monotonic() + _NAME_SECONDS
        while True:
            try:
                return socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)
            except OSError as error:
                # Where machines are made for a job, the first one's name may not be known before it is there.
                if time.monotonic() > deadline:
                    raise RunError(
                        f"launch.rdzv_endpoint: host {self.host!r} can't be found: {error.strerror}; name one of the "
                        "machines"
                    ) from error
            time.sleep(0.5)

    def answers(self) -> bool:
        """Whether somebody listens there, or does so in a while. Torch would tell every try, with its stack."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((self.host, self.port), timeout=_CONNECT_SECONDS):
                return True
            time.sleep(0.2)
        return False

    def own_address(self) -> str | None:
        """The IPv4 address by which this machine reaches the endpoint; None if there is none."""
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it only has the kernel choose a route.
            probe.connect((self.host, self.port))
            address = str(probe.getsockname()[0])
            return None if address.startswith("127.") else address
        return None


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address."""
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


@contextmanager
def _told(text: str | None) -> Iterator[None]:
    """Say, once, what is waited for if it takes long."""
    timer = threading.Timer(_PATIENCE_SECONDS, partial(print, text, file=sys.stderr, flush=True))
    timer.daemon = True
    if text is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Meeting(RendezvousHandler):
    """A rendezvous whose machines agree on their order, on the number of the attempt, and on what went wrong.

    Ranks make their process group in the very store that the machines meet at: were there another, on the first
    machine, as torch has it, it would be lost with that one, and machines that replace it would look for it in vain.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.endpoint = Endpoint.of(config)
        self.is_alone = config.max_nodes == 1
        self._node_rank = config.node_rank
        number = f"{config.max_nodes}" if config.min_nodes == config.max_nodes else str(config.nnodes)
        self._awaited = f"{number} machines, this one among them, for {_JOIN_SECONDS:g} s at most"
        self._run_id = config.rdzv_id or "hyperparallel"
        self.address = None if self.is_alone else self.endpoint.own_address()
        self._handler = self._connect(config)
        self.attempt = 0
        self.rank = 0
        self.size = 1

    def _connect(self, config: LaunchConfig) -> RendezvousHandler:
        """Join, or host what the others join."""
        is_host = True if self.is_alone else self.endpoint.is_here()
        for hosts in (True, False) if is_host else (False,):
            if not hosts:
                with _told(f"waiting for {self.endpoint} to answer, for {_ANSWER_SECONDS:g} s at most"):
                    answers = self.endpoint.answers()
                if not answers:
                    break
            parameters = RendezvousParameters(
                backend="c10d",
                endpoint=str(self.endpoint),
                run_id=self._run_id,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                local_addr=self.address,
                is_host=hosts,
                read_timeout=_READ_SECONDS,
                keep_alive_interval=2,
                keep_alive_max_attempt=5,
                last_call_timeout=10,
                join_timeout=_JOIN_SECONDS,
            )
            with suppress(RendezvousConnectionError):
                return get_rendezvous_handler(parameters)
        raise RunError(
            f"no machine answers at launch.rdzv_endpoint {str(self.endpoint)!r}; start the run on {self.endpoint.host} "
            "too, and let its port through the firewall"
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the machines are there."""
        with _told(None if self.is_alone else f"waiting at {self.endpoint} for {self._awaited}"):
            info = self._handler.next_rendezvous()
        self._round = info.store
        self._root: dist.TCPStore = info.store.underlying_store  # type: ignore[attr-defined]
        place = RendezvousStoreInfo(self._root.host, self._root.port)
        if info.rank == 0:
            # Nobody uses it, but a machine that comes anew waits for it, and torch tells it in the first round alone.
            self._round.set(RendezvousStoreInfo.MASTER_ADDR_KEY, place.master_addr)
            self._round.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(place.master_port))
        self.size = info.world_size
        self.rank = self._agreed_rank(info.rank, info.world_size)
        if self.rank == 0:
            self._round.set("hp/attempt", str(self._root.add(f"hp/{self._run_id}/attempts", 1) - 1))
        self.attempt = int(self._round.get("hp/attempt"))
        self._round.set(f"hp/host/{self.rank}", socket.gethostname())
        self._hosts = [self._round.get(f"hp/host/{rank}").decode() for rank in range(self.size)]
        self._beats = dict.fromkeys(range(self.size), (0, time.monotonic()))
        self._next_beat = 0.0
        return RendezvousInfo(self._round, self.rank, self.size, place)

    def _agreed_rank(self, rank: int, size: int) -> int:
        """The place that this machine asked for, if all did."""
        self._round.set(f"hp/node_rank/{rank}", "" if self._node_rank is None else str(self._node_rank))
        asked = [self._round.get(f"hp/node_rank/{one}").decode() for one in range(size)]
        if "" in asked:
            if any(asked):
                raise InputError(f"--node-rank is given on {size - asked.count('')} of {size} machines: give it on all")
            return rank
        if len(set(asked)) < size:
            raise InputError(f"several machines have the same --node-rank: {', '.join(sorted(asked))}")
        return sorted(map(int, asked)).index(int(asked[rank]))

    @property
    def host(self) -> str:
        """This machine's name."""
        return self._hosts[self.rank]

    def lost(self) -> str | None:
        """The name of a machine that hasn't been heard of for long; tells the others that this one is there."""
        now = time.monotonic()
        if self.is_alone or now < self._next_beat:
            return None
        self._next_beat = now + _BEAT_SECONDS
        self._round.add(f"hp/beat/{self.rank}", 1)
        for rank, (count, since) in self._beats.items():
            latest = self._round.add(f"hp/beat/{rank}", 0)
            if latest != count:
                self._beats[rank] = (latest, now)
            elif now - since > SILENCE_SECONDS:
                return self._hosts[rank]
        return None

    def count_failure(self) -> int:
        """Note that this attempt has failed, whichever machine says so first; returns how many have."""
        if self._round.add("hp/failed", 1) == 1:
            self._round.set("hp/failures", str(self._root.add(f"hp/{self._run_id}/failures", 1)))
        return int(self._round.get("hp/failures"))

    def run_directory(self) -> Path | None:
        """Where the run writes, once an attempt has begun to."""
        kept = Attempts(self.attempt + 1, of_run(self.get_run_id(), self._root)).recall(RUN_DIRECTORY)
        return None if kept is None else Path(kept)

    def tell(self, own: Failure) -> Failure:
        """Tell the others why ranks ended here, and return the first cause on any machine."""
        if self.is_alone:
            return own
        own = own.on(self.host)
        self._round.set(f"hp/cause/{self.rank}", own.as_json())
        causes = [own]
        deadline = time.monotonic() + _TELL_SECONDS
        silent = [rank for rank in range(self.size) if rank != self.rank]
        while silent and time.monotonic() < deadline:
            for rank in list(silent):
                if self._round.check([f"hp/cause/{rank}"]):
                    causes.append(Failure.from_json(self._round.get(f"hp/cause/{rank}")))
                    silent.remove(rank)
            time.sleep(0.05)
        found = [one for one in causes if not one.follows]
        if found:
            return min(found, key=lambda one: one.time)
        if silent:
            hosts = ", ".join(self._hosts[rank] for rank in silent)
            return Failure(-1, own.code, f"no answer from {hosts}: its ranks ended, or the network did", own.time)
        return min(causes, key=lambda one: one.time)

    def leave(self) -> None:
        """Wait until the others have heard everything, for the store may end with this machine."""
        if self.is_alone:
            return
        with suppress(dist.DistError, RuntimeError):
            self._round.add("hp/left", 1)
            deadline = time.monotonic() + _TELL_SECONDS
            while self._round.add("hp/left", 0) < self.size and time.monotonic() < deadline:
                time.sleep(0.05)

    # What the rest of torch's launcher asks for.

    def get_backend(self) -> str:
        """See the base class."""
        return self._handler.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """The ranks are clients of the store; none hosts it."""
        return True

    def is_closed(self) -> bool:
        """See the base class."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """See the base class."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """None that matter: torch would end ranks that are at work to let a machine in, and what they haven't saved."""
        return 0

    def get_run_id(self) -> str:
        """See the base class."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """See the base class."""
        return self._handler.shutdown()
